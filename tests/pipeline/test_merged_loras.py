"""LoRAs summed into weights, FP8 as stored among them: the error of the sum, changes in memory, and what is left when
they are taken off."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lora_models import CONFIG, LINEARS, lora_of, shapes
from tests.loras_on import loras_on
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.save import save
from wan_core.checkpoint.staged import Reading
from wan_core.execution.memory.residency import Residency
from wan_core.models.wan.model import WanModel
from wan_core.ops.kernels.formats import FP8_MAX, Quantized
from wan_core.pipeline.applied_loras import load_with_loras
from wan_core.pipeline.loras import Wanted
from wan_core.pipeline.settings import PartToLoad, find_quantization
from wan_core.pipeline.sources import TINY, recognise

CPU = torch.device("cpu")
SOURCE = TINY / "t2v_high.safetensors"
STORED = {"row scales": "fp8", "a tensor's scale": "fp8-tensor"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The embedded model as people have it: in its own precision, and as scaled FP8."""
    folder = tmp_path_factory.mktemp("scaled")
    paths = {"its own precision": SOURCE}
    for name, precision in STORED.items():
        paths[name] = folder / f"{precision}.safetensors"
        save(load_dit(SOURCE, dtype=torch.float32, quantization=find_quantization(precision, CPU)), paths[name])
    return paths


def part_of(path: Path, precision: str | None) -> PartToLoad:
    quantization = None if precision is None else find_quantization(precision, CPU)
    return PartToLoad(recognise(path, "dit", load_dit), torch.float32, quantization)


@cache
def one(seed: int, strength: float = 1.0, everywhere: bool = True) -> Wanted:
    state = lora_of(LINEARS if everywhere else LINEARS[seed % 5 :: 7], seed, scale=0.2)
    state["diffusion_model.blocks.1.norm3.diff"] = torch.full(shapes()["blocks.1.norm3.weight"], 0.1 * seed)
    return Wanted(read_lora(state, shapes()), strength, (str(seed), 0, 0))


def bits(model: WanModel) -> dict[str, Tensor]:
    return {name: value.detach().clone().view(torch.uint8) for name, value in model.state_dict().items()}


def equal(model: WanModel, expected: dict[str, Tensor]) -> bool:
    tensors = bits(model)
    return tensors.keys() == expected.keys() and all(
        torch.equal(tensors[name], value) for name, value in expected.items()
    )


@pytest.mark.parametrize("stored", STORED)
def test_a_merged_weight_is_no_further_from_the_sum_than_rounding_it(files, stored):
    """The error of every weight is about that of quantising the exact sum, in float64 here, with a scale a row."""
    part, wanted = part_of(files[stored], "fp8"), one(3)
    plain, merged = (load_with_loras(part, loras, CPU, CPU) for loras in ((), (wanted,)))
    for name in LINEARS:
        if not name.startswith("blocks."):
            continue
        was, now = plain.get_submodule(name), merged.get_submodule(name)
        (change,) = wanted.lora.changes[f"{name}.weight"]
        up, down = (factor.double() for factor in change.factors)
        exact = was.weight.double() * was.weight_scale.double() + up @ down * change.scale
        scale = exact.abs().amax(1, keepdim=True) / FP8_MAX
        rounded = (exact / scale).to(torch.float8_e4m3fn).double() * scale
        error = (Quantized(now.weight, now.weight_scale).dequantize().double() - exact).norm()
        assert 0 < error <= (rounded - exact).norm() * 1.1  # rows of 64 numbers: of 4,096 it is 1.01


@settings(max_examples=5, deadline=None)
@given(
    stored=st.sampled_from([*STORED, "its own precision"]),
    precision=st.sampled_from([None, "fp8", "fp8-weights"]),
    strengths=st.lists(st.floats(-2, 2), min_size=20, max_size=20),
    seed=st.integers(1, 9),
)
def test_changed_twenty_times_and_taken_off_the_bytes_are_as_at_first(files, stored, precision, strengths, seed):
    part = part_of(files[stored], precision)
    model = load_with_loras(part, (), CPU, CPU)
    first, addresses = bits(model), [p.data_ptr() for p in model.parameters()]
    for at, strength in enumerate(strengths):
        loras = [replace(one(seed, everywhere=False), strength=strength)]
        loras += [one(seed + 1, everywhere=False)] if at % 3 == 0 else []
        loras_on(model, CPU).apply(model, loras, part)
    assert equal(model, bits(load_with_loras(part, loras, CPU, CPU)))  # as if it had been read with them
    assert not loras_on(model, CPU).attached.before and not list(model.named_buffers())  # nothing was kept of the model
    loras_on(model, CPU).apply(model, [], part)
    assert equal(model, first) and addresses == [p.data_ptr() for p in model.parameters()]


def test_only_what_changes_is_read_again(files):
    part = part_of(files["a tensor's scale"], "fp8")
    model = load_with_loras(part, (), CPU, CPU)
    read, first = list[int](), bits(model)
    wanted = replace(one(2, everywhere=False), strength=0.5)
    for loras, reads in (([wanted], True), ([wanted], False), ([replace(wanted, strength=0.0)], True), ([], False)):
        read.clear()
        assert loras_on(model, CPU).changes_weights(loras, part) == reads
        loras_on(model, CPU).apply(model, loras, part, how=Reading(on_bytes=read.append))
        assert equal(model, first) == (not any(one.strength for one in loras))
        changed = sum(model.get_parameter(name).nbytes for name in wanted.lora.changes)
        assert bool(read) == reads and sum(read) < 2 * changed


@pytest.mark.parametrize("taken_off", [False, True])
def test_an_interrupted_change_is_made_good(files, taken_off):
    part = part_of(files["row scales"], "fp8")
    model = load_with_loras(part, [one(1)], CPU, CPU)
    loras_on(model, CPU, [one(1)])
    wanted = [] if taken_off else [one(2, everywhere=False)]
    forwards_left = 9

    def stop(_: int) -> None:
        nonlocal forwards_left
        forwards_left -= 1
        if not forwards_left:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loras_on(model, CPU).apply(model, wanted, part, how=Reading(on_bytes=stop))
    assert loras_on(model).merged.applied is None
    assert loras_on(model, CPU).changes_weights([one(1)], part) and loras_on(model, CPU).changes_weights(wanted, part)
    loras_on(model, CPU).apply(model, wanted, part)
    assert equal(model, bits(load_with_loras(part, wanted, CPU, CPU)))


@pytest.mark.parametrize("resident", [None, 2])
def test_weights_that_stream_are_changed_in_host_memory(files, resident):
    part = part_of(files["row scales"], "fp8")
    residency = Residency(CPU, "swap" if resident is None else "stream", resident_blocks=resident or 0)
    residency.add("high", load_with_loras(part, (), CPU, CPU))
    for loras in ([one(1)], [one(2, everywhere=False)], []):
        model = residency.use("high")
        assert isinstance(model, WanModel)
        loras_on(model, CPU).apply(model, loras, part, lambda: residency.forget_copies("high"))
        residency.release("high")
        assert equal(model, bits(load_with_loras(part, loras, CPU, CPU)))
        homes = {tensor.data_ptr() for unit in residency.host_weights["high"].units for tensor in unit.home}
        assert all(parameter.data_ptr() in homes for parameter in model.parameters())


def test_a_file_that_became_another_model_is_refused(files, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(SOURCE.read_bytes())
    part = part_of(path, None)
    model = load_with_loras(part, (), CPU, CPU)
    other = replace(CONFIG, num_layers=CONFIG.num_layers - 1)
    path.unlink()
    from wan_core.checkpoint import CheckpointError
    from wan_core.checkpoint.random import random_module

    save(random_module(other, device="cpu", dtype=torch.float32), path)
    with pytest.raises(CheckpointError, match="another model"):
        loras_on(model, CPU).apply(model, [one(1)], part)
