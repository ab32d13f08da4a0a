"""The change that a LoRA makes to a parameter, and merging changes into weights while the weights are read, before they
are quantised, so that a step costs no more. A change is computed from mapped tensors that are read only when needed.

| role | change of the weight | |
|---|---|---|
| lora_A, lora_B; lora_down, lora_up | up @ down * alpha / rank | LoRA |
| hada_w1_a .. hada_w2_b | (w1_a @ w1_b) * (w2_a @ w2_b) * alpha / rank | LoHa |
| lokr_w1, lokr_w2 (or _a, _b of either) | kron(w1, w2) * alpha / rank | LoKr |
| diff, w_norm; diff_b, b_norm; diff_m | the tensor itself, added to weight; bias; modulation | full differences |
| dora_scale, lora_magnitude_vector | the rows (or columns) are rescaled to these lengths at the end | DoRA |

DoRA follows its authors and LyCORIS. ComfyUI 0.33 divides rows by the lengths that they had before the change, and
reads no lora_magnitude_vector.

Without an alpha the factor is 1, or Diffusers' value in the file's metadata. A LoRA of a convolution (the patch
embedding) has kernels instead of matrices.

Source: Hu et al., arXiv:2106.09685; Hyeon-Woo et al., arXiv:2108.06098 (LoHa); Yeh et al., arXiv:2309.14859 (LoKr);
Liu et al., arXiv:2402.09353 (DoRA). The last three are compared with LyCORIS's own code in the tests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wan_core.ops.quant.packed import Changed, Packed


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """The change of one parameter of `shape`. `factors` are the file's tensors, mapped and not yet read; `dora` are the
    final lengths of rows ([N] or [N, 1]) or columns ([1, K])."""

    kind: str  # "LoRA", "LoHa", "LoKr", "difference"
    shape: tuple[int, ...]
    factors: tuple[Tensor, ...]
    scale: float = 1.0
    dora: Tensor | None = None

    @property
    def rank(self) -> int | None:
        return self.factors[0].shape[1] if self.kind == "LoRA" else None

    @property
    def words(self) -> str:
        return f"{self.kind}{' with DoRA' if self.dora is not None else ''}"

    def delta(self, device: torch.device) -> Tensor:
        """The tensor that strength 1 adds to the parameter before DoRA: float32, of its shape."""
        first, *others = (factor.to(device).float() for factor in self.factors)
        return FORMULAS[self.kind](first * self.scale, *others).reshape(self.shape)

    def apply(self, value: Tensor, strength: float) -> Tensor:
        """The parameter's float32 `value` with this change at `strength`; may overwrite `value`."""
        if self.dora is None and self.kind == "LoRA":  # needs no second tensor of the weight's size
            up, down = (factor.to(value.device).float().flatten(1) for factor in self.factors)
            return value.flatten(1).addmm_(up, down, alpha=self.scale * strength).view(self.shape)
        delta = self.delta(value.device)
        if self.dora is None:
            return value.add_(delta, alpha=strength)
        changed = value + delta
        length = self.dora.to(value.device).float().flatten()
        rows = changed.flatten(1)
        if self.of_columns:
            rows *= length / rows.norm(dim=0).clamp(min=1e-12)
        else:
            rows *= (length / rows.norm(dim=1).clamp(min=1e-12))[:, None]
        return value.lerp_(rows.reshape(self.shape), strength)

    @property
    def of_columns(self) -> bool:
        """Whether the lengths of DoRA are those of columns, not of rows."""
        dora = self.dora
        return dora is not None and dora.shape[0] == 1 and dora.numel() == self.shape[1] and self.shape[0] != 1

    @property
    def has_low_rank(self) -> bool:
        """Whether the change is exactly a product of two low-rank factors; other changes can only be merged.

        The elementwise product of two low-rank matrices has the product of their ranks as its rank.
        """
        if len(self.shape) != 2 or self.dora is not None or self.kind not in ("LoRA", "LoHa"):
            return False
        first, second = self.factors[0].shape[1], self.factors[-2].shape[1]
        return self.kind == "LoRA" or first * second <= min(self.shape) // 4

    @property
    def attached_numbers(self) -> int:
        """Number of values that an attached change stores: of the pair of `low_rank`, or of its factors."""
        if not self.has_low_rank:
            return sum(factor.numel() for factor in self.factors)
        rank = self.factors[0].shape[1] * (1 if self.kind == "LoRA" else self.factors[2].shape[1])
        return rank * sum(self.shape)

    def low_rank(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """(up [N, R], down [R, K]) in float32 whose product is the change of a matrix; None unless `has_low_rank`."""
        if not self.has_low_rank:
            return None
        factors = [factor.to(device).float() for factor in self.factors]
        if self.kind == "LoRA":
            return factors[0].flatten(1) * self.scale, factors[1].flatten(1)
        w1_a, w1_b, w2_a, w2_b = factors
        up = (w1_a[:, :, None] * w2_a[:, None, :]).flatten(1)
        down = (w1_b[:, None, :] * w2_b[None, :, :]).flatten(0, 1)
        return up * self.scale, down


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "LoRA": lambda up, down: up.flatten(1) @ down.flatten(1),
    "LoHa": lambda w1_a, w1_b, w2_a, w2_b: (w1_a @ w1_b.flatten(1)) * (w2_a @ w2_b.flatten(1)),
    "LoKr": lambda w1, w2: torch.kron(w1, w2),
    "difference": lambda value: value,
}


@dataclass(frozen=True)
class Merge:
    """`changes`: official parameter name -> changes with their strengths, in order. `device`: where the sums are
    computed, in float32; a GPU needs a second, a CPU a minute."""

    changes: Mapping[str, tuple[tuple[Change, float], ...]]
    device: torch.device

    @torch.no_grad()
    def apply(
        self, values: Iterable[tuple[str, Any]], encoded: Collection[str], order: Iterable[str]
    ) -> Iterator[tuple[str, Any]]:
        """(official name, value) pairs with the changes added. The weights of the linears `encoded` stay float32, so
        that they are rounded only once, and packed ones are `Changed`; others keep their dtype. Sums go where the
        values are; those of packed ones, in float32 several times as large, stay where they are computed. order: the
        names in the order of `values`."""
        with Ahead({name: self.changes[name] for name in order if name in self.changes}, self.device) as ahead:
            for name, value in values:
                if name not in self.changes:
                    yield name, value
                    continue
                device = self.device if isinstance(value, Packed) else value.device
                total = dense(value, self.device)
                for change, strength in ahead.take(name):
                    total = change.apply(total, strength)
                is_encoded = name.removesuffix(".weight") in encoded
                if isinstance(value, Packed) and is_encoded:
                    yield name, Changed(value, total)
                    continue
                if isinstance(value, Tensor) and not is_encoded:
                    total = total.to(value.dtype)
                yield name, total.to(device)


AHEAD = 1 << 28  # most bytes of changes that are copied to the GPU before they are needed
# Most bytes that travel together through pinned memory, which torch gives in powers of two and keeps. Together, because
# every call of the thread that copies them may wait for the GIL.
BATCH = 1 << 26
ALIGNED = 16  # bytes, for the views of a batch


class Ahead:
    """Copies changes to a GPU in a thread while their weights are read, because a LoRA's tensors are mapped and a copy
    from the file blocks. About `AHEAD` bytes of device memory are used: files with full differences are as large as the
    model. changes: in the order in which `take` asks for them. Those that are in a GPU's memory stay where they are."""

    def __init__(self, changes: Mapping[str, tuple[tuple[Change, float], ...]], device: torch.device) -> None:
        self.changes, self.device = changes, device
        self.moving: dict[str, Future[Any]] = {}
        self.waiting: deque[list[str]] = deque()
        self.bytes_ahead = 0
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self.pool = ThreadPoolExecutor(1, thread_name_prefix="lora")
            on_host = {
                name: listed
                for name, listed in changes.items()
                if all(factor.device.type == "cpu" for factor in _factors(listed))
            }
            self.waiting = _batches(on_host)
            self._start_copies()

    def __enter__(self) -> Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.pool.shutdown(cancel_futures=True)
        self.moving.clear()

    def _start_copies(self) -> None:
        """Start the next copies, up to `AHEAD` bytes; a larger batch is copied alone."""
        while self.waiting:
            nbytes = sum(_bytes(self.changes[name]) for name in self.waiting[0])
            if self.moving and self.bytes_ahead + nbytes > AHEAD:
                return
            self.bytes_ahead += nbytes
            names = self.waiting.popleft()
            self.moving |= dict.fromkeys(names, self.pool.submit(self._move, names))

    def take(self, name: str) -> tuple[tuple[Change, float], ...]:
        """The changes of one parameter, on the GPU if they are already copied or on their way."""
        if name not in self.moving:
            for batch in self.waiting:
                batch[:] = [other for other in batch if other != name]
            return self.changes[name]
        moved, event = self.moving.pop(name).result()
        self.bytes_ahead -= _bytes(moved[name])
        self._start_copies()
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        for tensor in _factors(moved[name]):
            tensor.record_stream(stream)  # allocated on the other stream, which must not reuse the memory yet
        return moved[name]

    @torch.no_grad()
    def _move(self, names: Sequence[str]) -> tuple[dict[str, tuple[tuple[Change, float], ...]], Any]:
        """Through one pinned buffer, which torch uses again for the next batch but one; what is larger than `BATCH`
        without one."""
        factors = [factor for name in names for factor in _factors(self.changes[name])]
        sizes = [_padded(factor) for factor in factors]
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            if sum(sizes) > BATCH:
                parts = (factor.contiguous().flatten().view(torch.uint8).to(self.device) for factor in factors)
            else:
                pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
                for part, factor in zip(pinned.split(sizes), factors, strict=True):
                    part[: factor.nbytes].view(factor.dtype).view(factor.shape).copy_(factor)
                parts = iter(pinned.to(self.device, non_blocking=True).split(sizes))
            moved = {name: tuple((_placed(change, parts), k) for change, k in self.changes[name]) for name in names}
            event = torch.cuda.Event()
            event.record(self.stream)
        return moved, event


def _batches(changes: Mapping[str, tuple[tuple[Change, float], ...]]) -> deque[list[str]]:
    """Names whose changes have at most `BATCH` bytes together; larger ones alone."""
    batches: deque[list[str]] = deque()
    room = 0
    for name, listed in changes.items():
        if not batches or _bytes(listed) > room:
            batches.append([])
            room = BATCH
        batches[-1].append(name)
        room -= _bytes(listed)
    return batches


def _placed(change: Change, parts: Iterator[Tensor]) -> Change:
    """`change` with its factors in the next of `parts`, which are bytes."""
    there = (next(parts)[: old.nbytes].view(old.dtype).view(old.shape) for old in change.factors)
    return replace(change, factors=tuple(there))


def _factors(changes: tuple[tuple[Change, float], ...]) -> Iterator[Tensor]:
    return (factor for change, _ in changes for factor in change.factors)


def _bytes(changes: tuple[tuple[Change, float], ...]) -> int:
    return sum(map(_padded, _factors(changes)))


def _padded(factor: Tensor) -> int:
    return -(-factor.nbytes // ALIGNED) * ALIGNED


def dense(value: Tensor | Packed, device: torch.device) -> Tensor:
    """A stored value as a new float32 tensor on `device`."""
    if isinstance(value, Packed):
        return value.to(device).dequantize(torch.float32)
    return value.to(device, torch.float32, copy=True)
