"""INT8 experts on smaller cards with little host memory: planned as FP8 ones are, and the same from their files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.test_packed_reading import files, lora, scaled  # noqa: F401
from tests.int8_files import HOLD, NAMES, SMALL, inputs, stored
from tests.loras_on import loras_on
from tests.pipeline.test_host_planning import mappings
from wan_core.checkpoint import Checkpoint, load_dit, load_vae
from wan_core.checkpoint.comfyui_tensors import METADATA_KEY
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.read import Lora, read_lora
from wan_core.checkpoint.opened import TensorInfo, from_state_dict
from wan_core.checkpoint.packed_matrices import with_packed
from wan_core.checkpoint.save import save, write_safetensors
from wan_core.checkpoint.staged import Reading
from wan_core.config import LoadOptions, LoraOptions, OptionError, Request
from wan_core.execution.memory.planning import GIB, limited
from wan_core.execution.memory.residency import KEPT_FREE, Residency, Waits
from wan_core.models.text.umt5 import UMT5_XXL
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import I2V_A14B, DiTConfig
from wan_core.models.wan.families import find_task
from wan_core.models.wan.families.vace import with_vace
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.int8 import Int8Linear
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline import load as load_stage
from wan_core.pipeline import memory_planning, settings
from wan_core.pipeline.applied_loras import load_with_loras
from wan_core.pipeline.loras import Wanted
from wan_core.pipeline.memory_planning import check_host, memory_plan_of, plan_host, staying_in_file
from wan_core.pipeline.model_parts import PackedSize, Part, Parts
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import ModelSettings, PartToLoad, resolve_settings
from wan_core.pipeline.sources import TINY, TINY_LORAS, recognise
from wan_core.sampling.plan import make_plan

CPU = torch.device("cpu")
HOST = int(27 * GIB)  # what 32 GB leave
ROTATED: Mapping[str, object] = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
TEXT, TABLE = 5_680_000_000, UMT5_XXL.vocab_size * UMT5_XXL.dim
HELD = {"int8": Quantization(Int8Linear, CPU), "checkpoint": HOLD}


# ------------------------------------------------------------------------------------------------------------ full size


def expert_of(config: DiTConfig, description: Mapping[str, object] = ROTATED, unquantised: int = 0) -> Part:
    """A transformer in INT8 as ComfyUI's files have it, recognised without a value being read. kept: matrices in
    bf16."""
    encoded = sorted(config.quantized_names())[unquantised:]
    tensors = {name: TensorInfo(s, torch.bfloat16, 2 * prod(s)) for name, s in expected_shapes(config).items()}
    for name in encoded:
        n, k = tensors[f"{name}.weight"].shape
        tensors[f"{name}.weight"] = TensorInfo((n, k), torch.int8, n * k)
        tensors[f"{name}.weight_scale"] = TensorInfo((n, 1), torch.float32, 4 * n)
    notes = {METADATA_KEY: json.dumps({"layers": dict.fromkeys(encoded, description)})}
    opened = Checkpoint("expert.safetensors", Path("expert.safetensors"), tensors, notes, lambda _: pytest.fail("read"))
    return recognise(with_packed(opened), "dit", load_dit)


def everyday(expert: Part) -> Parts:
    """I2V A14B, UMT5 in FP8 and the 2.1 VAE."""

    def part(config, count: int, **more) -> Part:
        return Part("a file", config, torch.bfloat16, count, lambda *_: nn.Module(), path=Path("a file"), **more)

    text = part(UMT5_XXL, TEXT, scaled=True, packed=PackedSize("fp8", TEXT - TABLE, TEXT - TABLE))
    task = find_task("i2v-A14B")
    models = {"high": expert, "low": expert, "text_encoder": text, "vae": part(VAE_21, 127_000_000)}
    return Parts(task, models, VAE_21)


def lora_of(rank: int) -> Lora:
    """For all matrices of A14B's blocks. Its memory is never touched."""
    state, shapes = {}, expected_shapes(I2V_A14B)
    for name in I2V_A14B.quantized_names():
        n, k = shapes[f"{name}.weight"]
        state[f"{name}.lora_up.weight"] = torch.empty(n, rank, dtype=torch.bfloat16)
        state[f"{name}.lora_down.weight"] = torch.empty(rank, k, dtype=torch.bfloat16)
    return read_lora(from_state_dict(state, "a LoRA"), shapes)


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch):
    """Settings as on a GPU that computes in bf16."""
    monkeypatch.setattr(settings, "compute_dtype", lambda *_: torch.bfloat16)

    def of(expert: Part, precision: str) -> ModelSettings:
        return resolve_settings(everyday(expert), LoadOptions(high="a file", precision=precision), CPU)

    return of


@pytest.mark.parametrize("precision", HELD)
def test_a_pair_with_loras_under_24_16_and_12_gib(monkeypatch, resolved, precision: str) -> None:
    """`checkpoint` is INT8 as stored, as on cards whose row of the table says so."""
    settings = resolved(expert_of(I2V_A14B), precision)
    sizes = {name: round(part.bytes / GIB, 1) for name, part in settings.parts.items()}
    assert sizes == {"high": 13.5, "low": 13.5, "text_encoder": 6.3, "vae": 0.2}
    waits = plan_host(settings.parts, HOST)
    assert waits.mapped.keys() == {"text_encoder", "low"} and waits.pins
    assert plan_host(settings.parts, int(12 * GIB)).mapped.keys() == {"text_encoder", "low", "high"}
    parts = {name: staying_in_file(part) if name in waits.mapped else part for name, part in settings.parts.items()}
    assert parts["low"].lora_mode == "attach"
    wanted = [Wanted(lora_of(64), 1.0, ("", 0, 0))]
    settings = replace(settings, parts=parts, loras={"high": wanted, "low": wanted})
    workload = replace(make_plan(task="i2v-A14B", steps=4), latent_shape=(1, 16, 21, 80, 80), image=True)
    blocks = []
    for gib in (24, 16, 12):
        monkeypatch.setattr(memory_planning, "device_room", lambda *_, gib=gib: limited(gib))
        plan = memory_plan_of(settings, workload)
        assert plan.fits and plan.policy in ("swap", "stream")
        blocks.append(plan.resident_blocks)
    assert blocks == sorted(blocks, reverse=True) and blocks[0] > blocks[-1]


def test_what_has_to_be_encoded_does_not_stay_in_its_file(resolved) -> None:
    """From another rotation, or from matrices in bf16, `int8` makes other numbers."""
    plain = expert_of(I2V_A14B, {"format": "int8_tensorwise"})
    for expert in (plain, expert_of(I2V_A14B, unquantised=1)):
        settings = resolved(expert, "int8")
        assert not settings.parts["high"].stays_in_file
        with pytest.raises(OptionError, match=r"27.0 GiB are available: .* INT8 \(ConvRot\) with 'int8'"):
            plan_host(settings.parts, HOST)
        assert resolved(expert, "checkpoint").parts["high"].stays_in_file


# ------------------------------------------------------------------------------------------------------------ tiny size


def from_file(path: Path, precision: str) -> PartToLoad:
    return staying_in_file(PartToLoad(recognise(path, "dit", load_dit), torch.float32, HELD[precision]))


def streamed(model: nn.Module, copy: bool | None) -> WanModel:
    residency = Residency(CPU, "stream", resident_blocks=1)
    residency.add("high", model, Waits(copy))
    assert all((unit.memory is None) == (copy is False) for unit in residency.host_weights["high"].units)
    streaming_model = residency.use("high")
    assert isinstance(streaming_model, WanModel)
    return streaming_model


@pytest.mark.parametrize(
    ("precision", "kind", "mode"),
    [
        *(("int8", "rotated 256", mode) for mode in ("none", "attach", "merge")),
        *(("checkpoint", "rotated 256", mode) for mode in ("none", "attach", "merge")),
        ("checkpoint", "tensor", "attach"),
        ("checkpoint", "w4a4", "merge"),
        ("checkpoint", "w4a8", "attach"),
    ],
)
@torch.no_grad()
def test_from_its_file_it_is_the_same(files, lora: Wanted, precision: str, kind: str, mode: str) -> None:  # noqa: F811
    """Streamed out of the mapped file, with a LoRA attached; merged, out of memory."""
    path = files[kind]
    part = from_file(path, precision)
    part = replace(part, lora_mode="merge") if mode == "merge" else part
    wanted = [] if mode == "none" else [lora]
    resident, waiting = (load(part, wanted, how) for how in (Reading(mapped=False), Reading(stays=True)))
    ranges = mappings(path)
    packed = [
        name for name in NAMES if any(a <= waiting.get_parameter(f"{name}.weight").data_ptr() < b for a, b in ranges)
    ]
    changed = {name for name in NAMES if f"{name}.weight" in lora.lora.changes}
    assert packed and set(packed) == (NAMES - changed if mode == "merge" else NAMES)
    output = streamed(waiting, None if mode == "merge" else False)(*inputs())
    assert torch.equal(output, resident(*inputs()))
    if mode != "none":
        assert not torch.equal(output, load(part, [], Reading())(*inputs()))


@pytest.mark.parametrize("family", ["wan", "vace"])
@pytest.mark.parametrize("precision", HELD)
def test_blocks_that_are_kept_are_decoded_into_host_memory(
    monkeypatch, tmp_path: Path, precision: str, family: str
) -> None:
    """What a model takes, block by block, and what of it is not its file's: as planned. They count where it stays in
    its file."""
    config = replace(SMALL, num_layers=5) if family == "wan" else with_vace(replace(SMALL, num_layers=5), 2)
    state, _, notes = stored("rotated 256", config=config)
    path = tmp_path / "m.safetensors"
    write_safetensors(state, path, notes)
    quantization = replace(HELD[precision], keep_blocks=1)
    part = PartToLoad(recognise(path, "dit", load_dit), torch.float32, quantization)
    model = load(staying_in_file(part), [], Reading(stays=True))
    residency = Residency(CPU, "stream")
    residency.add("high", model, Waits(False))
    units = [unit.layout.nbytes for unit in residency.host_weights["high"].units]
    assert part.bytes == pytest.approx(sum(units), rel=0.02)
    assert part.units == pytest.approx(units, rel=0.06)
    ranges, names = mappings(path), sorted(config.quantized_names())
    matrices = [model.get_parameter(f"{name}.weight") for name in names]
    decoded = sum(m.nbytes for m in matrices if not any(a <= m.data_ptr() < b for a, b in ranges))
    assert part.decoded_bytes == decoded
    parts, room = {"high": part, "low": part}, decoded / (1 - KEPT_FREE)
    monkeypatch.setattr(memory_planning, "UNPLANNED", 0)  # these models have megabytes
    plan = plan_host(parts, int(2.1 * room))
    assert plan.mapped.keys() == {"low", "high"} and plan.pins
    with pytest.raises(OptionError, match="wait in host memory"):
        plan_host(parts, int(1.5 * room))
    with pytest.raises(OptionError, match="on a CPU"):
        check_host(parts, int(1.5 * room))


def load(part: PartToLoad, wanted: list[Wanted], how: Reading) -> WanModel:
    """Load like `load_models`. Where it stays in its file, the encoding device may not matter; a packing format
    asks that device what it multiplies."""
    assert part.quantization is not None and part.stays_in_file
    if how.stays and part.quantization.kind is Int8Linear and not (wanted and part.lora_mode == "merge"):
        part = replace(part, quantization=replace(part.quantization, device=torch.device("meta")))
    model = load_with_loras(part, wanted, CPU, CPU, how)
    if part.lora_mode == "attach" and wanted:
        loras_on(model, CPU).apply(model, wanted, part)
    assert isinstance(model, WanModel)
    return model


def test_a_lora_that_has_to_be_merged_is_refused(files) -> None:  # noqa: F811
    """Into weights that stay packed in their file; `int8` keeps what was there and sums it in."""
    name = "blocks.0.ffn.0"
    n, k = expected_shapes(SMALL)[f"{name}.weight"]
    whole = read_lora(from_state_dict({f"{name}.diff": torch.ones(n, k)}, "a LoRA"), expected_shapes(SMALL))
    wanted = [Wanted(whole, 1.0, ("", 0, 0))]
    for precision, quantization in HELD.items():
        part = PartToLoad(recognise(files["rotated 256"], "dit", load_dit), torch.float32, quantization)
        if precision == "checkpoint":
            with pytest.raises(OptionError, match=f"changes {name}.* stay packed"):
                staying_in_file(part, wanted)
        else:
            assert staying_in_file(part, wanted).lora_mode == "attach"


@pytest.mark.parametrize("precision", HELD)
def test_a_run_whose_models_all_stay_in_their_files(monkeypatch, tmp_path, scaled, precision: str) -> None:  # noqa: F811
    """With LoRAs and little host memory, planned as on a GPU: the latents of a run without limits."""
    experts = {}
    for name in ("high", "low"):
        experts[name] = str(tmp_path / f"{name}.safetensors")
        save(load_dit(TINY / f"t2v_{name}.safetensors", dtype=torch.float32, quantization=HELD["int8"]), experts[name])
    loras = tuple(LoraOptions(path=str(path), expert=expert) for expert, path in TINY_LORAS.items())
    paths = {**experts, "text_encoder": str(scaled), "vae": str(TINY / "vae.safetensors")}
    plain = LoadOptions(
        task="t2v-tiny", device="cpu", precision=precision, loras=loras, lora_mode="attach", residency="stream", **paths
    )
    request = Request(prompt="a red circle moving right", width=32, height=32, frames=5, steps=2, seed=1)
    expected = latents_of(Pipeline.load(plain), request)
    monkeypatch.setattr(load_stage, "plans_memory", lambda settings: True)
    monkeypatch.setattr(memory_planning, "device_room", lambda *_: 8 * GIB)
    vae = recognise(TINY / "vae.safetensors", "vae", load_vae).bytes(torch.float32)
    limited = replace(plain, lora_mode="auto", host_memory_limit=1.2 * vae / GIB)
    pipe = Pipeline.load(limited, request=request)
    weights_of = pipe.models.residency.host_weights
    memory = {name: not any(unit.stretches for unit in weights.units) for name, weights in weights_of.items()}
    assert memory == {"high": False, "low": False, "text_encoder": False, "vae": True}
    assert pipe.models.settings.parts["high"].lora_mode == "attach"
    assert torch.equal(latents_of(pipe, request), expected)


def latents_of(pipe: Pipeline, request: Request) -> torch.Tensor:
    run = pipe.prepare(request)
    return pipe.sample(run, pipe.encode(run))
