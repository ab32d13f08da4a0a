"""What an S2V transformer is beside a Wan 2.1 text-to-video transformer: its numbers, its task, the names of its
parameters (official and ComfyUI's are the same). Imports no torch.

Source: Wan2.2/wan/modules/s2v/model_s2v.py, wan/configs/wan_s2v_14B.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import T2V_A14B, DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.family import Task

INJECT_AFTER = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)  # blocks after which the sound is attended to
AUDIO_FRAMES = 4  # of a latent frame
COMFYUI_POSITIONS = "wancore_comfyui_positions"  # in CONDITIONING: motion frames stand where ComfyUI has them
MOTION_FRAMES = (16, 2, 1)  # latent frames that are read by fours, by twos and alone, the oldest first
MOTION_PIXELS = 73  # video frames that become those
LONGER = 3  # of the first clip so many frames are left out: they show the picture, before it moves
LEAST_SIDE = 64  # pixels in the largest patch of motion frames; sizes of whole ones lose nothing


@dataclass(frozen=True, kw_only=True)
class S2VConfig(DiTConfig):
    """A transformer that also takes features of speech, a reference picture, frames that came before, and a pose.

    audio_layers, audio_dim: of the features. audio_tokens: of a latent frame; a token for padding is one more.
    injectors: how many of `INJECT_AFTER` it has.
    """

    family: str = "s2v"
    audio_layers: int = 25
    audio_dim: int = 1024
    audio_tokens: int = 4
    pose_channels: int = 16
    injectors: int = len(INJECT_AFTER)

    def tokens(self, frames: int, rows: int, columns: int) -> int:
        """The largest number of tokens of a forward: the video, a reference and motion frames."""
        _, py, px = self.patch_size
        extra = extra_tokens((frames, rows // py, columns // px), reference=True, motion=True)
        return super().tokens(frames, rows, columns) + extra


S2V_14B = S2VConfig(**plain.fields_of(T2V_A14B))


def extra_tokens(grid: tuple[int, int, int], *, reference: bool, motion: bool) -> int:
    """Tokens beside those of a video of `grid` (token frames, rows, columns)."""
    _, Y, X = grid
    packed = Y * X + (Y // 2) * (X // 2) + 4 * (Y // 4) * (X // 4)
    return reference * Y * X + motion * packed


def padded_frames(frames: int, clip: int, overlap: int) -> int:
    """Frames of whole clips, of which the first has `clip` and each other one `LONGER` more. Source: `generate` of
    Wan2.2/wan/speech2video.py."""
    return clip + max(0, -(-(frames - clip) // (clip + LONGER))) * (clip + LONGER)


TASKS = (
    Task(name="s2v-14B", family="s2v", release="Wan 2.2", in_channels=16, image="none",
         driven_by="WanSoundImageToVideo",
         vae=VAE_21, full_size=S2V_14B, two_experts=False, boundary=0.0, shift=3.0, steps=40,
         guidance_high=4.5, guidance_low=4.5, width=832, height=480, frames=77, fps=16),
)  # fmt: skip


_OWN = re.compile(r"(trainable_cond_mask|cond_encoder|casual_audio_encoder|audio_injector|frame_packer)\..+")
_INJECTOR = re.compile(r"audio_injector\.injector\.(\d{1,3})\..+")
ENCODER = "casual_audio_encoder.encoder"
_TOP = (
    "trainable_cond_mask.weight",
    *(f"cond_encoder.{kind}" for kind in ("weight", "bias")),
    "casual_audio_encoder.weights",
    *(
        f"{ENCODER}.{name}.conv.{kind}"
        for name in ("conv1_local", "conv1_global", "conv2", "conv3")
        for kind in ("weight", "bias")
    ),
    *(f"{ENCODER}.final_linear.{kind}" for kind in ("weight", "bias")),
    f"{ENCODER}.padding_tokens",
    *(f"frame_packer.{name}.{kind}" for name in ("proj", "proj_2x", "proj_4x") for kind in ("weight", "bias")),
)
_PARTS = (*(f"{part}.{kind}" for part in "qkvo" for kind in ("weight", "bias")), "norm_q.weight", "norm_k.weight")


def injectors(names: Collection[str]) -> int:
    """One more than the highest number of an injector."""
    return max((int(match[1]) + 1 for name in names if (match := _INJECTOR.fullmatch(name))), default=0)


def parameter_names(names: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of a transformer of `num_layers` blocks."""
    count = injectors(names)
    return [
        *plain.parameter_names([], num_layers),
        *_TOP,
        *(f"audio_injector.injector.{n}.{part}" for n in range(count) for part in _PARTS),
        *(
            f"audio_injector.injector_adain_layers.{n}.linear.{kind}"
            for n in range(count)
            for kind in ("weight", "bias")
        ),
    ]


def official_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout; None where nothing is the family's own."""
    own = {name: name for name in names if _OWN.fullmatch(name)}
    if not any(name.startswith("casual_audio_encoder.") for name in own):
        return None
    return plain.with_own(own, names)
