"""A text encoder that stays in FP8, on an NVIDIA GPU: read by threads, with the bits that a mapped file gives."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.checkpoint.test_kept_packed import scaled  # noqa: F401
from wan_core.checkpoint import load_text_encoder, staged
from wan_core.checkpoint.staged import Reading, reading
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.swap import Quantization

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def test_it_is_the_same_through_pinned_buffers(scaled: Path) -> None:  # noqa: F811
    found = []
    for how in (Reading(staged=False), Reading()):
        with reading(how), patch.object(staged, "PIECE", 1000):
            quantization = Quantization(PackedLinear, CUDA)
            found.append(load_text_encoder(scaled, device=CUDA, dtype=torch.bfloat16, quantization=quantization))
    mapped, fed = (one.encoder.state_dict() for one in found)
    assert all(torch.equal(value.view(torch.uint8), fed[name].view(torch.uint8)) for name, value in mapped.items())
    rows = [one.encode(["a red circle moving right on a blue background", ""]) for one in found]
    assert torch.equal(*rows)
