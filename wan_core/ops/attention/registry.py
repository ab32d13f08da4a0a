"""Attention backends by name: what each needs, whether it can run here, and the one that `auto` takes.

A name resolves once, when a pipeline is set up. After that nothing falls back: a backend that cannot run raises.

Legend: B batch, L query tokens, S key tokens, H heads, D head dim.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from wan_core.config import UserError
from wan_core.config.checks import unknown
from wan_core.config.compile_cache import set_flash_attention_cache
from wan_core.ops.attention import dense, fp8, sdpa
from wan_core.ops.attention.protocol import Attention, Dense
from wan_core.ops.cards import AMPERE, HOPPER, TURING, Capability, capability, card_of, name_of
from wan_core.ops.library import Library

log = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
CHOSEN = ("auto", "fast")  # names that stand for the best backend of the card


class AttentionError(UserError):
    """An attention backend that does not exist or cannot run here; says which can."""


@dataclass(frozen=True)
class Needs:
    """What a kernel can compute on: cards from `since` up to and including the major version `until`, `dtypes`, head
    dims. None or empty: no limit."""

    since: Capability | None = None
    until: int | None = None
    dtypes: tuple[torch.dtype, ...] = ()
    head_dims: Collection[int] | None = None

    def why_not(self, capability: Capability | None, dtype: torch.dtype, head_dim: int | None = None) -> str | None:
        """None where they are met, else the first that is not. `head_dim` None: not known, not checked."""
        if self.since is not None:
            if capability is None:
                return "needs an NVIDIA GPU"
            this_card = f"this one has {capability[0]}.{capability[1]}"
            if capability < self.since:
                since = f"{self.since[0]}.{self.since[1]} ({name_of(self.since)})"
                return f"needs compute capability {since} or newer, {this_card}"
            if self.until is not None and capability[0] > self.until:
                return f"has no kernels for cards above compute capability {self.until}.x, {this_card}"
        if self.dtypes and dtype not in self.dtypes:
            return (
                f"computes in bf16 or fp16, not in {str(dtype).removeprefix('torch.')}: use sdpa, or --precision bf16"
            )
        if self.head_dims is not None and head_dim is not None and head_dim not in self.head_dims:
            return f"takes a head dim of {_range(self.head_dims)}, this model has {head_dim}: use sdpa"
        return None


def _range(values: Collection[int]) -> str:
    if isinstance(values, range):
        return f"up to {values[-1]} in steps of {values.step}"
    return " or ".join(map(str, values))


@dataclass(frozen=True)
class Implementation:
    """One row of a table of kernels. `load` imports what it needs; `missing` says which library does not work here."""

    name: str
    summary: str
    load: Callable[[], Any]
    needs: Needs = Needs()
    missing: Callable[[], str | None] = lambda: None

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int | None = None) -> str | None:
        """None where it runs, else the reason and what to do. Never raises."""
        return self.needs.why_not(capability(device), dtype, head_dim) or self.missing()


@dataclass(frozen=True)
class Backend(Implementation):
    """gives_lse: the log-sum-exp too, by which attention to parts of the keys is merged (a ring of ranks, Animate-2).
    exact: computes in the precision of its inputs. The others round to FP8 or int8, and are taken only by name.
    """

    gives_lse: bool = True
    exact: bool = True


def _torch_cudnn() -> str | None:
    return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN: install a CUDA build of torch"


FLASH4 = Library(
    "flash-attn-4",
    "flash_attn.cute",
    "flash_attn_func",
    "pip install --pre flash-attn-4",
    before=set_flash_attention_cache,
)
FLASH3 = Library(
    "FlashAttention 3",
    "flash_attn_interface",
    "flash_attn_func",
    "compile the folder `hopper` of github.com/Dao-AILab/flash-attention",
)
FLASH2 = Library(
    "flash-attn", "flash_attn.flash_attn_interface", "flash_attn_func", "pip install --no-build-isolation flash-attn"
)
SAGE = Library("sageattention", "sageattention", "sageattn", "see github.com/thu-ml/SageAttention")
CUDNN_FRONTEND = Library("nvidia-cudnn-frontend", "cudnn", "pygraph.sdpa_fp8", "pip install nvidia-cudnn-frontend")

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (
        Backend("sdpa", "torch's scaled_dot_product_attention, torch chooses the kernel",
                lambda: Dense(sdpa.sdpa, sdpa.sdpa_lse)),
        Backend("cudnn", "cuDNN's fused attention through torch", lambda: Dense(sdpa.cudnn, sdpa.cudnn_lse),
                Needs(AMPERE, dtypes=HALF, head_dims=range(8, 129, 8)), _torch_cudnn),
        Backend("flash4", "FlashAttention 4, CuTe DSL kernels for Hopper and Blackwell",
                lambda: Dense(dense.flash4, dense.flash4_lse), Needs(HOPPER, 12, HALF, range(8, 129, 8)),
                FLASH4.why_not),
        Backend("flash3", "FlashAttention 3, compiled for Hopper", lambda: Dense(None, dense.flash3),
                Needs(HOPPER, 9, HALF, range(8, 257, 8)), FLASH3.why_not),
        Backend("flash2", "FlashAttention 2", lambda: Dense(None, dense.flash2),
                Needs(AMPERE, dtypes=HALF, head_dims=range(8, 257, 8)), FLASH2.why_not),
        Backend("sage", "SageAttention, queries and keys in int8", lambda: Dense(dense.sage),
                Needs(AMPERE, dtypes=HALF, head_dims=(64, 96, 128)), SAGE.why_not, gives_lse=False, exact=False),
        Backend("int8", "comfy-kitchen's attention, q, k, v and probabilities in int8", lambda: Dense(dense.int8),
                Needs(TURING, dtypes=HALF, head_dims=range(8, 257, 8)), dense.why_not_kitchen,
                gives_lse=False, exact=False),
        Backend("cudnn-fp8", "cuDNN's FP8 graph, K's mean removed", lambda: fp8.Fp8Attention(fp8.run_cudnn),
                Needs(HOPPER, dtypes=HALF, head_dims=range(16, 129, 16)), CUDNN_FRONTEND.why_not, exact=False),
        Backend("math", "the formula in float32, the whole matrix in memory: for tests",
                lambda: Dense(sdpa.math_reference, sdpa.math_lse)),
        Backend("math-fp8", "the same on q, k, v and output rounded to FP8: for tests", fp8.math_fp8,
                exact=False),
    )
}  # fmt: skip


def auto_choice(
    capability: Capability | None,
    dtype: torch.dtype,
    head_dim: int | None,
    works: Callable[[str], bool] = lambda name: BACKENDS[name].missing() is None,
    *,
    rounding: bool = False,
    needs_lse: bool = False,
) -> str:
    """The name `auto` stands for: of the card's exact backends (`ops/cards.py`) the first that runs, else sdpa. `works`
    says whether a backend's library can be imported. rounding: the name `fast` stands for, which tries those that round
    to FP8 or INT8 first. needs_lse: only those that give the log-sum-exp.

    `auto` promises to change results by no more than the order of sums does: a relative error of 0.004 in bf16. INT8
    (0.024 to 0.032) and FP8 (0.07) are above that on every card, so they are taken only by name or by `fast`.
    """
    card = card_of(capability)
    order = (*card.rounding, *card.attention) if rounding else card.attention
    able = (n for n in order if BACKENDS[n].gives_lse or not needs_lse)
    fits = (n for n in able if BACKENDS[n].needs.why_not(capability, dtype, head_dim) is None)
    return next((name for name in fits if works(name)), "sdpa")


def lse_missing(name: str) -> str:
    """Why a backend cannot compute attention to parts of the keys, and what to take."""
    able = ", ".join(backend.name for backend in BACKENDS.values() if backend.gives_lse)
    return f"attention {name!r} gives no log-sum-exp to merge its parts by: use auto, or one of {able}"


def resolve_attention(
    name: str,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int | None = None,
    *,
    needs_lse: bool = False,
) -> tuple[str, Attention]:
    """The backend called `name` for `dtype` on `device`; `auto` takes the fastest exact one that runs, `fast` one that
    rounds where there is one, and both log it.

    head_dim: of the model that will use it, refused here rather than in the first forward; None: not known yet.
    needs_lse: the model attends to parts of its keys and merges them (`DiTConfig.merges_attention`).
    Raises AttentionError for an unknown name (listing the known ones) or a backend that cannot run here (saying why).
    """
    if name in CHOSEN:
        name = auto_choice(capability(device), dtype, head_dim, rounding=name == "fast", needs_lse=needs_lse)
        log.info("attention: %s (%s)", name, BACKENDS[name].summary)
    backend = BACKENDS.get(name)
    if backend is None:
        raise AttentionError(str(unknown("attention backend", name, (*CHOSEN, *BACKENDS))))
    if needs_lse and not backend.gives_lse:
        raise AttentionError(f"this model attends to parts of the keys, and {lse_missing(name)}")
    reason = backend.why_not(device, dtype, head_dim)
    if reason is not None:
        raise AttentionError(
            f"attention backend {name!r} cannot run on {device}: {reason}. Use auto, which takes the fastest that runs "
            "here; the command `doctor` lists all"
        )
    return name, backend.load()
