"""LoRAs on an NVIDIA GPU: beside every precision and FP8 attention, and in compiled blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.lora_models import LINEARS, lora_of, relative, shapes, wanted
from tests.loras_on import loras_on
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.lora import merge
from wan_core.checkpoint.lora.merge import Change
from wan_core.checkpoint.save import save
from wan_core.config import LoadOptions, LoraOptions, Request
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import begin_run, compilations, optimize
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.quant.schemes import SCHEMES
from wan_core.pipeline.applied_loras import load_with_loras
from wan_core.pipeline.loras import merging
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import PartToLoad, find_quantization
from wan_core.pipeline.sources import TINY, TINY_LORAS, recognise
from wan_lab.metrics import judge

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SOURCE = TINY / "t2v_high.safetensors"
STATE = lora_of(LINEARS, 1, rank=16, scale=0.3)


def loaded_with_lora(precision: str | None, attention: str = "sdpa", *, merged: bool = False, **options) -> WanModel:
    if precision is not None and (reason := SCHEMES[precision].why_not(CUDA)):
        pytest.skip(reason)
    quantization = None if precision is None else find_quantization(precision, CUDA)
    merge = merging([wanted(STATE)], CUDA) if merged else None
    model = load_dit(SOURCE, device=CUDA, dtype=torch.bfloat16, quantization=quantization, loras=merge)
    return optimize(model, attend=resolve_attention(attention, CUDA, torch.bfloat16)[1], device=CUDA, **options)


@torch.no_grad()
def run(model: WanModel, times: int = 1, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    config = model.config
    x = torch.randn(1, config.in_channels, 5, 12, 12, generator=draw).to(CUDA)
    text = model.prepare_text(torch.randn(1, 9, config.text_dim, generator=draw).to(CUDA))
    begin_run(model)
    for _ in range(times):
        out = model(x, torch.tensor([700.0], device=CUDA), text)
    return out.clone()


@pytest.mark.parametrize("attention", ["sdpa", "math-fp8"])
@pytest.mark.parametrize("precision", [None, *SCHEMES])
def test_attached_is_merged_within_the_precision(precision, attention):
    exact = run(loaded_with_lora(None, merged=True))
    plain = loaded_with_lora(precision, attention)
    before = run(plain)
    loras_on(plain).attached.apply(plain, [wanted(STATE)])
    attached, merged = run(plain), run(loaded_with_lora(precision, attention, merged=True))
    allowed = 0.03 if precision is None and attention == "sdpa" else 0.15
    assert relative(attached, exact) < allowed and relative(merged, exact) < allowed
    assert relative(before, exact) > 2 * relative(attached, exact)
    loras_on(plain).attached.clear(plain)
    assert torch.equal(run(plain), before)


def test_changes_arrive_as_they_were(monkeypatch):
    """Whatever their dtypes and sizes, in batches of several and of one."""
    torch.manual_seed(0)
    pairs = [
        (torch.randn(n, 3).to(kind), torch.randn(3, 7).to(kind))
        for n in (1, 5, 640)
        for kind in (torch.float32, torch.bfloat16)
    ]
    changes = {
        f"w{i}": ((Change(kind="LoRA", shape=(len(up), 7), factors=(up, down)), 0.5),)
        for i, (up, down) in enumerate(pairs)
    }
    for batch in (1, 100, 1 << 26):
        monkeypatch.setattr(merge, "BATCH", batch)
        with merge.Ahead(changes, CUDA) as ahead:
            for name, ((change, strength),) in changes.items():
                ((taken, same),) = ahead.take(name)
                assert same == strength and all(factor.is_cuda for factor in taken.factors)
                assert all(
                    torch.equal(*pair) for pair in zip(change.factors, (f.cpu() for f in taken.factors), strict=True)
                )


@pytest.mark.parametrize("precision", [None, "fp8", "te-current"])
def test_compiled_blocks_are_compiled_once(precision):
    torch._dynamo.reset()
    compiled, eager = (
        loaded_with_lora(precision, compile="blocks"),
        loaded_with_lora(precision),
    )
    for model in (compiled, eager):
        loras_on(model).attached.apply(model, [wanted(STATE, 1.0)])
    run(compiled)
    count = compilations()
    for strength in (1.0, 0.3, -1.0):
        for model in (compiled, eager):
            loras_on(model).attached.apply(model, [wanted(STATE, strength)])
        assert relative(run(compiled), run(eager)) < 0.05
    assert compilations() == count


WAYS = ({}, {"precision": "fp8"}, {"lora_mode": "attach"}, {"residency": "swap"}, {"compile": "blocks"})


@pytest.mark.parametrize("options", [*WAYS, {"residency": "swap", "lora_mode": "merge"}], ids=str)
def test_four_steps_of_the_embedded_model(options):
    caption = "a green cross moving down on a white background"
    loras = tuple(LoraOptions(path=str(path), expert=expert) for expert, path in TINY_LORAS.items())
    request = Request(prompt=caption, seed=1)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cuda", loras=loras, **options), request=request)
    result = pipe.generate(request)
    assert len(result.plan.steps) == 4
    assert judge(torch.from_numpy(result.frames), caption).all_true


def test_parameters_lie_where_they_lay():
    model = loaded_with_lora("fp8")
    addresses = [p.data_ptr() for p in model.parameters()]
    difference = {"diffusion_model.blocks.0.ffn.0.diff": torch.randn(shapes()["blocks.0.ffn.0.weight"])}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loras_on(model).attached.apply(model, [wanted({**STATE, **difference})])
    loras_on(model).attached.clear(model)
    assert addresses == [p.data_ptr() for p in model.parameters()]
    assert all(torch.equal(v.view(torch.uint8), before[n].view(torch.uint8)) for n, v in model.state_dict().items())


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("precision", [None, "fp8", "fp8-weights"])
def test_a_merged_lora_is_changed_and_taken_off(tmp_path, precision, streamed):
    """From a file in scaled FP8, on the device and in pinned host memory: the bytes of a fresh load each time."""
    stored = load_dit(SOURCE, device=CUDA, dtype=torch.bfloat16, quantization=find_quantization("fp8-tensor", CUDA))
    save(stored, tmp_path / "scaled.safetensors")
    quantization = None if precision is None else find_quantization(precision, CUDA)
    part = PartToLoad(recognise(tmp_path / "scaled.safetensors", "dit", load_dit), torch.bfloat16, quantization)
    home = torch.device("cpu") if streamed else CUDA
    model, residency = load_with_loras(part, [wanted(STATE, 0.3)], home, CUDA), Residency(CUDA, "stream")
    loras_on(model, CUDA, [wanted(STATE, 0.3)])
    if streamed:
        residency.add("high", model)
        residency.use("high")
    for strength in (1.0, -0.5, 0.0):
        forget = (lambda: residency.forget_copies("high")) if streamed else (lambda: None)
        loras_on(model, CUDA).apply(model, [wanted(STATE, strength)], part, forget)
        if streamed:
            residency.release("high")
        exact = load_with_loras(part, [wanted(STATE, strength)], CUDA, CUDA).state_dict()
        for name, value in model.state_dict().items():
            assert value.device.type == home.type
            assert torch.equal(value.to(CUDA).view(torch.uint8), exact[name].view(torch.uint8)), name
