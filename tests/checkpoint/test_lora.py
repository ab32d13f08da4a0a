"""LoRAs: every spelling gives the dense sum, attached or merged; strengths change in place; none is left behind."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.loras_on import loras_on
from wan_core.checkpoint import CheckpointError, load_dit, open_checkpoint
from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.load import StoredValues
from wan_core.checkpoint.lora.merge import Change
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.save import save, write_safetensors
from wan_core.config import LoadOptions, LoraOptions, OptionError, Request
from wan_core.models.wan.families.plain import diffusers_modules
from wan_core.models.wan.model import WanModel
from wan_core.ops.kernels.formats import Quantized
from wan_core.ops.quant.linear import LowRank, low_rank_input
from wan_core.ops.quant.swap import Quantization
from wan_core.ops.quant.transformer_engine import TECurrentLinear
from wan_core.pipeline.loras import (
    Wanted,
    attachable,
    check_packed,
    choose_mode,
    expert_of,
    lora_bytes,
    merging,
    read_loras,
)
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.settings import PartToLoad, find_quantization
from wan_core.pipeline.sources import TINY, recognise

CPU = torch.device("cpu")
SOURCE = TINY / "t2v_high.safetensors"
RANK = 4


@cache
def base() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in load_dit(SOURCE, dtype=torch.float32).state_dict().items()}


@cache
def loaded(precision: str | None = None) -> WanModel:
    return load_dit(SOURCE, dtype=torch.float32, quantization=None if precision is None else quantization(precision))


def model(precision: str | None = None) -> WanModel:
    return copy.deepcopy(loaded(precision))


CONFIG = loaded().config


def attached(net: WanModel) -> dict[str, LowRank]:
    """The linears that have a LoRA, by name."""
    return {n: m for n, m in net.named_modules() if isinstance(m, LowRank) and m.lora_down is not None}


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    return expected_shapes(CONFIG)


LINEARS = sorted(attachable(CONFIG))


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    config = CONFIG
    return (
        torch.randn(1, config.in_channels, 3, 4, 4, generator=draw),
        torch.tensor([700.0]),
        torch.randn(1, 7, config.text_dim, generator=draw),
    )


@torch.no_grad()
def output(net: WanModel) -> Tensor:
    return net(*inputs())


def dense_model(changed: dict[str, Tensor]) -> WanModel:
    net = model()
    net.load_state_dict({**base(), **changed})
    return net


def put_on(net: WanModel, loras: list[Wanted], mode: str, precision: str | None = None) -> None:
    """Have just `loras` on a model of SOURCE, merged or attached, whatever was on it."""
    held = None if precision is None else quantization(precision)
    part = PartToLoad(recognise(SOURCE, "dit", load_dit), torch.float32, held)
    loras_on(net).merged.apply(net, loras if mode == "merge" else [], part)
    loras_on(net).attached.apply(net, loras if mode == "attach" else [], original=StoredValues(SOURCE))


def wanted(state: dict[str, Tensor], strength: float = 1.0, key: str = "a") -> Wanted:
    return Wanted(read_lora(state, shapes()), strength, (key, 0, 0))


# ------------------------------------------------------------------------------------------------------------ spellings

FLAT = {"lora_unet_", "lora_unet__", "lycoris_"}
PREFIXES = ("", "diffusion_model.", "model.diffusion_model.", *sorted(FLAT), "base_model.model.", "transformer.")
PAIRS = (("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight"), ("lora_A", "lora_B"),
         ("lora_A.default.weight", "lora_B.default.weight"), ("lora.down.weight", "lora.up.weight"))  # fmt: skip
DIFFUSERS = {ours: theirs for theirs, ours in diffusers_modules(CONFIG.num_layers).items()}


def spelled(module: str, prefix: str, diffusers: bool) -> str:
    name = DIFFUSERS[module] if diffusers else module
    return prefix + (name.replace(".", "_") if prefix in FLAT else name)


@settings(max_examples=20, deadline=None)
@given(
    modules=st.lists(st.sampled_from(LINEARS), min_size=1, max_size=4, unique=True),
    prefix=st.sampled_from(PREFIXES),
    pair=st.sampled_from(PAIRS),
    diffusers=st.booleans(),
    alpha=st.none() | st.floats(0.25, 8),
    strength=st.floats(-2, 2),
    mode=st.sampled_from(["attach", "merge", "load"]),
    seed=st.integers(0, 99),
)
def test_every_spelling_is_the_dense_sum(modules, prefix, pair, diffusers, alpha, strength, mode, seed):
    torch.manual_seed(seed)
    state, sums = {}, {}
    for module in modules:
        n, k = shapes()[f"{module}.weight"]
        down, up, name = torch.randn(RANK, k) * k**-0.5, torch.randn(n, RANK) * 0.1, spelled(module, prefix, diffusers)
        state |= {f"{name}.{pair[0]}": down, f"{name}.{pair[1]}": up}
        if alpha is not None:
            state[f"{name}.alpha"] = torch.tensor(alpha)
        scale = 1.0 if alpha is None else float(torch.tensor(alpha)) / RANK
        weight = base()[f"{module}.weight"]
        sums[f"{module}.weight"] = (weight.double() + strength * scale * (up.double() @ down.double())).float()
    one = wanted(state, strength)
    assert not one.lora.ignored and set(one.lora.changes) == set(sums)
    assert f"{len(modules)} LoRA of rank {RANK}" in one.lora.words()
    net = load_dit(SOURCE, dtype=torch.float32, loras=merging([one], CPU)) if mode == "load" else model()
    if mode != "load":
        put_on(net, [one], mode)
    assert attached(net).keys() == (set(modules) if mode == "attach" else set())
    if mode != "attach":
        for name, value in sums.items():
            torch.testing.assert_close(net.get_parameter(name).data, value, atol=1e-5, rtol=0)
    assert relative(output(net), output(dense_model(sums))) < 1e-5


def kohya(module: str, **roles: Tensor) -> dict[str, Tensor]:
    name = "lora_unet_" + module.replace(".", "_")
    return {f"{name}.{role}": value for role, value in roles.items()}


def kohya_pair(n: int, k: int) -> dict[str, Tensor]:
    return {"lora_down.weight": torch.randn(3, k) * 0.1, "lora_up.weight": torch.randn(n, 3)}


def loha(n: int, k: int, r: int) -> dict[str, Tensor]:
    sizes = {"w1_a": (n, r), "w1_b": (r, k), "w2_a": (n, r), "w2_b": (r, k)}
    return {f"hada_{name}": torch.randn(size) * 0.2 for name, size in sizes.items()}


def lokr(n: int, k: int, r: int, first: bool, second: bool) -> dict[str, Tensor]:
    a, b = 4, 8
    found = {}
    for name, split, (rows, columns) in (("w1", first, (a, b)), ("w2", second, (n // a, k // b))):
        if split:
            found |= {f"lokr_{name}_a": torch.randn(rows, r) * 0.2, f"lokr_{name}_b": torch.randn(r, columns) * 0.2}
        else:
            found[f"lokr_{name}"] = torch.randn(rows, columns) * 0.1
    return found


def lycoris_weight(roles: dict[str, Tensor], weight: Tensor, alpha: float) -> Tensor:
    """The weight that LyCORIS itself makes of one of its files, at multiplier 1."""
    functional = pytest.importorskip("lycoris.functional")
    rank = next((v.shape[0] for n, v in roles.items() if n.endswith("_b") or n == "lora_down.weight"), None)
    scale = alpha / rank if rank else 1.0
    get = roles.get
    if "hada_w1_a" in roles:
        parts = (roles["hada_w1_b"], roles["hada_w1_a"], roles["hada_w2_b"], roles["hada_w2_a"], None, None)
        delta = functional.loha.diff_weight(*parts, gamma=scale, backend="torch")
    elif "lora_down.weight" in roles:
        delta = functional.locon.diff_weight(
            roles["lora_down.weight"], roles["lora_up.weight"], None, gamma=scale, backend="torch"
        )
    else:
        names = ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b")
        delta = functional.lokr.diff_weight(
            *(get(f"lokr_{name}") for name in names), None, gamma=alpha, backend="torch"
        )
    if "dora_scale" not in roles:
        return weight + delta
    return functional.general.weight_decompose(
        weight + delta, roles["dora_scale"], wd_on_out=roles["dora_scale"].shape[1] == 1, backend="torch"
    )


FORMS: dict[str, Callable[[int, int], dict[str, Tensor]]] = {
    "LoHa": lambda n, k: loha(n, k, 3),
    "LoHa of a large rank": lambda n, k: loha(n, k, 12),
    "LoKr": lambda n, k: lokr(n, k, 3, False, False),
    "LoKr, second split": lambda n, k: lokr(n, k, 3, False, True),
    "LoKr, both split": lambda n, k: lokr(n, k, 3, True, True),
    "DoRA": lambda n, k: {**kohya_pair(n, k), "dora_scale": torch.rand(n, 1) + 0.5},
    "DoRA of columns": lambda n, k: {**kohya_pair(n, k), "dora_scale": torch.rand(1, k) + 0.5},
    "DoRA of a LoKr": lambda n, k: {**lokr(n, k, 3, False, True), "dora_scale": torch.rand(n, 1) + 0.5},
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_lycoris_forms_equal_its_own_code(form):
    torch.manual_seed(len(form))
    module = "blocks.2.ffn.0"
    weight = base()[f"{module}.weight"]
    roles = FORMS[form](*weight.shape)
    whole = lycoris_weight(roles, weight.clone(), alpha=2.0)
    expected = weight + 0.6 * (whole - weight)
    one = wanted(kohya(module, **roles, alpha=torch.tensor(2.0)), 0.6)
    kind = "LoKr" if "LoKr" in form else "LoHa" if "LoHa" in form else "LoRA"
    assert list(one.lora.kinds) == [f"{kind} with DoRA" if "DoRA" in form else kind]
    for mode in ("merge", "attach"):
        net = model()
        put_on(net, [one], mode)
        torch.testing.assert_close(
            output(net), output(dense_model({f"{module}.weight": expected})), atol=1e-5, rtol=1e-4
        )
        if mode == "merge":
            torch.testing.assert_close(net.get_parameter(f"{module}.weight").data, expected, atol=1e-5, rtol=1e-5)


def test_differences_reach_weights_biases_norms_and_modulation():
    torch.manual_seed(3)
    names = {
        "diffusion_model.blocks.0.self_attn.q.diff": "blocks.0.self_attn.q.weight",
        "diffusion_model.blocks.0.self_attn.q.diff_b": "blocks.0.self_attn.q.bias",
        "diffusion_model.blocks.1.self_attn.norm_q.diff": "blocks.1.self_attn.norm_q.weight",
        "diffusion_model.blocks.1.norm3.diff": "blocks.1.norm3.weight",
        "diffusion_model.blocks.1.norm3.diff_b": "blocks.1.norm3.bias",
        "diffusion_model.blocks.2.diff_m": "blocks.2.modulation",
        "diffusion_model.head.diff_m": "head.modulation",
        "diffusion_model.head.head.diff_b": "head.head.bias",
        "diffusion_model.time_embedding.0.diff": "time_embedding.0.weight",
        "diffusion_model.patch_embedding.diff": "patch_embedding.weight",
        "lora_unet_blocks_3_norm3.w_norm": "blocks.3.norm3.weight",
        "transformer.blocks.4.norm2.diff_b": "blocks.4.norm3.bias",
        "diffusion_model.blocks.5.modulation.diff": "blocks.5.modulation",
    }
    state = {theirs: torch.randn(shapes()[ours]) * 0.05 for theirs, ours in names.items()}
    sums = {ours: base()[ours] + 0.7 * state[theirs] for theirs, ours in names.items()}
    for mode in ("merge", "attach"):
        net = model()
        put_on(net, [wanted(state, 0.7)], mode)
        torch.testing.assert_close(output(net), output(dense_model(sums)), atol=1e-5, rtol=1e-5)


def test_a_convolution_and_linears_that_are_not_called_are_summed():
    torch.manual_seed(4)
    weight = base()["patch_embedding.weight"]
    down, up = torch.randn(RANK, *weight.shape[1:]) * 0.1, torch.randn(len(weight), RANK, 1, 1, 1) * 0.1
    time = shapes()["time_projection.1.weight"]
    first, second = torch.randn(RANK, time[1]) * 0.1, torch.randn(time[0], RANK) * 0.1
    state = {
        "diffusion_model.patch_embedding.lora_down.weight": down,
        "diffusion_model.patch_embedding.lora_up.weight": up,
        "diffusion_model.time_projection.1.lora_A.weight": first,
        "diffusion_model.time_projection.1.lora_B.weight": second,
    }
    sums = {
        "patch_embedding.weight": weight + (up.flatten(1) @ down.flatten(1)).reshape(weight.shape),
        "time_projection.1.weight": base()["time_projection.1.weight"] + second @ first,
    }
    net = model()
    loras_on(net).attached.apply(net, [wanted(state)])
    torch.testing.assert_close(output(net), output(dense_model(sums)), atol=1e-5, rtol=1e-5)


def lora_of(modules: list[str], seed: int, rank: int = RANK, scale: float = 0.1) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    state = {}
    for module in modules:
        n, k = shapes()[f"{module}.weight"]
        state[f"diffusion_model.{module}.lora_down.weight"] = torch.randn(rank, k, generator=draw) * k**-0.5
        state[f"diffusion_model.{module}.lora_up.weight"] = torch.randn(n, rank, generator=draw) * scale
    return state


@pytest.mark.parametrize(
    ("noted", "scale"),
    [
        ({}, 1.0),
        ({"r": 6, "lora_alpha": 3}, 0.5),
        ({"r": 6, "lora_alpha": 3, "use_rslora": True}, 3 / 6**0.5),
        ({"r": 6, "lora_alpha": 3, "alpha_pattern": {"blocks.1.attn1.to_q": 12, "blocks.0.attn1.to_q": 1}}, 2.0),
    ],
)
def test_the_alpha_that_diffusers_notes_for_a_file(noted, scale, tmp_path):
    """A file may hold LoRAs of two transformers: the alpha of the requested one counts."""
    draw = torch.Generator().manual_seed(4)
    down, up = torch.randn(6, CONFIG.dim, generator=draw), torch.randn(CONFIG.dim, 6, generator=draw)
    one = "blocks.1.attn1.to_q"
    state = {
        f"{p}.{one}.lora_{r}.weight": t
        for p in ("transformer", "transformer_2")
        for r, t in zip("AB", (down, up), strict=True)
    }
    note = {"lora_adapter_metadata": json.dumps({f"transformer_2.{key}": value for key, value in noted.items()})}
    write_safetensors(state, tmp_path / "both.safetensors", note)
    for expert, factor in (("high", 1.0), ("low", scale)):
        (change,) = read_lora(tmp_path / "both.safetensors", shapes(), expert).changes["blocks.1.self_attn.q.weight"]
        torch.testing.assert_close(change.delta(CPU), factor * up @ down)
    for broken in ("[", "[1]", '{"transformer.lora_alpha": "much"}', '{"transformer.lora_alpha": Infinity}'):
        write_safetensors(state, tmp_path / "both.safetensors", {"lora_adapter_metadata": broken})
        with pytest.raises(CheckpointError, match="lora_adapter_metadata"):
            read_lora(tmp_path / "both.safetensors", shapes(), "high")


def test_several_share_one_pair_of_products():
    first, second = lora_of(LINEARS, 1, 4), lora_of(LINEARS[::2], 2, 8)
    net = model()
    loras_on(net).attached.apply(net, [wanted(first, 0.5, "a"), wanted(second, -1.5, "b")])
    both = net.get_submodule(LINEARS[0])
    assert isinstance(both, LowRank) and both.lora_up.shape[1] == 12
    sums = {}
    for module in LINEARS:
        value = base()[f"{module}.weight"].clone()
        for state, strength in ((first, 0.5), (second, -1.5)):
            name = f"diffusion_model.{module}.lora_"
            if f"{name}up.weight" in state:
                value += strength * (state[f"{name}up.weight"] @ state[f"{name}down.weight"])
        sums[f"{module}.weight"] = value
    torch.testing.assert_close(output(net), output(dense_model(sums)), atol=1e-5, rtol=1e-5)


def test_bf16_merged_is_the_dense_sum_within_rounding():
    state = lora_of(LINEARS, 5)
    net = load_dit(SOURCE, dtype=torch.bfloat16, loras=merging([wanted(state)], CPU))
    for module in LINEARS:
        name = f"diffusion_model.{module}.lora_"
        exact = base()[f"{module}.weight"].bfloat16().float() + state[f"{name}up.weight"] @ state[f"{name}down.weight"]
        merged = net.get_parameter(f"{module}.weight")
        assert merged.dtype == torch.bfloat16
        assert (
            torch.equal(merged, exact.bfloat16()) or (merged.float() - exact).abs().max() <= exact.abs().max() * 2**-8
        )


# ----------------------------------------------------------------------------------------------------------- precisions


def quantization(precision: str) -> Quantization:
    found = find_quantization(precision, CPU)
    assert found is not None
    return found


@pytest.mark.parametrize("precision", ["fp8", "fp8-tensor", "fp8-weights", "te-current", "int8"])
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


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("fmt", ["row", "tensor", "block"])
def test_low_rank_product_of_fp8_inputs(fmt):
    from wan_core.ops.kernels.formats import quantize_reference

    torch.manual_seed(7)
    x = quantize_reference(torch.randn(2, 5, 256), fmt)
    down = torch.randn(4, 256)
    torch.testing.assert_close(low_rank_input(x, down), x.dequantize() @ down.t(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["fp8", "fp8-tensor", "fp8-weights", "int8"])
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
    checkpoint = open_checkpoint(whole).replaced(metadata=metadata)
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


@pytest.mark.parametrize("form", ["LoHa", "LoRA"])
def test_the_memory_of_what_is_attached_is_counted(form):
    module = "blocks.2.ffn.0"
    n, k = shapes()[f"{module}.weight"]
    one = wanted(kohya(module, **(loha(n, k, 4) if form == "LoHa" else kohya_pair(n, k))))
    net = model()
    loras_on(net).attached.apply(net, [one])
    buffers = list(net.buffers())
    assert len(buffers) == 2 and lora_bytes([one], 4) == sum(buffer.nbytes for buffer in buffers)


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
    kept = load_dit(tmp_path / "scaled.safetensors", dtype=torch.float32, quantization=quantization("fp8"))
    loras_on(kept).attached.apply(kept, [wanted(state)])
    assert torch.equal(kept.get_submodule(name).weight.view(torch.uint8), linear.weight.view(torch.uint8))
    assert relative(output(kept), output(merged)) < 0.08


# ------------------------------------------------------------------------------------------------ strengths and undoing


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


@pytest.mark.parametrize("precision", [None, "fp8"])
def test_compiled_blocks_see_a_lora_that_comes_later_and_a_new_strength_compiles_nothing(precision):
    from wan_core.execution.optimize import compilations, compile_blocks

    torch._dynamo.reset()
    state, net, reference = lora_of(LINEARS, 12), model(precision), model(precision)
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


def test_saving_leaves_an_attached_lora_out(tmp_path):
    net = model()
    loras_on(net).attached.apply(net, [wanted(lora_of(LINEARS, 14))])
    save(net, tmp_path / "model.safetensors")
    again = load_dit(tmp_path / "model.safetensors").state_dict()
    assert again.keys() == base().keys() and all(torch.equal(value, base()[name]) for name, value in again.items())


# --------------------------------------------------------------------------------------------- what is said and refused


def test_what_is_ignored_is_said_by_name():
    state = lora_of(["blocks.0.self_attn.q"], 15) | {
        "lora_te_text_model_encoder.lora_down.weight": torch.zeros(2, 2),
        "something.else": torch.zeros(2),
        "diffusion_model.blocks.99.ffn.0.lora_up.weight": torch.zeros(2, 2),
        "diffusion_model.img_emb.proj.0.diff": torch.zeros(2),
        "diffusion_model.patch_embedding.diff": torch.zeros(128, 36, 1, 2, 2),
        "diffusion_model.blocks.0.self_attn.k.lora_mid.weight": torch.zeros(2, 2),
        "diffusion_model.blocks.0.self_attn.k.lora_up.weight": torch.zeros(128, 2),
        "diffusion_model.blocks.0.self_attn.k.lora_down.weight": torch.zeros(2, 128),
    }
    lora = read_lora(state, shapes())
    assert set(lora.changes) == {"blocks.0.self_attn.q.weight"}
    assert sorted(name for names in lora.ignored.values() for name in names) == sorted(
        name for name in state if ".self_attn.q." not in name
    )
    for part in ("text encoder", "something.else", "does not have", "patch_embedding.diff", "Tucker"):
        assert part in lora.words()
    with pytest.raises(CheckpointError, match="changes nothing in this model"):
        read_lora({"diffusion_model.blocks.77.self_attn.q.lora_up.weight": torch.zeros(4, 4)}, shapes())


QUERY, UP, DOWN = "blocks.0.self_attn.q", torch.zeros(128, 4), torch.zeros(4, 128)


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        ({"weight": torch.zeros(128, 128)}, "not a LoRA"),
        ({"lora_up.weight": torch.zeros(5120, 4), "lora_down.weight": torch.zeros(4, 5120)}, "of another shape"),
        ({"lora_up.weight": UP}, "no counterpart"),
        ({"lokr_w2": torch.zeros(16, 16)}, "no counterpart"),
        ({"hada_w2_a": torch.zeros(128, 2)}, "no counterpart"),
        ({"alpha": torch.zeros(())}, "not a LoRA|have no factors"),
        ({"lora_up.weight": UP, "lora_down.weight": torch.zeros(3, 128)}, "do not match"),
        ({"lora_up.weight": UP, "lora_B.weight": UP}, "both change"),
        ({"lora_up.weight": UP.to(torch.int8), "lora_down.weight": DOWN}, "must be floating point"),
        ({"lora_up.weight": UP, "lora_down.weight": DOWN, "alpha": torch.tensor(float("nan"))}, "must be one number"),
    ],
)
def test_clear_errors(roles, says):
    with pytest.raises(CheckpointError, match=says):
        read_lora({f"{QUERY}.{role}": value for role, value in roles.items()}, shapes())


def test_one_file_for_both_experts_is_split():
    """Diffusers calls the second expert transformer_2."""
    high, low = lora_of(["blocks.0.ffn.0"], 1), lora_of(["blocks.1.ffn.0"], 2)
    state = {n.replace("diffusion_model.", "transformer."): t for n, t in high.items()}
    state |= {n.replace("diffusion_model.", "transformer_2."): t for n, t in low.items()}
    assert set(read_lora(state, shapes(), "high").changes) == {"blocks.0.ffn.0.weight"}
    assert set(read_lora(state, shapes(), "low").changes) == {"blocks.1.ffn.0.weight"}


def test_a_file_of_the_second_expert_alone_is_its(tmp_path):
    state = {n.replace("diffusion_model.", "transformer_2."): t for n, t in lora_of(["blocks.1.ffn.0"], 2).items()}
    write_safetensors(state, tmp_path / "style.safetensors", {})
    for expert in ("auto", "low"):
        found = read_loras([LoraOptions(path=str(tmp_path / "style.safetensors"), expert=expert)], CONFIG, True)
        assert not found["high"] and set(found["low"][0].lora.changes) == {"blocks.1.ffn.0.weight"}
    with pytest.raises(CheckpointError, match="for the other expert"):
        read_loras([LoraOptions(path=str(tmp_path / "style.safetensors"), expert="high")], CONFIG, True)


def test_an_option_counts_before_metadata_and_metadata_before_the_name():
    """Names themselves are in tests/pipeline/test_expert_names.py."""
    assert expert_of(LoraOptions(path="style_low.safetensors"), {}) == "low"
    assert expert_of(LoraOptions(path="style_low.safetensors"), {"expert": "high"}) == "high"
    assert expert_of(LoraOptions(path="style_high.safetensors", expert="low"), {"expert": "high"}) == "low"


def test_how_it_is_applied():
    assert choose_mode("auto", packed=False)[0] == "merge" and choose_mode("auto", packed=True)[0] == "attach"
    assert choose_mode("attach", packed=False)[0] == "attach" and choose_mode("merge", packed=True)[0] == "merge"


# ------------------------------------------------------------------------------------------------------------ pipelines


@pytest.fixture
def lora_file(tmp_path: Path) -> Path:
    write_safetensors(lora_of(LINEARS, 20, scale=0.5), tmp_path / "style.safetensors", {})
    return tmp_path / "style.safetensors"


REQUEST = Request(prompt="a red circle moving right on a blue background", steps=3, width=32, height=32, frames=5)


def latents(**options) -> tuple[Tensor, SimpleNamespace]:
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", **options))
    result = pipe.generate(REQUEST)
    return result.latents, SimpleNamespace(**result.report.as_dict())


def test_a_video_with_a_lora(lora_file):
    plain, _ = latents()
    merged, report = latents(loras=(LoraOptions(path=str(lora_file)),))
    attached, beside = latents(loras=(LoraOptions(path=str(lora_file)),), lora_mode="attach")
    torch.testing.assert_close(merged, attached, atol=2e-4, rtol=1e-3)
    assert relative(merged, plain) > 0.01
    assert set(report.settings["loras"]) == {"high", "low"}
    assert any("merged, strength 1" in note for note in report.notes)
    assert any("attached: asked for, strength 1" in note for note in beside.notes)
    off, _ = latents(loras=(LoraOptions(path=str(lora_file), strength=0.0),))
    assert torch.equal(off, plain)
    high, _ = latents(loras=(LoraOptions(path=str(lora_file), expert="high"),))
    low, _ = latents(loras=(LoraOptions(path=str(lora_file), expert="low"),))
    assert relative(high, merged) > 1e-3 and relative(low, merged) > 1e-3 and relative(high, low) > 1e-3


def test_an_expert_that_is_not_there():
    with pytest.raises(OptionError, match="one transformer only"):
        read_loras([LoraOptions(path="x.safetensors", expert="low")], CONFIG, two_experts=False)


def test_parse_of_the_command_line(tmp_path):
    assert LoraOptions.parse("a.safetensors:0.8") == LoraOptions(path="a.safetensors", strength=0.8)
    assert LoraOptions.parse("a.safetensors", "low") == LoraOptions(path="a.safetensors", expert="low")
    assert LoraOptions.parse(r"C:\loras\a.safetensors").path == r"C:\loras\a.safetensors"
    assert LoraOptions.parse(r"C:\loras\a.safetensors:2").strength == 2
    (tmp_path / "odd:1").touch()
    assert LoraOptions.parse(str(tmp_path / "odd:1")) == LoraOptions(path=str(tmp_path / "odd:1"))
    with pytest.raises(OptionError, match="strength"):
        LoraOptions.parse("a.safetensors:1000")
    with pytest.raises(OptionError, match="strength"):
        LoraOptions.parse("a.safetensors:nan")


def test_change_of_a_convolution_has_no_low_rank_pair():
    change = Change(kind="LoRA", shape=(8, 2, 1, 2, 2), factors=(torch.ones(8, 1), torch.ones(1, 8)))
    assert change.low_rank(CPU) is None


def test_what_packed_weights_do_not_take_is_refused_before_they_are_read():
    module = "blocks.2.ffn.0"
    roles = FORMS["DoRA"](*shapes()[f"{module}.weight"])
    with pytest.raises(OptionError, match=r"DoRA.*--lora-mode merge"):
        check_packed([wanted(kohya(module, **roles))], CONFIG)
    small = {"diffusion_model.blocks.1.norm3.diff": torch.zeros(shapes()["blocks.1.norm3.weight"])}
    check_packed([wanted(lora_of(LINEARS, 1) | small)], CONFIG)
