"""The passes of `triton_vae` in torch, in the place of its kernels, so that what calls them runs on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.models.vae.layers import CausalConv3d, RMSNorm


class Passes:
    """read: what `norm_silu_extend` read, where it is still alive."""

    def __init__(self, beside: bool) -> None:
        """beside: whether frames are convolved with the earlier ones beside them."""
        self.beside = beside
        self.read: list[weakref.ref[Tensor]] = []

    @contextmanager
    def in_place(self) -> Iterator[None]:
        layers = "wan_core.models.vae.layers"

        def beside(_: CausalConv3d, x: Tensor) -> bool:  # a mock would keep x in memory
            return self.beside

        with ExitStack() as ends:
            for patch in (
                mock.patch("wan_core.ops.kernels.triton_vae", self, create=True),
                mock.patch(f"{layers}.in_one_pass", lambda x: len(x) == 1),
                mock.patch(f"{layers}._small_on_cpu", return_value=False),
                mock.patch.object(CausalConv3d, "beside", beside),
            ):
                ends.enter_context(patch)
            yield

    def norm_silu_extend(
        self, x: Any, bias: Any, gamma: Any, earlier: Any, lead: int, keep: bool, beside: bool
    ) -> tuple[Tensor, Tensor | None]:
        self.read.append(weakref.ref(x))
        x = x if bias is None else x + bias.view(-1, 1, 1, 1)
        norm = RMSNorm(x.shape[1])
        norm.gamma.data = gamma
        new = F.silu(norm(x))
        frames = torch.cat([torch.zeros_like(new[:, :, :1]).expand(-1, -1, lead, -1, -1), new], 2)
        if earlier is not None:
            frames[:, :, :lead] = earlier
        kept = frames[:, :, -lead:].clone() if keep else None
        taps = [frames[:, :, tap : tap + x.shape[2]] for tap in range(lead + 1)]
        return torch.cat(taps, 1) if beside else frames, kept

    @staticmethod
    def add_with_bias(h: Any, rest: Any, bias: Any, more: Any) -> Tensor:
        return h + rest + (bias if more is None else bias + more).view(-1, 1, 1, 1)
