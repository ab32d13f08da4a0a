"""Run by ComfyUI's Python: every node of ComfyUI that takes a CLIP or a VAE, with WanCore's on these sockets, and with
ComfyUI's own VAE of the same file. Prints one JSON object on its last line, by node: what came of it ("" for a result,
else the error), the same of ComfyUI's VAE, and the relative difference of the results.

    python native_sockets.py COMFYUI_PATH [NODE ...]
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
world = importlib.import_module("native_models")

VAE, LORA = "wan.safetensors", "lora.safetensors"
# Values of widgets by name; of sizes, those that fill latents and others.
WIDGETS = {"batch_size": 1, "tile_size": 64, "overlap": 16, "lora_name": LORA, "device": "default",
           "filename_prefix": "socket", "prompt": "a cat", "text": "a cat", "max_length": 8,
           "mode": {"mode": "single_speaker"}, "sampling_mode": {"sampling_mode": "off"}}  # fmt: skip
SIZES = {"even": {"width": 48, "height": 32, "length": 9, "video_frames": 9},
         "odd": {"width": 52, "height": 36, "length": 7, "video_frames": 7}}  # fmt: skip
# Nodes that take what only models of other families give.
SKIPPED = {
    "ControlNetApplyAdvanced": "a control net", "ControlNetApplySD3": "a control net",
    "ControlNetInpaintingAliMamaApply": "a control net", "GLIGENTextBoxApply": "GLIGEN",
    "LTXVLatentUpsampler": "an upscale model of LTX", "PhotoMakerEncode": "PhotoMaker",
    "QwenImageDiffsynthControlnet": "a patch of Qwen Image", "SUPIRApply": "a patch of SUPIR",
    "WanInfiniteTalkToVideo": "a patch of InfiniteTalk", "WanUni3CControlnetApply": "a patch of Uni3C",
    "ZImageFunControlnet": "a patch of Z-Image", "SDPoseKeypointExtractor": "SDPose",
    "VaeDecodeTextureTrellis": "Trellis",
}  # fmt: skip


def make_files(folder: Path) -> None:
    """A Wan 2.1 VAE in miniature that both loaders read, and a LoRA of the tiny MODEL."""
    import folder_paths
    import safetensors.torch
    import torch

    from wan_core.checkpoint import save
    from wan_core.checkpoint.random import random_module
    from wan_core.models.vae.config import VAE_21

    config = replace(VAE_21, encoder_dim=4, decoder_dim=4)
    save(random_module(config, device=torch.device("cpu"), dtype=torch.float32, seed=0), folder / VAE)
    safetensors.torch.save_file(
        {
            "diffusion_model.blocks.0.self_attn.q.lora_A.weight": world.rows(4, 48),
            "diffusion_model.blocks.0.self_attn.q.lora_B.weight": world.rows(48, 4),
        },
        folder / LORA,
    )
    for kind in ("vae", "loras"):
        folder_paths.add_model_folder_path(kind, str(folder))
    folder_paths.set_output_directory(str(folder / "output"))
    folder_paths.set_temp_directory(str(folder / "temp"))


def values(clip: Any, vision: Any) -> dict[str, Any]:
    """A value of each type. Pictures of a size and number that fill no latents."""
    import comfy.hooks
    import torch

    hooks = comfy.hooks.create_hook_lora(lora={}, strength_model=1.0, strength_clip=1.0)
    layers = [world.rows(1, 20, 1280, seed=n) for n in range(33)]
    pictures = torch.rand(7, 50, 44, 3, generator=torch.Generator().manual_seed(1))
    return {
        "CLIP": clip,
        "CLIP_VISION": vision,
        "CLIP_VISION_OUTPUT": vision.encode_image(pictures[:1], crop=False),
        "IMAGE": pictures,
        "MASK": (world.rows(7, 50, 44) > 0).float(),
        "LATENT": {"samples": world.rows(1, 16, 3, 4, 6)},
        "CONDITIONING": [[world.rows(1, 8, 64), {"pooled_output": None}]],
        "AUDIO": {"waveform": world.rows(1, 2, 16000), "sample_rate": 16000},
        "AUDIO_ENCODER_OUTPUT": {
            "encoded_audio_all_layers": layers,
            "encoded_audio": layers[0],
            "audio_samples": 16000,
        },
        "MODEL": world.tiny("WAN21_T2V"),
        "HOOKS": hooks,
        "WAN_CAMERA_EMBEDDING": world.rows(1, 6, 7, 36, 52),
        "COMFY_AUTOGROW_V3": {},
        "FLOAT,INT": 16.0,
    }


def inputs_of(node: Any, given: Mapping[str, Any], widgets: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each input of a node that has one."""
    chosen: dict[str, Any] = {}
    declared = node.INPUT_TYPES()
    for name, (kind, *more) in [*declared.get("required", {}).items(), *declared.get("optional", {}).items()]:
        options = more[0] if more else {}
        if name in ("image2", "image3"):  # the first shows as much
            continue
        if name in widgets:
            chosen[name] = widgets[name]
        elif isinstance(kind, list) or kind == "COMBO":
            choices = kind if isinstance(kind, list) else options["options"]
            chosen[name] = options.get("default", choices[0] if choices else "")
        elif "default" in options:
            chosen[name] = options["default"]
        elif kind in ("STRING", "INT", "FLOAT", "BOOLEAN"):
            chosen[name] = {"STRING": "a cat", "INT": options.get("min", 1), "FLOAT": 1.0, "BOOLEAN": True}[kind]
        elif kind in given:
            chosen[name] = given[kind]
        elif name in declared.get("required", {}):
            raise LookupError(f"no value of {kind} for {name}: give one, or name the node in SKIPPED")
    return chosen


def run(node: Any, inputs: dict[str, Any]) -> Any:
    """What a node returns."""
    if getattr(node, "INPUT_IS_LIST", False):
        inputs = {name: [value] for name, value in inputs.items()}
    if hasattr(node, "PREPARE_CLASS_CLONE"):
        node = node.PREPARE_CLASS_CLONE({"hidden_inputs": {}})
        returned = node.execute(**inputs)
        returned = asyncio.run(returned) if inspect.isawaitable(returned) else returned
        return getattr(returned, "result", returned)
    return getattr(node(), node.FUNCTION)(**inputs)


def tensors(value: Any) -> Iterator[Any]:
    """Those in what a node returned, in order."""
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for name in sorted(value):
            yield from tensors(value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


def outcome(node: Any, inputs: dict[str, Any]) -> tuple[str, list[Any]]:
    try:
        return "", list(tensors(run(node, inputs)))
    except Exception as fault:  # noqa: BLE001 - told to the test
        kind = type(fault)
        return f"{kind.__module__.partition('.')[0]} {kind.__name__}: {' '.join(str(fault).split())[:400]}", []


def difference(ours: list[Any], theirs: list[Any]) -> float:
    """The largest relative difference; infinite where shapes differ."""
    if [one.shape for one in ours] != [one.shape for one in theirs]:
        return float("inf")
    return max((world.error(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True) if b.any()), default=0.0)


def main(wanted: list[str]) -> dict[str, Any]:
    import nodes

    loaders = importlib.import_module("pack.nodes.part_loaders")
    tiny = "tiny (embedded)"
    clip, vision, ours = (
        asyncio.run(one).result[0]
        for one in (
            loaders.WanCoreTextEncoderLoader.execute(tiny, "checkpoint"),
            loaders.WanCoreVisionLoader.execute(tiny),
            loaders.WanCoreVAELoader.execute(VAE, "fp32"),
        )
    )
    theirs = nodes.VAELoader().load_vae(VAE)[0]
    results = {}
    for name in sorted(nodes.NODE_CLASS_MAPPINGS):
        node = nodes.NODE_CLASS_MAPPINGS[name]
        declared = node.INPUT_TYPES()
        kinds = {kind for group in ("required", "optional") for kind, *_ in map(list, declared.get(group, {}).values())
                 if isinstance(kind, str)}  # fmt: skip
        if not kinds & {"CLIP", "VAE"} or name in SKIPPED or (wanted and name not in wanted):
            continue
        given = values(clip, vision)
        if {"CLIP", "IMAGE"} <= kinds:  # editors of pictures, which make them large
            given["IMAGE"] = given["IMAGE"][:1]
        names = {name for group in ("required", "optional") for name in declared.get(group, {})}
        for size in SIZES if "height" in names else ("even",):
            both = [inputs_of(node, {**given, "VAE": vae}, {**WIDGETS, **SIZES[size]}) for vae in (ours, theirs)]
            said, made = outcome(node, both[0])
            results[f"{name}, {size}"] = {"ours": said}
            if "VAE" in kinds:
                said, expected = outcome(node, both[1])
                results[f"{name}, {size}"] |= {"theirs": said, "difference": difference(made, expected)}
    return results


if __name__ == "__main__":
    world.set_up(sys.argv[1])
    import server
    import torch

    server.PromptServer.instance = SimpleNamespace(client_id=None, sockets_metadata={}, send_progress_text=print)
    import nodes

    asyncio.run(nodes.init_builtin_extra_nodes())
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        make_files(Path(folder))
        print("\n" + json.dumps(main(sys.argv[2:])))
