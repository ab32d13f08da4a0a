"""The one table of NVIDIA cards: which attention, precision and sparse kernel are best on each kind of card.

`auto` of attention, of the sparse kernel and of INT8 files reads it, and so do `doctor` and docs/choices.md
(`wan_core.pipeline.card_choice`, which adds what depends on memory). Whether a kernel runs at all is not decided here:
its own `why_not` says that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Capability = tuple[int, int]
"""CUDA compute capability; None stands for a device that is not an NVIDIA GPU."""

TURING, AMPERE, ADA, HOPPER, BLACKWELL, RTX_BLACKWELL = (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
FP8_SINCE = ADA


@dataclass(frozen=True, kw_only=True)
class Card:
    """Cards from compute capability `since` up to the next row's. Names stand in order of preference: the first that
    runs is taken.

    attention: exact backends that `auto` tries; sdpa runs everywhere and ends every row. rounding: those that round to
    FP8 or INT8 and are faster, taken only by name. sparse: kernels of block-sparse attention; the formula ends every
    row. precision: the fastest near bf16; where none runs, bf16. int8: how weights stored in INT8 run: "fp8" encoded
    again, "kitchen" as stored by comfy-kitchen, "torch" as stored by torch. measured: where the order comes from.
    """

    since: Capability
    name: str
    attention: tuple[str, ...]
    rounding: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    precision: tuple[str, ...]
    int8: tuple[str, ...]
    measured: str = "not measured here"


CARDS = (
    Card(since=TURING, name="Turing", attention=("sdpa",), rounding=("int8",), precision=("int8",),
         int8=("kitchen", "torch")),
    # torch's own kernel is FlashAttention 2 as well, of the age of torch.
    Card(since=AMPERE, name="Ampere", attention=("flash2", "sdpa"), rounding=("sage", "int8"), sparse=("flex",),
         precision=("int8",), int8=("kitchen", "torch")),
    Card(since=ADA, name="Ada", attention=("flash2", "sdpa"), rounding=("sage", "int8"), sparse=("flex",),
         precision=("fp8", "fp8-tensor"), int8=("kitchen", "fp8")),
    # 75,600 tokens: flash4 170 ms, cuDNN 192, INT8 244, cuDNN in FP8 141.
    Card(since=HOPPER, name="Hopper", attention=("flash4", "cudnn", "sdpa"), rounding=("cudnn-fp8",),
         sparse=("cudnn-fp8", "cudnn", "flex"), precision=("fp8",), int8=("fp8",), measured="measured on an H200"),
    # cuDNN first: it is the library of the card's maker, comes with torch and was published level with flash-attn-4
    # for attention without a mask.
    Card(since=BLACKWELL, name="Blackwell, data centre", attention=("cudnn", "flash4", "sdpa"),
         rounding=("cudnn-fp8",), sparse=("cudnn", "flex"), precision=("fp8",), int8=("kitchen", "fp8")),
    # No data-centre kernels, so what torch has tuned for it.
    Card(since=RTX_BLACKWELL, name="Blackwell, GeForce and RTX PRO", attention=("sdpa",),
         rounding=("sage", "int8", "cudnn-fp8"), sparse=("cudnn", "flex"), precision=("fp8",),
         int8=("kitchen", "fp8")),
)  # fmt: skip
NO_CARD = Card(since=(0, 0), name="no NVIDIA GPU from Turing on", attention=("sdpa",), precision=(), int8=("torch",))


def capability(device: torch.device) -> Capability | None:
    """The compute capability of an NVIDIA GPU; None for everything else (an AMD card is a cuda device too, and has
    numbers of its own)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    return torch.cuda.get_device_capability(device)


def cuda_version() -> tuple[int, ...]:
    """That torch was built for; (0, 0) without."""
    return tuple(map(int, (torch.version.cuda or "0.0").split(".")))


def card_of(capability: Capability | None) -> Card:
    """The row of the table for a capability; cards newer than the table have its last row."""
    fitting = [card for card in CARDS if capability is not None and card.since <= capability]
    return fitting[-1] if fitting else NO_CARD


def name_of(capability: Capability) -> str:
    """For sentences: Hopper."""
    return card_of(capability).name.partition(",")[0]


def has_fp8(device: torch.device) -> bool:
    return (capability(device) or (0, 0)) >= FP8_SINCE
