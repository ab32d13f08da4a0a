"""What an Animate-2 transformer is, as plain numbers: those of Wan 2.1 image-to-video. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from wan_core.models.wan.config import I2V_14B, DiTConfig
from wan_core.models.wan.prepared_form import PreparedForm

DISTILLED_LOG_SCALE = -1.3  # of the distilled weights; 0 of the others
MORE_PER_TOKEN = 5.6  # of `Family`: attention in parts, and their sum in float32; measured on an H200 in FP8
PLACES = 2  # layers on the device, of keys and values in host memory


class Form(NamedTuple):
    """How keys and values of the driving video are kept."""

    on_host: bool = False
    fp8: bool = False

    def words(self) -> str:
        return f"{'FP8' if self.fp8 else 'as computed'}, {'in host memory' if self.on_host else 'on the device'}"


# What changes no number first.
FORMS = (Form(), Form(on_host=True), Form(fp8=True), Form(on_host=True, fp8=True))


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


def prepared_forms(dit: DiTConfig, latents: tuple[int, ...], itemsize: int) -> tuple[PreparedForm, ...]:
    """Of FORMS, for `prepared_bytes`."""
    tensors = 2 * dit.num_layers  # keys, and values
    plain = prepared_bytes(dit, latents, itemsize) // tensors
    numbers = plain // itemsize
    found: list[PreparedForm] = []
    for form in FORMS:
        parts = (numbers, 4 * numbers // dit.dim * dit.num_heads) if form.fp8 else (plain,)  # a scale for each head
        whole = tensors * sum(parts)
        words = f"keys and values of the driving video, {form.words()}"
        if form.on_host:
            pinned, places = tensors * sum(map(pinned_bytes, parts)), PLACES * 2 * sum(parts)
            found.append(PreparedForm(form, words, places, pinned, whole, not form.fp8))
        else:
            found.append(PreparedForm(form, words, whole, 0, 0, not form.fp8))
    return tuple(found)


def driving_costs(dit: DiTConfig, latents: tuple[int, int, int]) -> tuple[float, float]:
    """The time of the pass over the driving video, and of a forward that does not read it, relative to one that does,
    by FLOPs. latents: frames (the first is the reference), rows, columns of the video."""
    T, Y, X = latents
    frame = dit.tokens(1, Y, X)
    linears = 2 * dit.dim * (6 * dit.dim + 2 * dit.ffn_dim)  # of a token

    def flops(frames: int, pairs: int) -> int:
        return frames * frame * linears + 4 * dit.dim * pairs * frame**2

    whole = flops(T, T * T + T - 1)  # of frames but the first, each also to its driving frame
    return flops(T - 1, (T - 1) ** 2) / whole, flops(T, T * T) / whole


def pinned_bytes(nbytes: int) -> int:
    """Of a tensor in torch's pinned memory, which comes in powers of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def padded_frames(frames: int, clip: int, overlap: int) -> int:
    """Frames of a video padded so that the last clip is not too short, if it is one. Source: `_padding_length` of
    LightX2V's Animate-2."""
    rest = (frames - overlap) % (clip - overlap)
    return frames + (28 - rest if rest < 28 else 4 - rest % 4)
