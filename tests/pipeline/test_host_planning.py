"""Where weights wait in host memory: pinned, in their files, or refused before anything is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.checkpoint import load_dit
from wan_core.checkpoint.save import save
from wan_core.checkpoint.staged import Reading
from wan_core.config import LoadOptions, OptionError
from wan_core.config.host_memory import _groups, _left_in_container, available_bytes
from wan_core.execution.memory.residency import KEPT_FREE, Residency, Waits
from wan_core.execution.report import GIB
from wan_core.models.text.umt5 import UMT5_XXL
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import I2V_A14B, PreparedForm
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.memory_planning import UNPLANNED, check_prepared, host_room, plan_host, staying_in_file
from wan_core.pipeline.model_parts import PackedSize, Part, matrix_parameters
from wan_core.pipeline.settings import PartToLoad, find_quantization
from wan_core.pipeline.sources import TINY, recognise

CPU = torch.device("cpu")
FILE = Path("model.safetensors")
DIT, TEXT = 14_288_000_000, 5_680_000_000  # parameters


def everyday(scaled: bool) -> dict[str, PartToLoad]:
    """I2V A14B and UMT5 as ComfyUI's files have them, or all in bf16."""

    def part(config, count: int, **more) -> Part:
        return Part("a file", config, torch.bfloat16, count, lambda *_: None, path=FILE, **more)  # type: ignore

    matrices = matrix_parameters(I2V_A14B)
    expert = part(I2V_A14B, DIT, scaled=True, quantized_parameters=matrices) if scaled else part(I2V_A14B, DIT)
    table = UMT5_XXL.vocab_size * UMT5_XXL.dim
    size = PackedSize("fp8", TEXT - table, TEXT - table) if scaled else None
    text = part(UMT5_XXL, TEXT, scaled=scaled, packed=size)
    quantization = Quantization(Fp8RowLinear, CPU, as_stored=True) if scaled else None
    return {
        "high": PartToLoad(expert, torch.bfloat16, quantization),
        "low": PartToLoad(expert, torch.bfloat16, quantization),
        "text_encoder": PartToLoad(text, torch.bfloat16, Quantization(PackedLinear, CPU) if scaled else None),
        "vae": PartToLoad(part(VAE_21, 127_000_000), torch.bfloat16),
    }


def test_the_everyday_graph_in_32_gb() -> None:
    """Both experts in FP8 and UMT5 take 36 GB: one expert is pinned, the rest stays in its files."""
    parts = everyday(scaled=True)
    assert sum(part.bytes for part in parts.values()) > 34e9
    plan = plan_host(parts, 29 * 10**9)
    assert plan.mapped.keys() == {"text_encoder", "low"} and plan.pins
    assert [plan.waits(name).copy for name in parts] == [True, False, False, True]
    assert 0 < plan.mapped["low"] < 29e9 * (1 - KEPT_FREE) - parts["high"].bytes and plan.mapped["text_encoder"] == 0
    assert plan_host(parts, 64 * 10**9).mapped == {} and plan_host(parts, None).pins is None
    assert plan_host(parts, 15 * 10**9).mapped.keys() == {"text_encoder", "low", "high"}


@given(gib=st.floats(8, 64))
def test_what_reads_files_in_every_step_leaves_memory_for_the_process(gib):
    """With 16 GiB one expert of 13.3 was pinned whole, and the process ended in its second video."""
    parts = everyday(scaled=True)
    plan = plan_host(parts, int(gib * GIB))
    pinned = sum(parts[name].bytes for name in parts if name not in plan.mapped) + sum(plan.mapped.values())
    assert plan.mapped.keys() <= {"text_encoder"} or pinned + UNPLANNED <= gib * GIB


@given(gib=st.floats(0.1, 100), scaled=st.booleans(), stored=st.sampled_from([torch.bfloat16, torch.float16]))
def test_what_is_pinned_fits_and_no_file_is_mapped_in_vain(gib, scaled, stored):
    parts = {n: replace(p, part=replace(p.part, stored=stored)) for n, p in everyday(scaled).items()}
    room = gib * GIB
    try:
        plan = plan_host(parts, int(room))
    except OptionError:
        least = sum(part.bytes for name, part in parts.items() if name == "vae" or not part.stays_in_file)
        assert least > int(room)
        return
    pinned = sum(part.bytes for name, part in parts.items() if name not in plan.mapped)
    kept_free = UNPLANNED if plan.mapped else room * KEPT_FREE
    assert pinned <= room and (plan.pins is None or pinned <= room - kept_free)
    assert not plan.mapped or sum(p.bytes for p in parts.values()) > room * (1 - KEPT_FREE) - 1


@given(gib=st.floats(1, 150), prepared=st.floats(0.1, 90), scaled=st.booleans())
def test_what_a_run_prepares_fits_beside_what_is_pinned(gib: float, prepared: float, scaled: bool) -> None:
    """Weights leave pinned memory for it, as far as they can stay in their files, and where there is room none does."""
    parts, room = everyday(scaled), int(gib * GIB)
    form = PreparedForm(None, "keys", 0, int(prepared * GIB), 0, True)
    every = sum(part.bytes for part in parts.values())
    try:
        plan = plan_host(parts, room, form)
    except OptionError:
        least = sum(part.bytes for name, part in parts.items() if name == "vae" or not part.stays_in_file)
        assert least + form.host > room
        return
    pinned = sum(part.bytes for name, part in parts.items() if name not in plan.mapped)
    assert pinned + form.host <= room
    if every + form.host <= room:
        assert plan == plan_host(parts, room)


def test_what_a_run_prepares_is_checked_beside_weights_that_wait() -> None:
    form = PreparedForm("host", "keys", 0, 9 * GIB, 0, True)
    check_prepared(form, None, GIB, 10)
    check_prepared(None, None, 100 * GIB, 10)
    check_prepared(form, form, 9 * GIB, 10)  # the memory of the run before
    for before in (None, form._replace(host=8 * GIB), form._replace(form="another")):
        with pytest.raises(OptionError, match=r"keys, take 9\.0 GiB beside 2.0 GiB of weights, and 10.0 GiB"):
            check_prepared(form, before, 2 * GIB, 10)


def test_limits(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 100\nactive_file 200\ninactive_file 300\n")
    assert _left_in_container(tmp_path) is None and _left_in_container(tmp_path / "absent") is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert _left_in_container(tmp_path) == 800  # what is cached can be dropped
    own = tmp_path / "cgroup"
    own.write_text("1:name=systemd:/x\n0::/user.slice/limited.scope\n")  # as systemd-run --scope makes them
    assert _groups(tmp_path, own) == [tmp_path, tmp_path / "user.slice/limited.scope", tmp_path / "user.slice"]
    own.write_text("9:memory:/a\n0::/\n")  # version 1
    assert _groups(tmp_path, own) == [tmp_path, tmp_path / "memory/a", tmp_path / "memory"]
    (tmp_path / "memory/a").mkdir(parents=True)
    (tmp_path / "memory/a/memory.limit_in_bytes").write_text("5000\n")
    (tmp_path / "memory/a/memory.usage_in_bytes").write_text("4000\n")
    (tmp_path / "memory/a/memory.stat").write_text("cache 900\nactive_file 600\ninactive_file 100\n")
    assert _left_in_container(tmp_path / "memory/a") == 1700
    own.write_text("0::/\n")
    assert _groups(tmp_path, own) == [tmp_path] == _groups(tmp_path, tmp_path / "absent")
    assert host_room(0.001) == int(0.001 * GIB) and host_room() == pytest.approx(available_bytes(), rel=0.1)
    with pytest.raises(OptionError, match="host memory limit 0 GiB"):
        LoadOptions(model="tiny", host_memory_limit=0.0)


def mappings(path: Path) -> list[tuple[int, int]]:
    """Where this process has mapped a file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return [(int(begin, 16), int(end, 16)) for begin, end in (line[0].split("-") for line in lines)]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
@pytest.mark.parametrize("precision", [None, "fp8"])
def test_weights_in_their_file_are_no_copy_and_compute_the_same(tmp_path: Path, precision: str | None) -> None:
    quantization = None if precision is None else find_quantization(precision, CPU)
    stored = load_dit(TINY / "t2v_high.safetensors", dtype=torch.float32, quantization=quantization)
    save(stored, tmp_path / "model.safetensors")
    # Nothing may go by the device that encodes.
    quantization = None if quantization is None else replace(quantization, as_stored=True, device=torch.device("meta"))
    part = PartToLoad(recognise(tmp_path / "model.safetensors", "dit", load_dit), torch.float32, quantization)
    assert part.stays_in_file and staying_in_file(part).lora_mode == "attach"
    model = part.load(CPU, how=Reading(stays=True))
    weights = [m.weight for name, m in model.named_modules() if name.startswith("blocks.") and hasattr(m, "weight")]
    matrices = [weight for weight in weights if weight is not None and weight.ndim == 2]
    ranges = mappings(tmp_path / "model.safetensors")
    assert matrices and all(any(a <= m.data_ptr() < b for a, b in ranges) for m in matrices)
    residency = Residency(CPU, "stream", resident_blocks=2)
    residency.add("high", model, Waits(False))
    assert all(unit.memory is None for unit in residency.host_weights["high"].units)
    streamed = residency.use("high")
    draw = torch.Generator().manual_seed(0)
    x, text = torch.randn(1, 16, 2, 4, 4, generator=draw), torch.randn(1, 4, 64, generator=draw)
    with torch.no_grad():
        assert torch.equal(streamed(x, torch.tensor([500.0]), text), stored(x, torch.tensor([500.0]), text))
