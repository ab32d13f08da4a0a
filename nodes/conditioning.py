"""What goes into the sampler besides the model and the text: known images, empty latents."""

from __future__ import annotations

from typing import Any

import torch
from comfy_api.latest import io
from torch import Tensor

from wan_core.config import OptionError, check_choice, check_known
from wan_core.media.video import fit_image
from wan_core.models.vae.config import VAE_21, VAE_22, VAEConfig
from wan_core.models.wan.families import FAMILIES, image_task
from wan_core.models.wan.families.media import pixels_to_video
from wan_core.models.wan.families.task import Task
from wan_core.models.wan.families.wan.inputs import check_first, frame_mask, hold_first, known_frames, svi_clip
from wan_core.sampling.conditioning import empty_latents

from . import host
from .schema import output, schema
from .sockets import VAESocket
from .video_inputs import (
    VideoInputs,
    batch_input,
    check_room,
    conditioned_outputs,
    duration_input,
    fields_of,
    frames_in,
    size_inputs,
    size_words,
    text_and_vae,
)

WAN = FAMILIES["wan"]
LATENT_TYPES: dict[str, VAEConfig] = {"Wan 2.1 VAE (A14B, tiny)": VAE_21, "Wan 2.2 VAE (TI2V-5B)": VAE_22}


class WanCoreEmptyLatent(io.ComfyNode):
    """The size of the video to make."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreEmptyLatent",
            "WanCore Empty Latent",
            aliases="wan empty latent, empty video latent, wan text to video",
            shows_text=True,
            description="The size and length of a video, checked against what Wan can make.",
            inputs=[
                *size_inputs(),
                io.Combo.Input(
                    "latent_type",
                    options=list(LATENT_TYPES),
                    default=next(iter(LATENT_TYPES)),
                    tooltip="Whose latents these are: the VAE that belongs to the model.",
                ),
                batch_input(),
                duration_input(),
            ],
            outputs=[output(io.Latent, "latent", "For the sampler.")],
        )

    @classmethod
    def validate_inputs(
        cls,
        width: int | None = None,
        height: int | None = None,
        frames: int | None = None,
        latent_type: str | None = None,
        batch_size: int | None = 1,
        duration: float | None = 0.0,
    ) -> bool:
        if latent_type is not None:
            check_choice("latent type", latent_type, tuple(LATENT_TYPES))
        config = VAE_21 if latent_type is None else LATENT_TYPES[latent_type]
        size = width, height, frames_in(duration, frames, config)
        return check_room(WAN, config, size, batch=batch_size, before_run=True)

    @classmethod
    def execute(
        cls, width: int, height: int, frames: int, latent_type: str, batch_size: int = 1, duration: float = 0.0
    ) -> io.NodeOutput:
        check_choice("latent type", latent_type, tuple(LATENT_TYPES))
        config = LATENT_TYPES[latent_type]
        frames = frames_in(duration, frames, config) or frames
        check_room(WAN, config, (width, height, frames), batch=batch_size)
        latents = empty_latents(config, width, height, frames)
        samples = host.to_intermediate(latents.repeat(batch_size, 1, 1, 1, 1))
        return io.NodeOutput({"samples": samples}, ui=size_words(config, width, height))


class WanCoreImageToVideo(io.ComfyNode):
    """A known first frame, a known last frame, or both."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreImageToVideo",
            "WanCore Image to Video",
            aliases="wan i2v, wan image to video, first last frame, flf2v, keyframes, first middle last, svi, "
            "stable video infinity, endless video, long video",
            shows_text=True,
            description="Adds a first frame, a last frame, others between them or all of these to the conditioning of "
            "an image-to-video model; or the anchor and the latents before of a clip of SVI 2.0 Pro.",
            inputs=[
                *text_and_vae(),
                *size_inputs(),
                io.Image.Input(
                    "first_image",
                    optional=True,
                    tooltip="The first frame, or several: the last frames of a video that goes on. Scaled to cover the "
                    "video's size, what sticks out is cut off.",
                ),
                io.Image.Input(
                    "last_image",
                    optional=True,
                    tooltip="The last frame or frames, if the video should end there (A14B only).",
                ),
                io.ClipVisionOutput.Input(
                    "clip_vision_output",
                    optional=True,
                    tooltip="What ComfyUI's CLIPVisionEncode (clip_vision_h, crop none) sees in the first image. Wan "
                    "2.1 image-to-video needs it; other models do not use it.",
                ),
                batch_input(),
                io.Image.Input(
                    "keyframes",
                    optional=True,
                    tooltip="Pictures of frames between the first and the last, as one batch (Batch Images), in the "
                    "order of keyframe_numbers (A14B only).",
                ),
                io.String.Input(
                    "keyframe_numbers",
                    default="",
                    optional=True,
                    tooltip="Which frame of the video each picture of 'keyframes' is, counted from 0: '20, 40, 60'. "
                    "Multiples of 4 are best: there a keyframe is to the model as a last frame is.",
                ),
                io.Image.Input(
                    "anchor",
                    optional=True,
                    tooltip="A clip of SVI 2.0 Pro (its LoRAs on both experts, A14B only): the picture that every clip "
                    "of the video begins with, in place of first_image.",
                ),
                io.Latent.Input(
                    "previous",
                    optional=True,
                    tooltip="With 'anchor': the latents of the clip before, of which the last one is handed on. Remove "
                    "the first 2 latents of the new clip with TrimVideoLatent, join it to these with LatentConcat (t), "
                    "and decode all of them as one video.",
                ),
                duration_input(),
            ],
            outputs=conditioned_outputs(),
        )

    @classmethod
    def validate_inputs(
        cls,
        width: int | None = None,
        height: int | None = None,
        frames: int | None = None,
        keyframe_numbers: str | None = "",
        batch_size: int | None = 1,
        duration: float | None = 0.0,
    ) -> bool:
        frames = frames_in(duration, frames, VAE_21)
        if frames is not None:
            check_known(frame_numbers(keyframe_numbers or ""), frames)
        return check_room(WAN, VAE_21, (width, height, frames), batch=batch_size, before_run=True)

    @classmethod
    def execute(
        cls,
        vae: Any,
        frames: int,
        first_image: Tensor | None = None,
        last_image: Tensor | None = None,
        clip_vision_output: Any = None,
        batch_size: int = 1,
        keyframes: Tensor | None = None,
        keyframe_numbers: str = "",
        anchor: Tensor | None = None,
        previous: dict[str, Any] | None = None,
        duration: float = 0.0,
        **shared: Any,
    ) -> io.NodeOutput:
        task = image_task(vae.latent_channels)
        frames = frames_in(duration, frames, task.vae) or frames
        video = VideoInputs(vae=vae, frames=frames, config=task.vae, **shared)
        pictures = {"image": first_image, "last_image": last_image, "keyframes": keyframes}
        given = fields_of(pictures) if task.image == "channels" else ()
        check_room(WAN, task.vae, (*video.size, frames), batch=batch_size, given=given)
        first, last, others = (_frames(image, video.size) for image in pictures.values())
        between = by_number(others, frame_numbers(keyframe_numbers))
        latent = video.latent(batch=batch_size)
        check_anchor(task, anchor, previous, others=first is not None or bool(between))
        if task.image == "first frame":
            if last is not None or between:
                raise OptionError(f"{task.name} takes a first frame and no others: connect first_image alone")
            if first is not None:  # otherwise from text alone, as in ComfyUI's own node for this model
                check_first(first.shape[2], frames, task.vae)
                samples, unknown = hold_first(video.encode(first), latent["samples"])
                latent = {"samples": samples, "noise_mask": unknown}
            return video.outputs({}, {}, latent)
        if anchor is not None:
            encoded, unknown = anchored(video, _frames(anchor[:1], video.size), last, previous)
            values = {"concat_latent_image": host.to_intermediate(encoded), "concat_mask": unknown}
            return video.outputs(values, values, latent)
        if isinstance(vae, VAESocket):
            encoded, unknown = vae.encode_known(first, last, frames, between)
        else:
            clip, unknown = known_frames(first, last, frames, between)
            encoded = video.encode(clip)
        values = {"concat_latent_image": encoded, "concat_mask": frame_mask(unknown, encoded)}
        if clip_vision_output is not None:
            values["clip_vision_output"] = clip_vision_output
        return video.outputs(values, values, latent)


def _frames(image: Tensor | None, size: tuple[int, int]) -> Tensor | None:
    """The pictures of an IMAGE at `size` (width, height): [1, 3, N, H, W] in -1..1."""
    if image is None:
        return None
    pixels = (fit_image(one, size) for one in image[..., :3].cpu().float().numpy())
    return pixels_to_video(torch.stack([torch.from_numpy(one) for one in pixels]))


def check_anchor(task: Task, anchor: Tensor | None, previous: dict[str, Any] | None, *, others: bool) -> None:
    """Raise OptionError for a clip of SVI that cannot be. others: the first frame or keyframes are given, too."""
    if previous is not None and anchor is None:
        raise OptionError("previous connected without anchor: connect the picture that every clip begins with")
    if anchor is not None and task.image != "channels":
        raise OptionError(f"anchor connected for {task.name}: SVI 2.0 Pro is for image-to-video of Wan 2.2 A14B alone")
    if anchor is not None and others:
        raise OptionError("anchor connected, and first_image or keyframes: a clip of SVI begins with the anchor alone")


def anchored(
    video: VideoInputs, anchor: Tensor | None, last: Tensor | None, previous: dict[str, Any] | None
) -> tuple[Tensor, Tensor]:
    """Image latents and mask of a clip of SVI, see `svi_clip`. anchor, last: [1, 3, 1, H, W] in -1..1. Raises
    OptionError."""
    ends = [None if one is None else video.encode(one[:, :, -1:]).float() for one in (anchor, last)]
    before = None if previous is None else previous["samples"][:, :, -1:]
    assert ends[0] is not None
    if before is not None and (before.ndim != 5 or before.shape[1:] != ends[0].shape[1:]):
        raise OptionError(
            f"previous has latents of {list(before.shape)}, and the anchor's are {list(ends[0].shape)}: connect the "
            "latents of a video of the same size"
        )
    config = video.vae.config if isinstance(video.vae, VAESocket) else VAE_21
    return svi_clip(ends[0], ends[1], before, video.frames, config)


def frame_numbers(text: str) -> list[int]:
    """The numbers of `20, 40, 60`. Raises OptionError."""
    numbers = [one.strip() for one in text.replace(";", ",").split(",") if one.strip()]
    if not all(one.isdecimal() and len(one) <= 9 for one in numbers):
        raise OptionError(f"keyframe_numbers {text[:60]!r} given; write numbers of frames, from 0, such as 20, 40, 60")
    return [int(one) for one in numbers]


def by_number(pictures: Tensor | None, numbers: list[int]) -> dict[int, Tensor]:
    """Keyframes [1, 3, N, H, W] by their frame of the video, as `known_frames` takes them. Raises OptionError."""
    count = 0 if pictures is None else pictures.shape[2]
    if count != len(numbers):
        raise OptionError(f"{count} pictures of keyframes and {len(numbers)} keyframe_numbers given: give one for each")
    if len(set(numbers)) < count:
        raise OptionError(f"keyframe_numbers {', '.join(map(str, numbers))} given: each frame once")
    return {} if pictures is None else dict(zip(numbers, pictures.split(1, dim=2), strict=True))
