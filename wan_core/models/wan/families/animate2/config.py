"""What an Animate-2 transformer is, as plain numbers: those of Wan 2.1 image-to-video. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.models.wan.config import I2V_14B, DiTConfig

DISTILLED_LOG_SCALE = -1.3  # of the distilled weights; 0 of the others


@dataclass(frozen=True, kw_only=True)
class Animate2Config(DiTConfig):
    """unconditional_skips: the block that the forward without the prompt leaves out."""

    family: str = "animate2"
    unconditional_skips: int = 9


ANIMATE2_14B = Animate2Config(
    **{
        field: getattr(I2V_14B, field)
        for field in ("in_channels", "out_channels", "dim", "ffn_dim", "num_heads", "num_layers", "image_dim")
    }
)


def prepared_bytes(dit: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
    """Keys and values of the driving video in every block, for latents [B, C, T, Y, X], of which the first frame is the
    reference."""
    B, _, T, Y, X = latents
    return 2 * dit.num_layers * B * dit.tokens(T - 1, Y, X) * dit.dim * itemsize


def padded_frames(frames: int, clip: int, overlap: int) -> int:
    """Frames of a video padded so that the last clip is not too short, if it is one. Source: `_padding_length` of
    LightX2V's Animate-2."""
    rest = (frames - overlap) % (clip - overlap)
    return frames + (28 - rest if rest < 28 else 4 - rest % 4)
