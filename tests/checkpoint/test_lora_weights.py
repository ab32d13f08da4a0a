"""LoRAs on weights of every precision: merged, attached, changed and undone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.lora_models import (
    CONFIG,
    CPU,
    FORMS,
    LINEARS,
    SOURCE,
    attached,
    base,
    dense_model,
    kohya,
    latents,
    lora_of,
    model,
    output,
    put_on,
    quantization,
    relative,
    shapes,
    wanted,
)
from tests.loras_on import loras_on
from wan_core.checkpoint import load_dit, open_checkpoint
from wan_core.checkpoint.load import StoredValues
from wan_core.checkpoint.save import save, write_safetensors
from wan_core.config import LoraOptions
from wan_core.ops.kernels.formats import Quantized
from wan_core.ops.quant.linear import low_rank_input
from wan_core.ops.quant.swap import Quantization
from wan_core.ops.quant.transformer_engine import TECurrentLinear
from wan_core.pipeline.loras import (
    merging,
)


@pytest.mark.parametrize("precision", ["fp8", "fp8-weights", "te-current", "int8"])
def test_attached_beside_quantised_weights(precision):
    """The difference that the LoRA makes is that of the product of low rank, whatever the format of the input."""
    state = lora_of(sorted(CONFIG.quantized_names()), 6, scale=0.3)
    kind = Quantization(TECurrentLinear, CPU) if precision == "te-current" else quantization(precision)
    net = load_dit(SOURCE, dtype=torch.float32, quantization=kind)
    plain = output(net)
    loras_on(net).attached.apply(net, [wanted(state)])
    changed = output(net)
    expected = load_dit(SOURCE, dtype=torch.float32)
    loras_on(expected).attached.apply(expected, [wanted(state)])
    unquantised = output(expected)
    assert relative(changed, unquantised) < 0.12 < relative(plain, unquantised)
    loras_on(net).attached.clear(net)
    assert torch.equal(output(net), plain)


@pytest.mark.parametrize("fmt", ["row", "tensor", "block"])
def test_low_rank_product_of_fp8_inputs(fmt):
    from wan_core.ops.kernels.formats import quantize_reference

    torch.manual_seed(7)
    x = quantize_reference(torch.randn(2, 5, 256), fmt)
    down = torch.randn(4, 256)
    torch.testing.assert_close(low_rank_input(x, down), x.dequantize() @ down.t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_merged_before_quantisation(precision):
    """Encoded from the sum of the file's own numbers: the same bits as a checkpoint of the sum."""
    state = lora_of(LINEARS, 8)
    sums = {
        f"{m}.weight": base()[f"{m}.weight"]
        + state[f"diffusion_model.{m}.lora_up.weight"] @ state[f"diffusion_model.{m}.lora_down.weight"]
        for m in LINEARS
    }
    loras = merging([wanted(state)], CPU)
    net = load_dit(SOURCE, dtype=torch.float32, quantization=quantization(precision), loras=loras)
    whole = dense_model(sums).state_dict()
    metadata = {"num_heads": str(CONFIG.num_heads), "text_len": str(CONFIG.text_len)}
    checkpoint = replace(open_checkpoint(whole), metadata=metadata)
    other = load_dit(checkpoint, dtype=torch.float32, quantization=quantization(precision))
    for name, value in other.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name].float(), value.float(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("form", ["DoRA", "LoKr", "difference"])
def test_sums_into_encoded_weights_begin_at_the_file(form, tmp_path):
    """Afterwards as while it is loaded, at every strength: rounded once."""
    module = "blocks.1.ffn.2"
    n, k = shapes()[f"{module}.weight"]
    torch.manual_seed(3)
    roles = {"diff": torch.randn(n, k) * 0.05} if form == "difference" else FORMS[form](n, k)
    state = kohya(module, **roles)
    net = model("fp8")
    for strength in (1.0, 0.4, 1.0):
        one = wanted(state, strength)
        loras_on(net).attached.apply(net, [one], original=StoredValues(SOURCE))
        loras = merging([one], CPU)
        merged = load_dit(SOURCE, dtype=torch.float32, quantization=quantization("fp8"), loras=loras)
        exact = merged.get_submodule(module)
        assert torch.equal(net.get_submodule(module).weight.float(), exact.weight.float())
        assert torch.equal(net.get_submodule(module).weight_scale, exact.weight_scale)
    write_safetensors(state, tmp_path / "style.safetensors", {})
    options = {"loras": (LoraOptions(path=str(tmp_path / "style.safetensors")),), "precision": "fp8"}
    assert torch.equal(latents(**options, lora_mode="attach")[0], latents(**options, lora_mode="merge")[0])


def test_scaled_fp8_files_take_both(tmp_path):
    stored = load_dit(SOURCE, dtype=torch.bfloat16, quantization=quantization("fp8"))
    save(stored, tmp_path / "scaled.safetensors")
    state = lora_of(sorted(CONFIG.quantized_names()), 9, scale=0.3)
    merged = load_dit(tmp_path / "scaled.safetensors", dtype=torch.float32, loras=merging([wanted(state)], CPU))
    name = "blocks.1.ffn.2"
    linear = stored.get_submodule(name)
    exact = Quantized(linear.weight, linear.weight_scale).dequantize()
    exact += state[f"diffusion_model.{name}.lora_up.weight"] @ state[f"diffusion_model.{name}.lora_down.weight"]
    torch.testing.assert_close(merged.get_parameter(f"{name}.weight").data, exact, atol=1e-5, rtol=1e-5)
    scaled = load_dit(tmp_path / "scaled.safetensors", dtype=torch.float32, quantization=quantization("fp8"))
    loras_on(scaled).attached.apply(scaled, [wanted(state)])
    assert torch.equal(scaled.get_submodule(name).weight.view(torch.uint8), linear.weight.view(torch.uint8))
    assert relative(output(scaled), output(merged)) < 0.08


@settings(max_examples=8, deadline=None)
@given(
    precision=st.sampled_from([None, "fp8", "fp8-weights"]),
    steps=st.lists(st.tuples(st.sampled_from(["attach", "merge"]), st.floats(-2, 2)), min_size=1, max_size=4),
    seed=st.integers(0, 9),
)
def test_taken_away_every_bit_is_as_before(precision, steps, seed):
    mixed = lora_of(LINEARS[::3], seed) | {
        "diffusion_model.blocks.1.norm3.diff": torch.randn(shapes()["blocks.1.norm3.weight"]),
        "diffusion_model.blocks.0.cross_attn.o.diff": torch.randn(shapes()["blocks.0.cross_attn.o.weight"]),
        "diffusion_model.blocks.0.cross_attn.o.diff_b": torch.randn(shapes()["blocks.0.cross_attn.o.bias"]),
    }
    net = model(precision)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    kinds = {name: type(m) for name, m in net.named_modules()}
    addresses = [p.data_ptr() for p in net.parameters()]
    for mode, strength in steps:
        put_on(net, [wanted(mixed, strength)], mode, precision)
        assert [p.data_ptr() for p in net.parameters()] == addresses  # what was captured goes on
        assert net.state_dict().keys() == before.keys()
    put_on(net, [], mode, precision)
    assert {name: type(m) for name, m in net.named_modules()} == kinds
    assert not list(net.named_buffers())
    for name, value in net.state_dict().items():
        assert torch.equal(value.view(torch.uint8), before[name].view(torch.uint8)), name


def test_a_strength_is_a_number_that_is_read_when_the_model_runs():
    state = lora_of(LINEARS, 11) | {
        "diffusion_model.blocks.1.diff_m": torch.randn(shapes()["blocks.1.modulation"]) * 0.1
    }
    net = model()
    loras = loras_on(net).attached
    loras.apply(net, [wanted(state, 1.0)])
    strengths = [m.lora_strength for m in attached(net).values()]
    assert len({id(t) for t in strengths}) == 1 and len(strengths) == len(LINEARS)
    full = output(net)
    tensors = {n: b.data_ptr() for n, b in net.named_buffers()}
    loras.apply(net, [wanted(state, 0.0)])
    assert torch.equal(output(net), output(model()))
    loras.apply(net, [wanted(state, 1.0)])
    assert torch.equal(output(net), full)
    assert tensors == {n: b.data_ptr() for n, b in net.named_buffers()}  # nothing was read again
    assert all(a is m.lora_strength for a, m in zip(strengths, attached(net).values(), strict=True))


def test_compiled_blocks_see_a_lora_that_comes_later_and_a_new_strength_compiles_nothing():
    from wan_core.execution.optimize import compilations, compile_blocks

    torch._dynamo.reset()
    state, net, reference = lora_of(LINEARS, 12), model("fp8"), model("fp8")
    compile_blocks(net, CPU, backend="eager")
    plain = output(net)
    for at, strength in enumerate((1.0, 0.5, -1.0)):
        for one in (net, reference):
            loras_on(one).attached.apply(one, [wanted(state, strength)])
        torch.testing.assert_close(output(net), output(reference), atol=1e-5, rtol=1e-5)
        if at == 0:
            count = compilations()
    assert compilations() == count > 0
    loras_on(net).attached.clear(net)
    torch.testing.assert_close(output(net), plain, atol=1e-6, rtol=1e-6)
    torch._dynamo.reset()
