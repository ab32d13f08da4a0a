"""Run by ComfyUI's Python: tiny Wan models of its own classes with random weights, sampled by its own sampler with and
without WanCore Accelerate, for the programs beside this file."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACK = Path(__file__).resolve().parents[2]


def set_up(checkout: str) -> types.ModuleType:
    """ComfyUI and the pack in this process; gives the pack's `nodes`."""
    sys.path[:] = [checkout, *(path for path in sys.path if Path(path or ".").resolve() not in (PACK, PACK / "tests"))]
    importlib.import_module("utils.extra_config")  # as main.py does: a folder of ComfyUI has a module of this name
    cli = importlib.import_module("comfy.cli_args")
    cli.args.cpu = True
    spec = importlib.util.spec_from_file_location("pack", PACK / "__init__.py", submodule_search_locations=[str(PACK)])
    assert spec is not None and spec.loader is not None
    pack = sys.modules["pack"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pack)
    pack._name_engine()
    return importlib.import_module("pack.nodes")


SMALL = {"dim": 48, "ffn_dim": 64, "freq_dim": 32, "text_dim": 32, "num_heads": 2, "num_layers": 3, "in_dim": 16}
SIZE = (1, 16, 5, 8, 12)  # of latents
DTYPE = "float32"  # that models compute in
LAYERS, SAME = 3, 1e-5  # of a model; relative error of what is the same but for rounding


def tiny(kind: str, seed: int = 0, **changed: Any) -> Any:
    """A ModelPatcher around a model of ComfyUI, with random weights."""
    import comfy.model_patcher
    import comfy.supported_models
    import torch

    config = getattr(comfy.supported_models, kind)
    settings = {**config.unet_config, **SMALL, **changed}
    with torch.inference_mode(False), torch.no_grad():
        config_of_model = config(settings)
        config_of_model.set_inference_dtype(getattr(torch, DTYPE), None)
        model = config_of_model.get_model({})
        draw = torch.Generator().manual_seed(seed)
        for name, tensor in model.diffusion_model.named_parameters():
            torch.nn.init.normal_(tensor, std=0.1 if tensor.ndim > 1 else 0.02, generator=draw)
            if "norm" in name and name.endswith("weight"):
                tensor.add_(1)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=cpu, offload_device=cpu)


def rows(*shape: int, seed: int = 1) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Clip:
    """What CLIP_VISION_OUTPUT has."""

    def __init__(self, seed: int = 5) -> None:
        self.penultimate_hidden_states = rows(1, 7, 1280, seed=seed)


def variants() -> dict[str, tuple[Callable[[], Any], dict[str, Any], tuple[int, ...]]]:
    """Name -> model, conditions beside the text, size of latents."""
    _, _, T, Y, X = SIZE
    latent = rows(*SIZE, seed=7)
    frame = latent[:, :, :1]
    image = {"concat_latent_image": latent.clone(), "concat_mask": (rows(1, 1, T, Y, X) > 0).float()}
    audio = {"audio_dim": 32, "audio_inject_layers": [0, 2], "num_audio_token": 4}
    poses = {"pose_video_latent": latent.clone(), "reference_latents": [frame, frame * 0.5]}
    return {
        "t2v": (lambda: tiny("WAN21_T2V"), {}, SIZE),
        "i2v": (lambda: tiny("WAN21_I2V", in_dim=36), {**image, "clip_vision_output": Clip()}, SIZE),
        "i2v 2.2": (lambda: tiny("WAN21_T2V", in_dim=36), image, SIZE),
        "5B": (lambda: tiny("WAN22_T2V", in_dim=48, out_dim=48), {}, (1, 48, T, Y, X)),
        "fun": (lambda: tiny("WAN21_T2V", in_dim=32, in_dim_ref_conv=16), {"reference_latents": [frame]}, SIZE),
        "context": (lambda: tiny("WAN21_T2V"), {"context_latents": [latent[:, :, :2], frame]}, SIZE),
        "odd": (lambda: tiny("WAN21_T2V"), {}, (2, 16, 3, 7, 9)),
        "vace": (
            lambda: tiny("WAN21_Vace", vace_layers=3, vace_in_dim=96),
            {
                "vace_frames": [rows(1, 32, T, Y, X)] * 2,
                "vace_mask": [rows(1, 64, T, Y, X)] * 2,
                "vace_strength": [1.0, 0.5],
            },
            SIZE,
        ),
        "camera": (
            lambda: tiny("WAN22_Camera", in_dim=36),
            {**image, "camera_conditions": rows(1, 24, T, Y * 8, X * 8)},
            SIZE,
        ),
        "animate": (
            lambda: tiny("WAN22_Animate", in_dim=36, num_layers=5),
            {**image, "pose_video_latent": latent[:, :, :2], "clip_vision_output": Clip()},
            SIZE,
        ),
        "animate2": (
            lambda: tiny("WAN_Animate2", in_dim=36),
            {**image, "pose_video_latent": latent[:, :, 1:].clone(), "clip_vision_output": Clip()},
            SIZE,
        ),
        "s2v": (
            lambda: tiny("WAN22_S2V", **audio),
            {
                "audio_embed": rows(1, 25, 32, 4 * T),
                "reference_latents": [frame],
                "reference_motion": rows(1, 16, 19, Y, X),
            },
            SIZE,
        ),
        "humo": (
            lambda: tiny("WAN21_HuMo"),
            {"audio_embed": rows(1, T, 8, 5, 1280), "reference_latents": [latent[:, :, :1]]},
            SIZE,
        ),
        "scail": (lambda: tiny("WAN21_SCAIL", in_dim=20), {**poses, "clip_vision_output": Clip()}, SIZE),
        "wandancer": (lambda: tiny("WAN22_WanDancer", in_dim=36), image, SIZE),
    }


def conditions(extra: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    return [[rows(1, 6, 32, seed=2), dict(extra)]], [[rows(1, 6, 32, seed=3), dict(extra)]]


def sample(model: Any, extra: dict[str, Any], size: tuple[int, ...], steps: int = 3, **changed: Any) -> Any:
    """ComfyUI's KSampler."""
    import comfy.sample
    import torch

    how = {"cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "seed": 1, **changed}
    positive, negative = conditions(extra)
    with torch.inference_mode():
        return comfy.sample.sample(
            model, rows(*size, seed=9), steps, positive=positive, negative=negative,
            latent_image=torch.zeros(size), **how,
        )  # fmt: skip


class Accelerated:
    """Models through the node's own function; keeps the warnings and the counts of what it reports."""

    def __init__(self, pack: types.ModuleType) -> None:
        self.accelerate = importlib.import_module("pack.nodes.host.native_run").accelerate
        self.said: list[str] = []

    def __call__(self, model: Any, attention: str = "auto", sparse: Any = None) -> Any:
        from wan_core.config import SkipOptions

        return self.accelerate(model, attention, SkipOptions(sparse=sparse), self.report)

    def report(self, text: str) -> None:
        begins = "warning: ", "WanCore Accelerate: "
        self.said.append("\n".join(line for line in text.splitlines() if line.startswith(begins)))


def planned(
    model: Any, steps: int, cfg: float, sampler_name: str, scheduler: str = "simple", denoise: float = 1.0,
    model_low: Any = None, latent: Any = None, **more: Any,
) -> tuple[Any, str]:  # fmt: skip
    """Picture and table of the plan preview for ComfyUI's samplers with this MODEL."""
    preview = importlib.import_module("pack.nodes.report").WanCorePlanPreview
    native = importlib.import_module("pack.nodes.native_plan")
    settings = {"steps": steps, "guidance_high": cfg, "guidance_low": cfg, "denoise": denoise, **more}
    settings |= {"sampler_name": sampler_name, "scheduler": scheduler}
    return preview._shown(*native.native_plan(model, settings, model_low, latent)).result


def refusal(run: Callable[[], Any]) -> str:
    from wan_core.config import UserError

    try:
        run()
    except UserError as refused:
        return str(refused)
    return "not refused"


def error(actual: Any, expected: Any) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())
