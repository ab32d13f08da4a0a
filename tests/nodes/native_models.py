"""Run by ComfyUI's Python: tiny Wan models of its own classes with random weights, sampled by its own sampler with and
without WanCore Accelerate. Prints one JSON object on its last line.

    python native_models.py COMFYUI_PATH CHECK ...
"""

from __future__ import annotations

import importlib
import importlib.util
import json
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
        self.native = importlib.import_module("pack.nodes.host.native")
        self.said: list[str] = []

    def __call__(self, model: Any, attention: str = "auto", sparse: Any = None) -> Any:
        return self.native.accelerate(model, attention, sparse, self.report)

    def report(self, text: str) -> None:
        begins = "warning: ", "WanCore Accelerate: "
        self.said.append("\n".join(line for line in text.splitlines() if line.startswith(begins)))


def planned(
    model: Any, steps: int, cfg: float, sampler_name: str, scheduler: str = "simple", denoise: float = 1.0,
    seconds_per_forward: float = 0.0, model_low: Any = None, latent: Any = None, **more: Any,
) -> tuple[Any, str]:  # fmt: skip
    """Picture and table of the plan preview for ComfyUI's samplers with this MODEL."""
    preview = importlib.import_module("pack.nodes.report").WanCorePlanPreview
    native = importlib.import_module("pack.nodes.native_plan")
    settings = {"steps": steps, "guidance_high": cfg, "guidance_low": cfg, "denoise": denoise, **more}
    settings |= {"sampler_name": sampler_name, "scheduler": scheduler}
    return preview._shown(*native.native_plan(model, settings, model_low, latent, seconds_per_forward)).result


def error(actual: Any, expected: Any) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def check_variants(pack: types.ModuleType, names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (make, extra, size) in variants().items():
        if names and name not in names:
            continue
        model, accelerated = make(), Accelerated(pack)
        plain = sample(model, extra, size)
        fast = sample(accelerated(model), extra, size)
        again = sample(model, extra, size)
        results[name] = {
            "error": error(fast, plain),
            "restored": bool((again == plain).all()),
            "finite": bool(plain.isfinite().all() and plain.std() > 0.01),
            "words": accelerated.said,
        }
    return results


def check_sparse(pack: types.ModuleType, names: list[str]) -> dict[str, Any]:
    """Reading all but a millionth of the blocks, and a quarter of them; and where the tokens of the video are."""
    from wan_core.config import SparseOptions

    sparse = importlib.import_module("wan_core.sampling.native.sparse")
    places: list[list[int]] = []

    class Recorded(sparse.NativeSparse):
        def _state(self, forward: Any, layer: int, rule: Any, grid: Any, q: Any, dense: Any) -> Any:
            places.append([forward.front, *grid, q.shape[1]])
            return super()._state(forward, layer, rule, grid, q, dense)

    importlib.import_module("wan_core.sampling.native.attention").NativeSparse = Recorded
    results: dict[str, Any] = {}
    for name, (make, extra, size) in variants().items():
        if names and name not in names:
            continue
        model, accelerated = make(), Accelerated(pack)
        plain = sample(model, extra, size)
        errors = []
        places.clear()
        for sparsity in (1e-6, 0.75):
            options = SparseOptions(sparsity=sparsity, dense_steps=0, ramp=0)
            errors.append(error(sample(accelerated(model, sparse=options), extra, size), plain))
        results[name] = {
            "errors": errors,
            "words": accelerated.said,
            "places": sorted(map(list, {*map(tuple, places)})),
        }
    return results


def check_order(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """LoRA and shift before and after the node, other overrides before and after it, two nodes, compiled."""
    import comfy.sd
    from comfy.ldm.modules.attention import attention_sub_quad
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    model, accelerated = tiny("WAN21_T2V"), Accelerated(pack)
    layer = "diffusion_model.blocks.1.self_attn.q.lora_"
    lora = {f"{layer}A.weight": rows(4, 48, seed=4), f"{layer}B.weight": rows(48, 4, seed=5)}

    def with_lora(model: Any) -> Any:
        return comfy.sd.load_lora_for_models(model, None, lora, 0.5, 0)[0]

    def with_shift(model: Any) -> Any:
        return ModelSamplingSD3().patch(model, 3.0)[0]

    def with_backend(model: Any) -> Any:
        patched = model.clone()
        patched.set_model_optimized_attention(attention_sub_quad)
        return patched

    def compiled(model: Any) -> Any:
        patched = model.clone()
        set_torch_compile_wrapper(patched, backend="eager")
        return patched

    plain = sample(model, {}, SIZE)
    results: dict[str, Any] = {}
    for name, change in (("lora", with_lora), ("shift", with_shift), ("backend", with_backend), ("compile", compiled)):
        expected = sample(change(model), {}, SIZE)
        results[name] = {
            "changes": error(expected, plain),
            "before": error(sample(accelerated(change(model)), {}, SIZE), expected),
            "after": error(sample(change(accelerated(model)), {}, SIZE), expected),
            "words": accelerated.said[-2:],
        }
    twice = accelerated(accelerated(model, "math"))
    results["twice"] = {
        "error": error(sample(twice, {}, SIZE), plain),
        "words": accelerated.said[-1:],
        "runs": len(accelerated.said),
    }
    return results


def check_parts(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """The steps of two samplers with an expert each, image to image, and samplers that evaluate twice in a step."""
    from wan_core.sampling.sparsity.schedule import PRESETS

    runs: list[Any] = []
    native = importlib.import_module("pack.nodes.host.native")

    class Recorded(native.NativeRun):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.seen: list[float] = []
            runs.append(self)

        def take(self, by: str) -> None:
            super().take(by)
            self.seen.append(self.sparsity)

    native.NativeRun = Recorded
    model = tiny("WAN21_T2V", num_layers=1)
    fast = Accelerated(pack)(model, sparse=PRESETS["balanced"])
    parts = [
        (0, 5, "euler", 1.0),
        (5, 10, "euler", 1.0),
        (0, 10, "euler", 0.5),
        (0, 10, "heun", 1.0),
        (0, 10, "uni_pc", 1.0),
    ]
    for first, last, sampler, denoise in parts:
        sample(fast, {}, SIZE, 10, start_step=first, last_step=last, sampler_name=sampler, denoise=denoise, cfg=1.0)
    return {
        "seen": [run.seen for run in runs],
        "parts": [[run.part.first, run.part.steps, run.part.total] for run in runs],
    }


def check_faults(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """Interrupted, or out of memory in a block: the next run is that of a fresh model, and nothing stays in options."""
    import comfy.model_management
    import torch

    from wan_core.config import SparseOptions

    sparse = SparseOptions(sparsity=0.5, dense_steps=0, ramp=0)
    results: dict[str, Any] = {}
    faults = {
        "interruption": comfy.model_management.InterruptProcessingException(),
        "memory": torch.cuda.OutOfMemoryError("no memory left, says the test"),
    }
    fresh = sample(Accelerated(pack)(tiny("WAN21_T2V"), sparse=sparse), {}, SIZE)
    for name, fault in faults.items():
        accelerated = Accelerated(pack)
        model = accelerated(tiny("WAN21_T2V"), sparse=sparse)
        before = sorted(model.model_options["transformer_options"])
        calls = []

        def stop(block: dict[str, Any], fault: BaseException = fault, calls: list[int] = calls) -> dict[str, Any]:
            calls.append(block["block_index"])
            if len(calls) == 5:
                raise fault
            return block

        broken = model.clone()
        broken.set_model_patch(stop, "double_block")
        try:
            sample(broken, {}, SIZE)
            raised = None
        except (torch.OutOfMemoryError, comfy.model_management.InterruptProcessingException) as seen:
            raised = type(seen).__name__
        results[name] = {
            "raised": raised,
            "said": len(accelerated.said),
            "left": sorted(model.model_options["transformer_options"]) != before,
            "same": bool((sample(model, {}, SIZE) == fresh).all() and (sample(model, {}, SIZE) == fresh).all()),
        }
    return results


def check_context(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """Context windows, with attention that reads all blocks."""
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    from wan_core.config import SparseOptions

    model, accelerated = tiny("WAN21_T2V"), Accelerated(pack)
    size = (1, 16, 9, 8, 12)
    windows = {"context_length": 17, "context_overlap": 5, "context_schedule": "standard_static", "context_stride": 1,
               "closed_loop": False, "fuse_method": "pyramid", "freenoise": False}  # fmt: skip
    windowed = WanContextWindowsManualNode.execute(model, **windows).result[0]
    plain = sample(windowed, {}, size)
    all_blocks = SparseOptions(sparsity=1e-6, dense_steps=0, ramp=0)
    return {
        "changes": error(plain, sample(model, {}, size)),
        "dense": error(sample(accelerated(windowed), {}, size), plain),
        "sparse": error(sample(accelerated(windowed, sparse=all_blocks), {}, size), plain),
        "words": accelerated.said,
    }


def check_devices(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """Conditions divided among two devices, a thread each, as ComfyUI's multi-GPU nodes have them."""
    import comfy.multigpu
    import torch

    from wan_core.config import SparseOptions

    devices = torch.device("cpu"), torch.device("cpu", 0)  # not equal: enough for its bookkeeping
    results: dict[str, Any] = {}
    model, other = tiny("WAN21_T2V"), tiny("WAN21_T2V")
    other.model.current_patcher = other
    for name, sparse in (("dense", None), ("sparse", SparseOptions(sparsity=0.5, dense_steps=0, ramp=0))):
        accelerated = Accelerated(pack)
        fast = accelerated(model, sparse=sparse)
        one = sample(fast, {}, SIZE)
        fast.model_options["multigpu_clones"] = {devices[0]: fast, devices[1]: other}
        fast.model_options["multigpu_thread_pool"] = comfy.multigpu.MultiGPUThreadPool(
            list(devices)
        )  # ends with the run
        results[name] = {"error": error(sample(fast, {}, SIZE), one), "words": accelerated.said}
    return results


def check_refusals(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """What the node refuses before any work."""
    import comfy.model_patcher
    import torch

    import wan_core.config as config

    accelerate = importlib.import_module("pack.nodes.accelerate").WanCoreAccelerate
    other = comfy.model_patcher.ModelPatcher(torch.nn.Linear(2, 2), None, None)
    other.model.diffusion_model = torch.nn.Linear(2, 2)
    sparse = config.SkipOptions(sparse=config.SparseOptions(sparsity=0.5))
    model, messages = tiny("WAN21_T2V"), {}
    for name, arguments in {
        "other": (other, "auto", "off"),
        "backend": (model, "flash4", "off"),
        "twice": (model, "auto", "balanced", sparse),
    }.items():
        try:
            accelerate.execute(*arguments)
        except config.UserError as fault:
            messages[name] = str(fault)
    return messages


CHECKS = {
    "variants": check_variants,
    "sparse": check_sparse,
    "order": check_order,
    "parts": check_parts,
    "faults": check_faults,
    "context": check_context,
    "devices": check_devices,
    "refusals": check_refusals,
}

if __name__ == "__main__":
    nodes = set_up(sys.argv[1])
    wanted = {name: CHECKS[name](nodes, sys.argv[3:]) for name in sys.argv[2].split(",")}
    print(json.dumps(wanted))
