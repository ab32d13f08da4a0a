"""What newer versions of ComfyUI can be told of a node, and older ones cannot: inputs that are folded away, words by
which the page's search finds a node, text that is shown again when a result comes from the cache. And the
numbers that no node takes."""

from __future__ import annotations

import functools
import inspect
from math import isfinite
from typing import Any

from comfy_api.latest import io

from wan_core.config import OptionError

# For inputs that few change: the page shows them when asked to.
ADVANCED: dict[str, Any] = {"advanced": True} if "advanced" in inspect.signature(io.Int.Input).parameters else {}

ALIASES = {
    "WanCoreModelLoader": ("wan", "wan 2.2", "wan fast", "unet loader", "gguf", "fp8", "block swap"),
    "WanCoreTextEncoderLoader": ("wan text encoder", "umt5", "clip loader", "t5"),
    "WanCoreVAELoader": ("wan vae", "load vae"),
    "WanCoreTextEncode": ("wan prompt", "clip text encode", "negative prompt"),
    "WanCoreEmptyLatent": ("wan empty latent", "empty video latent", "wan text to video"),
    "WanCoreImageToVideo": ("wan i2v", "wan image to video", "first last frame", "flf2v"),
    "WanCoreSampler": ("wan fast", "wan sampler", "ksampler", "wan 2.2", "lightning", "4 steps", "speed"),
    "WanCorePlanPreview": ("wan sigmas", "wan schedule", "steps preview"),
    "WanCoreVAEDecode": ("wan decode", "vae decode tiled"),
    "WanCoreDecodeToVideo": ("wan decode", "vae decode", "create video", "h264", "save video"),
    "WanCoreVAEEncode": ("wan encode", "vae encode"),
    "WanCoreReport": ("wan timing", "benchmark", "vram"),
    "WanCoreMagCache": ("magcache", "mag cache", "teacache", "easycache", "wan fast", "step caching", "cache"),
    "WanCoreTaylorSeer": ("taylorseer", "teacache", "easycache", "step caching", "cache"),
    "WanCoreAdaptiveCache": ("teacache", "easycache", "first block cache", "step caching", "wan fast", "cache"),
    "WanCoreGuidanceSchedule": ("cfg schedule", "cfg zero", "skip cfg", "guidance"),
    "WanCoreResolutionSchedule": ("progressive resolution", "jenga", "dynamic resolution", "wan fast"),
    "WanCoreCalibrate": ("magcache calibration", "magcache ratios"),
    "WanCoreCompare": ("compare videos", "psnr", "quality"),
    "WanCoreLoRA": ("wan lora", "lora loader", "lora stack", "lightx2v"),
    "WanCoreSparseAttention": ("sparse attention", "radial attention", "sage", "wan fast", "sla"),
    "WanCoreSpeedPreset": ("speed", "preset", "wan fast", "teacache", "step caching", "sparse attention"),
    "WanCoreNAG": ("nag", "normalized attention guidance", "negative prompt", "cfg 1"),
    "WanCoreMotionPositions": ("wan s2v", "sound to video", "speech to video"),
    "WanCoreSoundToVideo": ("wan s2v", "sound to video", "speech to video", "audio", "lip sync", "talking"),
    "WanCoreLauncher": ("multi gpu", "xdit", "ulysses", "parallel", "distributed"),
    "WanCoreAccelerate": ("wan fast", "sage", "sage attention", "sageattention", "flash attention", "patch sage"),
    "WanCoreNativePlan": ("wan schedule", "steps preview", "ksampler plan", "teacache", "magcache"),
    "WanCoreAnimate": ("wan animate", "pose video", "character replacement", "wan animate to video"),
    "WanCoreAnimate2": ("wan animate 2", "motion transfer", "driving video", "wan animate2 to video"),
    "WanCoreVACE": ("wan vace", "control video", "inpainting", "outpainting", "reference to video"),
    "WanCoreCamera": ("wan camera", "fun camera", "camera poses", "cameractrl", "camera trajectory"),
    "WanCoreContextWindows": ("context windows", "long video", "wan context windows", "freenoise"),
    "WanCoreVisionLoader": ("clip vision loader", "clip_vision_h", "wan animate", "wan i2v"),
    "WanCoreFromModel": ("wan bridge", "model to wancore", "convert model", "block swap", "wan fast"),
}  # fmt: skip


# Nodes that are no outputs and show text: it is shown again when their result comes from the cache.
SHOWS_TEXT = (
    "WanCoreModelLoader", "WanCoreTextEncoderLoader", "WanCoreVAELoader", "WanCoreLoRA", "WanCoreLauncher",
    "WanCoreSampler", "WanCoreFromModel", "WanCoreAccelerate", "WanCoreTextEncode", "WanCoreNAG", "WanCoreMagCache",
    "WanCoreTaylorSeer", "WanCoreAdaptiveCache", "WanCoreGuidanceSchedule", "WanCoreSparseAttention",
    "WanCoreSpeedPreset", "WanCoreResolutionSchedule", "WanCoreContextWindows", "WanCoreVisionLoader",
    "WanCoreEmptyLatent", "WanCoreImageToVideo", "WanCoreAnimate", "WanCoreAnimate2", "WanCoreSoundToVideo",
    "WanCoreVACE",
)  # fmt: skip


def newer(node_id: str) -> dict[str, Any]:
    """For `io.Schema`, as far as the running version has it."""
    fields = getattr(io.Schema, "__dataclass_fields__", {})
    told = {"search_aliases": list(ALIASES[node_id]), "has_intermediate_output": node_id in SHOWS_TEXT}
    return {name: value for name, value in told.items() if name in fields}


def with_finite_numbers(node: type[io.ComfyNode]) -> type[io.ComfyNode]:
    """`node`, which refuses numbers that are not finite before it runs: NaN passes ComfyUI's limits, and what comes
    through a link is not compared with them."""
    execute: Any = node.execute

    @functools.wraps(execute.__func__)
    def run(cls: type[io.ComfyNode], *args: Any, **inputs: Any) -> Any:
        for name, value in inputs.items():
            if isinstance(value, float) and not isfinite(value):
                raise OptionError(f"{name} {value:g} given; it takes a finite number")
        return execute.__func__(cls, *args, **inputs)

    node.execute = classmethod(run)  # type: ignore[method-assign, assignment]
    return node
