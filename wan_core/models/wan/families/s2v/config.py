"""What an S2V transformer is beside a Wan 2.1 text-to-video transformer, as plain numbers. Imports no torch.

Source: Wan2.2/wan/modules/s2v/model_s2v.py, wan/configs/wan_s2v_14B.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from wan_core.models.wan.config import T2V_A14B, DiTConfig

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
        """Of the video, of a reference and of motion frames: all that a forward may have."""
        _, py, px = self.patch_size
        extra = extra_tokens((frames, rows // py, columns // px), reference=True, motion=True)
        return super().tokens(frames, rows, columns) + extra


S2V_14B = S2VConfig(
    **{
        field: getattr(T2V_A14B, field)
        for field in ("in_channels", "out_channels", "dim", "ffn_dim", "num_heads", "num_layers")
    }
)


def extra_tokens(grid: tuple[int, int, int], *, reference: bool, motion: bool) -> int:
    """Tokens beside those of a video of `grid` (token frames, rows, columns)."""
    _, Y, X = grid
    packed = Y * X + (Y // 2) * (X // 2) + 4 * (Y // 4) * (X // 4)
    return reference * Y * X + motion * packed


def padded_frames(frames: int, clip: int, overlap: int) -> int:
    """Frames of whole clips, of which the first has `clip` and each other one `LONGER` more. Source: `generate` of
    Wan2.2/wan/speech2video.py."""
    return clip + max(0, -(-(frames - clip) // (clip + LONGER))) * (clip + LONGER)


def prepared_bytes(dit: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
    """What a forward takes beside text and the activations of other families, for latents [B, C, T, Y, X]: keys,
    values, shift and scale of every injector, the rows of modulation in float32, twice in a block, and the hidden layer
    of a feed-forward that does not run in halves."""
    assert isinstance(dit, S2VConfig)
    B, _, T, Y, X = latents
    tokens, video = dit.tokens(T, Y, X), DiTConfig.tokens(dit, T, Y, X)
    injected = dit.injectors * 2 * T * dit.dim * ((dit.audio_tokens + 1) * itemsize + 4)
    rows = tokens // math.gcd(video, tokens)
    return B * (2 * injected + 2 * rows * 6 * dit.dim * 4 + tokens * dit.ffn_dim * itemsize // 2)
