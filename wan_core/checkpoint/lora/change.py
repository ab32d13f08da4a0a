"""The change that a LoRA makes to a parameter, computed from mapped tensors that are read only when needed.

| role | change of the weight | |
|---|---|---|
| lora_A, lora_B; lora_down, lora_up | up @ down * alpha / rank | LoRA |
| hada_w1_a .. hada_w2_b | (w1_a @ w1_b) * (w2_a @ w2_b) * alpha / rank | LoHa |
| lokr_w1, lokr_w2 (or _a, _b of either) | kron(w1, w2) * alpha / rank | LoKr |
| diff, w_norm; diff_b, b_norm; diff_m | the tensor itself, added to weight; bias; modulation | full differences |
| dora_scale, lora_magnitude_vector | the rows (or columns) are rescaled to these lengths at the end | DoRA |

Without an alpha the factor is 1, or Diffusers' value in the file's metadata. A LoRA of a convolution (the patch
embedding) has kernels instead of matrices.

Source: Hu et al., arXiv:2106.09685; Hyeon-Woo et al., arXiv:2108.06098 (LoHa); Yeh et al., arXiv:2309.14859 (LoKr);
Liu et al., arXiv:2402.09353 (DoRA). The last three are compared with LyCORIS's own code in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


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
        """The rank of a LoRA; None for other kinds."""
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
        columns = self.dora.shape[0] == 1 and len(length) == value.shape[1] and len(value) != 1
        rows = changed.flatten(1)
        if columns:
            rows *= length / rows.norm(dim=0).clamp(min=1e-12)
        else:
            rows *= (length / rows.norm(dim=1).clamp(min=1e-12))[:, None]
        return value.lerp_(rows.reshape(self.shape), strength)

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
