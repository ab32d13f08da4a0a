"""Weights that stay packed, on an NVIDIA GPU: read by threads, with the bits that a mapped file gives; INT8 experts
with LoRAs, and streamed out of their file."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from tests.checkpoint.test_packed_reading import OnTheCPU, files, lora, scaled  # noqa: F401
from tests.int8_files import inputs
from tests.loras_on import loras_on
from wan_core.checkpoint import load_dit, load_text_encoder, staged
from wan_core.checkpoint.staged import Reading
from wan_core.execution.memory.residency import Residency, Waits
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.applied_loras import load_with_loras
from wan_core.pipeline.loras import Wanted, merging
from wan_core.pipeline.memory_planning import staying_in_file
from wan_core.pipeline.settings import PartToLoad
from wan_core.pipeline.sources import recognise

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def test_it_is_the_same_through_pinned_buffers(scaled: Path) -> None:  # noqa: F811
    encoders = []
    for how in (Reading(staged=False), Reading()):
        with patch.object(staged, "PIECE", 1000):
            quantization = Quantization(PackedLinear, CUDA)
            encoders.append(
                load_text_encoder(scaled, device=CUDA, dtype=torch.bfloat16, quantization=quantization, how=how)
            )
    mapped, fed = (one.encoder.state_dict() for one in encoders)
    assert all(torch.equal(value.view(torch.uint8), fed[name].view(torch.uint8)) for name, value in mapped.items())
    rows = [one.encode(["a red circle moving right on a blue background", ""]) for one in encoders]
    assert torch.equal(*rows)


@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear, Fp8RowLinear])
@pytest.mark.parametrize("merged", [False, True])
def test_int8_is_the_same_through_pinned_buffers(files, lora: Wanted, kind: type, merged: bool) -> None:  # noqa: F811
    """And nothing of it is computed on the CPU, where sums of an A14B pair took minutes."""
    if kind is Fp8RowLinear and (reason := SCHEMES["fp8"].why_not(CUDA)) is not None:
        pytest.skip(reason)
    states, quantization = [], Quantization(kind, CUDA, as_stored=kind is Fp8RowLinear)
    for how in (Reading(staged=False), Reading()):
        with patch.object(staged, "PIECE", 1000), OnTheCPU() as there:
            loras = merging([lora], CUDA) if merged else None
            options = {"dtype": torch.bfloat16, "quantization": quantization, "loras": loras, "how": how}
            model = load_dit(files["rotated 256"], device=CUDA, **options)
        states.append(model.state_dict())
        assert {value.device.type for value in states[-1].values()} == {"cuda"} and not there.found
    mapped, fed = states
    assert all(torch.equal(value.view(torch.uint8), fed[name].view(torch.uint8)) for name, value in mapped.items())


@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear])
@pytest.mark.parametrize("attached", [False, True])
@torch.no_grad()
def test_int8_streams_out_of_its_file(files, lora: Wanted, kind: type, attached: bool) -> None:  # noqa: F811
    """A streamed INT8 file gives the result of a resident one, bit for bit."""
    quantization, out = Quantization(kind, CUDA), []
    part = staying_in_file(PartToLoad(recognise(files["rotated 256"], "dit", load_dit), torch.bfloat16, quantization))
    x, t, text = (value.to(CUDA) for value in inputs())
    for how in (Reading(), Reading(stays=True)):
        device = torch.device("cpu") if how.stays else CUDA
        model = load_with_loras(part, [lora], device, CUDA, how)
        assert isinstance(model, WanModel)
        if attached:
            loras_on(model, CUDA).apply(model, [lora], part)
        residency = Residency(CUDA, "stream" if how.stays else "resident", resident_blocks=1)
        residency.add("high", model, Waits(False if how.stays else None))
        assert not how.stays or all(unit.memory is None for unit in residency.host_weights["high"].units)
        out += [residency.use("high")(x.bfloat16(), t, text.bfloat16()) for _ in range(2)]
    assert all(torch.equal(one, out[0]) for one in out[1:])
