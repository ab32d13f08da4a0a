"""Run by ComfyUI's Python: what nodes make of inputs in unusual forms. Every node that takes pictures, latents or
conditioning gets them as float16 and as float32, as other nodes give them with and without --fp16-intermediates. The
numbers are the same, and so must be the results. `native_checks` runs its checks.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import native_models as world

SIZE = {"width": 48, "height": 48, "frames": 5}
CAPTION = "a red circle moving right on a blue background"


def node(module: str, name: str, **inputs: Any) -> tuple[Any, ...]:
    result = getattr(importlib.import_module(f"pack.nodes.{module}"), name).execute(**inputs)
    return (asyncio.run(result) if inspect.iscoroutine(result) else result).result


def pictures(count: int = 5, seed: int = 1) -> Any:
    """Smooth ones in 0..1, [count, 48, 48, 3]."""
    import torch

    small = torch.rand(count, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(small, (48, 48), mode="bilinear").movedim(1, -1)


def latents(channels: int = 16) -> Any:
    return world.rows(1, channels, 2, 6, 6, seed=3)


def converted(value: Any, dtype: Any, copies: dict[int, Any] | None = None) -> Any:
    """Floating-point tensors in it rounded to float16, as `dtype`. What is there twice stays one object."""
    import torch

    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    if isinstance(value, torch.Tensor):
        changed = value.half().to(dtype) if value.is_floating_point() else value
    elif isinstance(value, Mapping):
        changed = {key: converted(one, dtype, copies) for key, one in value.items()}
    elif isinstance(value, list | tuple):
        changed = type(value)(converted(one, dtype, copies) for one in value)
    elif isinstance(value, SimpleNamespace):
        changed = SimpleNamespace(**converted(vars(value), dtype, copies))
    else:
        return value
    return copies.setdefault(id(value), changed)


def tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors(one)


class World:
    """Sockets of the embedded model, and calls with inputs in both forms."""

    def __init__(self, _: types.ModuleType) -> None:
        import folder_paths
        import server

        folder_paths.set_temp_directory(tempfile.mkdtemp())
        server.PromptServer.instance = SimpleNamespace(client_id=None, sockets_metadata={})
        tiny = "tiny (embedded)"
        [self.vae] = node("part_loaders", "WanCoreVAELoader", vae=tiny, precision="auto")
        [clip] = node("part_loaders", "WanCoreTextEncoderLoader", text_encoder=tiny, precision="checkpoint")
        texts = {"clip": clip, "positive": CAPTION, "negative": ""}
        self.positive, self.negative = node("prompts", "WanCoreTextEncode", **texts)
        [self.vision] = node("part_loaders", "WanCoreVisionLoader", clip_vision=tiny)

    def model(self, name: str, low: str | None = None) -> Any:
        files = {"high": name, "low": low or name, "precision": "checkpoint", "attention": "auto", "residency": "auto"}
        return node("model_loader", "WanCoreModelLoader", **files)[0]

    def same(self, call: Callable[..., Any], **inputs: Any) -> tuple[Any, ...]:
        """Both calls, compared; what the one with float16 gave."""
        import torch

        results = [call(**converted(inputs, dtype)) for dtype in (torch.float32, torch.float16)]
        expected, actual = (list(tensors(result)) for result in results)
        assert len(actual) == len(expected) > 0
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype != torch.float64 and one.isfinite().all()
            torch.testing.assert_close(one.float(), other.float(), rtol=1e-5, atol=1e-5)
        return results[1]


def check_image_to_video(it: World) -> None:
    """First and last frame, through our nodes and as ComfyUI's own give them, sampled and decoded."""
    both = {"positive": it.positive, "negative": it.negative, "vae": it.vae}
    images = {"first_image": pictures(1), "last_image": pictures(1, seed=2)}
    conditioning = it.same(
        lambda **images: node("conditioning", "WanCoreImageToVideo", **both, **SIZE, **images), **images
    )
    sample(it, it.model("tiny i2v (embedded)"), *conditioning)


def check_text_to_video(it: World) -> None:
    empty = {"samples": latents() * 0}
    sample(it, it.model("tiny (embedded)"), it.positive, it.negative, empty)
    options = {"denoise": 0.5, "steps": 4}
    sample(it, it.model("tiny (embedded)"), it.positive, it.negative, {"samples": latents()}, **options)


def sample(it: World, model: Any, positive: Any, negative: Any, latent: Any, **options: Any) -> None:
    plan = {"steps": 2, "shift": 0.0, "boundary": 0.0, "guidance_high": 0.0, "guidance_low": 0.0, "solver": "unipc"}
    arguments = {"model": model, "seed": 1, **plan, "guidance_mode": "auto", **options}
    latents = it.same(
        lambda **inputs: node("sampling", "WanCoreSampler", **arguments, **inputs)[:1],
        positive=positive,
        negative=negative,
        latent=latent,
    )
    decode(it, latents[0])


def decode(it: World, latent: Any) -> None:
    for tiling in ("auto", "always"):
        options = {"vae": it.vae, "tiling": tiling}
        it.same(
            lambda latent, options=options: node("video", "WanCoreVAEDecode", **options, latent=latent)[:1],
            latent=latent,
        )
    options = {"vae": it.vae, "fps": 8.0, "encoder": "fast", "tiling": "auto"}
    it.same(
        lambda latent: node("video", "WanCoreDecodeToVideo", **options, latent=latent)[0].get_components().images,
        latent=latent,
    )
    it.same(lambda samples: it.vae.decode(samples), samples=latent["samples"])


def check_pictures(it: World) -> None:
    it.same(lambda image: it.vae.encode(image), image=pictures())
    it.same(lambda image: it.vision.encode_image(image, crop=False).penultimate_hidden_states, image=pictures(1))
    compare = importlib.import_module("pack.nodes.card")
    it.same(lambda **both: [compare.WanCoreCompare.execute(**both).result[0]], full=pictures(), other=pictures(seed=2))


def check_driven(it: World) -> None:
    """What drives Animate, Animate-2 and S2V, and controls VACE."""
    shared = {"positive": it.positive, "negative": it.negative, "vae": it.vae, **SIZE}
    seen = SimpleNamespace(penultimate_hidden_states=world.rows(1, 7, 80))
    moving = {"reference_image": pictures(1), "pose_video": pictures(), "previous_frames": pictures(seed=4)}
    animate = {**moving, "face_video": pictures(seed=3), "background_video": pictures(seed=5)}
    animate |= {"character_mask": pictures(seed=6)[..., 0], "clip_vision_output": seen}
    it.same(lambda **media: node("animate", "WanCoreAnimate", **shared, **media), **animate)
    conditioning = it.same(
        lambda **media: node("animate", "WanCoreAnimate2", **shared, **media),
        **moving,
        clip_vision_output=seen,
    )
    sample(it, it.model("tiny animate 2 (embedded)", "none"), *conditioning[:3])
    heard = {"encoded_audio_all_layers": [world.rows(1, 40, 32, seed=n) for n in range(3)], "audio_samples": 16000}
    big = {**shared, "width": 64, "height": 64}
    sound = {**moving, "audio_encoder_output": heard}
    it.same(lambda **media: node("sound", "WanCoreSoundToVideo", **big, **media), **sound)
    control = {"control_video": pictures(), "control_masks": pictures(seed=6)[..., 0], "first_image": pictures(1)}
    control |= {"reference_images": pictures(1, seed=2), "last_image": pictures(1, seed=8)}
    it.same(lambda **media: node("control", "WanCoreVACE", **shared, strength=1.0, **media), **control)


def check_numbers_that_are_none(it: World) -> None:
    """No node takes NaN or infinity: ComfyUI's limits let NaN pass, and numbers from other nodes are not compared."""
    from wan_core.config import OptionError

    asked = 0
    for node_class in importlib.import_module("pack.nodes").NODES:
        for one in node_class.define_schema().inputs:
            if one.io_type != "FLOAT":
                continue
            for number in (math.nan, math.inf, -math.inf):
                asked += 1
                try:
                    result = node_class.execute(**{one.id: number})
                    said = f"{node_class.__name__}: {asyncio.run(result) if inspect.isawaitable(result) else result}"
                except OptionError as fault:
                    said = str(fault)
                assert said.startswith(f"{one.id} {number:g} given; it takes a finite number"), said
    assert asked > 60, asked


def check_models_in_results(it: World) -> None:
    """What each loader gives is a model to ComfyUI's cache of results, which lets old models go first."""
    from comfy.model_patcher import is_model_patcher_output

    tiny = "tiny (embedded)"
    [clip] = node("part_loaders", "WanCoreTextEncoderLoader", text_encoder=tiny, precision="checkpoint")
    for socket in (it.model(tiny), clip, it.vae, it.vision):
        assert is_model_patcher_output(socket), type(socket).__name__
