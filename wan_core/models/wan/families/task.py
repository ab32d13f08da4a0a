"""A task: what checkpoints were trained for, and which one those are that a user has. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from wan_core.config import OptionError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import T2V_1_3B, DiTConfig

# How a known image reaches the transformer.
ImageInput: TypeAlias = Literal[
    "none",
    "channels",  # a mask and the latents of the known frames, beside the noise: first frame, last frame or both
    "first frame",  # the first latent frame is the image's and stays so, at timestep 0
]


NEGATIVE_SOURCE = (
    "this project's own text; Wan's own, in Chinese, is sample_neg_prompt in wan/configs/shared_config.py of "
    "github.com/Wan-Video/Wan2.2"
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What checkpoints were trained and tuned for: their inputs and the defaults of everything a user may leave out.

    Guidance is named by expert, never a tuple: the official config lists (low, high), other tools [high, low].
    """

    name: str
    family: str
    release: str  # "Wan 2.2"
    in_channels: int
    image: ImageInput
    image_dim: int | None = None  # width of the CLIP features of the image that it takes; None: it takes none
    distilled: bool = False  # its defaults are those of step-distilled weights: no preset takes their place by itself
    driven_by: str = ""  # ComfyUI's node that gives the videos which drive it; "": no videos do
    vae: VAEConfig  # of the VAE whose latents it works on
    full_size: DiTConfig | None  # None: known from the files alone
    two_experts: bool
    boundary: float  # the high-noise expert runs where timestep >= boundary * 1000; 0: one model runs every step
    shift: float
    steps: int
    guidance_high: float
    guidance_low: float
    width: int
    height: int
    frames: int
    fps: int
    negative_prompt: str = (  # written for this project: see NEGATIVE_SOURCE
        "blurry, low quality, jpeg artefacts, overexposed, washed-out colours, still picture, subtitles, watermark, "
        "deformed hands, extra fingers, extra limbs, distorted face, cluttered background, walking backwards"
    )


class Clues(NamedTuple):
    """What besides shapes may tell which task a transformer is for."""

    path: Path | None = None  # of its file or folder
    metadata: Mapping[str, str] = {}
    alone: bool = True  # no second expert is given


class Choice(NamedTuple):
    """The task of a transformer. `why`: what decided, where its tensors do not; it is shown to the user."""

    task: Task
    why: str = ""


def fitting(tasks: Sequence[Task], dit: DiTConfig) -> list[Task]:
    """Those of a family's `tasks` that are released for the inputs and size of a transformer. Raises OptionError where
    there is none."""
    found = [
        task
        for task in tasks
        if task.full_size is not None
        and (task.in_channels, task.image_dim) == (dit.in_channels, dit.image_dim)
        and (task.full_size.dim == T2V_1_3B.dim) == (dit.dim == T2V_1_3B.dim)
    ]
    if not found:
        features = "" if dit.image_dim is None else f" and CLIP features {dit.image_dim} wide"
        raise OptionError(
            f"a transformer of {dit.in_channels} input channels{features} belongs to no known task of the family "
            f"{tasks[0].family}; name one with --task: {', '.join(task.name for task in tasks)}"
        )
    return found
