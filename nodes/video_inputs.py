"""What nodes share that ask for the size of a video, or add pictures to prompts: inputs, checks and outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from comfy_api.latest import io, ui
from torch import Tensor

from wan_core.config.limits import MAX_VIDEO_SIDE
from wan_core.execution.report import WARNING
from wan_core.models.vae.config import VAE_21, VAEConfig
from wan_core.models.wan.families import image_task
from wan_core.models.wan.families.family import Family
from wan_core.models.wan.families.media import video_to_pixels
from wan_core.pipeline.check import size_notes
from wan_core.pipeline.memory_planning import check_peak, peak_bytes
from wan_core.sampling.conditioning import empty_latents

from . import host
from .schema import output
from .sockets import CONDITIONING

MAX_FRAMES, MAX_BATCH = 4001, 64


def size_inputs(
    height: int = 480, frames: int = 81, *, least: tuple[int, int] = (16, 1), most: int = MAX_FRAMES, tip: str = ""
) -> list[Any]:
    """Width, height and frames, the same in every node that asks for them. least: pixels of a side, and frames. tip: of
    frames, in place of what holds for models that make any length."""
    pixels = "Pixels; a multiple of 16 (A14B) or 32 (TI2V-5B)"
    tips = {
        "width": f"{pixels}. The embedded model was trained at 96x96.",
        "height": f"{pixels}.",
        "frames": tip
        or "A multiple of 4 plus 1. Wan was trained on 81 frames at 16 per second (TI2V-5B: 121 at 24); the embedded "
        "model on 17 at 8.",
    }
    numbers = {
        "width": (832, least[0], MAX_VIDEO_SIDE, 16),
        "height": (height, least[0], MAX_VIDEO_SIDE, 16),
        "frames": (frames, least[1], most, 4),
    }
    return [
        io.Int.Input(name, default=default, min=low, max=high, step=step, tooltip=tips[name])
        for name, (default, low, high, step) in numbers.items()
    ]


def text_and_vae(positive: str = "The encoded prompt.") -> list[Any]:
    """What nodes take that add pictures to the prompts. positive: its tooltip."""
    return [
        io.Conditioning.Input("positive", tooltip=positive),
        io.Conditioning.Input("negative", tooltip="The encoded negative prompt; it counts where guidance is not 1."),
        io.Vae.Input("vae", tooltip="The VAE that belongs to the model: WanCore's or ComfyUI's own."),
    ]


def conditioned_outputs(latent: str = "For the sampler.") -> list[Any]:
    """What these nodes give. latent: its tooltip."""
    return [
        output(io.Conditioning, "positive_out", "For the sampler."),
        output(io.Conditioning, "negative_out", "For the sampler."),
        output(io.Latent, "latent", latent),
    ]


def batch_input() -> Any:
    """Several videos at once. Appended where `size_inputs` are."""
    return io.Int.Input(
        "batch_size",
        default=1,
        min=1,
        max=MAX_BATCH,
        optional=True,
        tooltip="How many videos to make in one run, each with other noise of the same seed. Memory and time grow with "
        "it.",
    )


def duration_input() -> Any:
    return io.Float.Input(
        "duration",
        default=0.0,
        min=0.0,
        max=240.0,
        step=0.25,
        round=0.01,
        optional=True,
        tooltip="Seconds, in place of 'frames': 5 are 81 frames at 16 per second, of TI2V-5B 121 at 24. 0: 'frames' "
        "counts.",
    )


def frames_in(duration: float | None, frames: int | None, config: VAEConfig) -> int | None:
    """The frames of a video of so many seconds: 4n + 1 at the rate of the models with this VAE. 0: `frames`; None: not
    known before the prompt runs."""
    return 4 * round(duration * image_task(config.z_dim).fps / 4) + 1 if duration else frames if duration == 0 else None


def check_room(
    family: Family,
    config: VAEConfig,
    size: tuple[int | None, int | None, int | None],
    *,
    batch: int | None = 1,
    given: Collection[str] = (),
    before_run: bool = False,
) -> bool:
    """Raise OptionError for a size (width, height, frames) that is too large, also for the host memory that is
    available now, or before_run for `validate_inputs`, where None is not known yet. given: fields of the family that
    have pictures."""
    width, height, frames = size
    if width is not None and height is not None and frames is not None:
        needed = peak_bytes(family, config, width, height, frames, batch=batch or 1, given=given)
        room = host.spare_bytes(needed, before_run=before_run)
        check_peak(family, config, (width, height, frames), room, batch=batch or 1, given=given)
    return True


def size_words(config: VAEConfig, width: int, height: int) -> ui.PreviewText | None:
    """For the node that says how large a video is."""
    notes = size_notes(None, config, width, height)
    return ui.PreviewText("\n".join(WARNING + note for note in notes)) if notes else None


@dataclass(frozen=True, kw_only=True)
class VideoInputs:
    """The values of `text_and_vae` and `size_inputs`, of a node that adds pictures to prompts."""

    positive: CONDITIONING
    negative: CONDITIONING
    vae: Any
    width: int
    height: int
    frames: int
    config: VAEConfig = VAE_21

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    def encode(self, video: Tensor) -> Tensor:
        """[1, 3, F, H, W] in -1..1 -> latents."""
        return host.with_still_frames(self.vae).encode(video_to_pixels(video))

    def latent(self, references: int = 0, batch: int = 1) -> dict[str, Any]:
        """The empty LATENT, with latent frames of so many references before the video."""
        latents = empty_latents(self.config, *self.size, self.frames)
        latents = torch.cat([latents[:, :, :1].repeat(1, 1, references, 1, 1), latents], 2)
        return {"samples": host.to_intermediate(latents.repeat(batch, 1, 1, 1, 1))}

    def outputs(
        self, extras: dict[str, Any], negative: dict[str, Any], latent: dict[str, Any], *more: Any
    ) -> io.NodeOutput:
        """`conditioned_outputs` and what else a node gives. extras, negative: keys that the prompts get."""
        both = with_values(self.positive, extras), with_values(self.negative, negative)
        return io.NodeOutput(*both, latent, *more, ui=size_words(self.config, *self.size))


def fields_of(pictures: Mapping[str, object]) -> list[str]:
    """Those that have pictures."""
    return [field for field, images in pictures.items() if images is not None]


def with_values(conditioning: CONDITIONING, values: dict[str, Any]) -> CONDITIONING:
    return [[rows, {**extras, **values}] for rows, extras in conditioning]
