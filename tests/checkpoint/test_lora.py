"""LoRAs: every spelling gives the dense sum, attached or merged; strengths change in place; none is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.lora_models import (
    CONFIG,
    CPU,
    FORMS,
    LINEARS,
    RANK,
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
    relative,
    shapes,
    wanted,
)
from tests.loras_on import loras_on
from wan_core.checkpoint import CheckpointError, load_dit
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.save import write_safetensors
from wan_core.config import LoraOptions, OptionError
from wan_core.models.wan.families.plain import diffusers_modules
from wan_core.ops.quant import linear
from wan_core.ops.quant.linear import LowRank
from wan_core.pipeline.loras import (
    check_packed,
    merging,
)

# ------------------------------------------------------------------------------------------------------------ spellings

FLAT = {"lora_unet_", "lora_unet__", "lycoris_"}
PREFIXES = ("", "diffusion_model.", "model.diffusion_model.", *sorted(FLAT), "base_model.model.", "transformer.",
            "generator.model.")  # fmt: skip
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
PAIRS = (("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight"), ("lora_A", "lora_B"),
         ("lora_A.default.weight", "lora_B.default.weight"), ("lora.down.weight", "lora.up.weight"))  # fmt: skip
DIFFUSERS = {ours: theirs for theirs, ours in diffusers_modules(CONFIG.num_layers).items()}


def spelled(module: str, prefix: str, diffusers: bool, wrappers: list[tuple[float, str]]) -> str:
    """wrappers: names of modules around others, and where they stand, 0 to 1."""
    words = (DIFFUSERS[module] if diffusers else module).split(".")
    for at, wrapper in wrappers:
        words.insert(round(at * len(words)), wrapper)
    name = ".".join(words)
    return prefix + (name.replace(".", "_") if prefix in FLAT else name)


@settings(max_examples=15, deadline=None)
@given(
    modules=st.lists(st.sampled_from(LINEARS), min_size=1, max_size=4, unique=True),
    prefix=st.sampled_from(PREFIXES),
    pair=st.sampled_from(PAIRS),
    diffusers=st.booleans(),
    wrappers=st.lists(st.tuples(st.floats(0, 1), st.sampled_from(WRAPPERS)), max_size=3),
    alpha=st.none() | st.floats(0.25, 8),
    strength=st.floats(-2, 2),
    mode=st.sampled_from(["attach", "merge", "load"]),
    seed=st.integers(0, 99),
)
def test_every_spelling_is_the_dense_sum(modules, prefix, pair, diffusers, wrappers, alpha, strength, mode, seed):
    torch.manual_seed(seed)
    state, sums = {}, {}
    for module in modules:
        n, k = shapes()[f"{module}.weight"]
        down, up = torch.randn(RANK, k) * k**-0.5, torch.randn(n, RANK) * 0.1
        name = spelled(module, prefix, diffusers, wrappers)
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
    rows = "DoRA" in form and roles["dora_scale"].shape[1] == 1
    assert ("ComfyUI: of the rows before" in one.lora.words()) == rows
    assert list(one.lora.kinds) == [f"{kind} with DoRA" if "DoRA" in form else kind]
    for mode in ("merge", "attach"):
        net = model()
        put_on(net, [one], mode)
        torch.testing.assert_close(
            output(net), output(dense_model({f"{module}.weight": expected})), atol=1e-5, rtol=1e-4
        )
        if mode == "merge":
            torch.testing.assert_close(net.get_parameter(f"{module}.weight").data, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("first", [True, False])
def test_dora_beside_another_lora_is_the_same_attached_as_merged(first: bool) -> None:
    torch.manual_seed(5)
    module = "blocks.2.ffn.0"
    n, k = shapes()[f"{module}.weight"]
    dora, other = kohya(module, **FORMS["DoRA"](n, k)), lora_of([module, LINEARS[0]], 7, scale=1.0)
    loras = [wanted(dora, 0.6, "a"), wanted(other, -0.8, "b")][:: 1 if first else -1]
    merged, beside = model(), model()
    put_on(merged, loras, "merge")
    put_on(beside, loras, "attach")
    torch.testing.assert_close(output(beside), output(merged), atol=1e-5, rtol=1e-4)
    put_on(beside, [], "attach")
    assert torch.equal(output(beside), output(model()))


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


# ------------------------------------------------------------------------------------------------------------ pipelines


@pytest.fixture
def lora_file(tmp_path: Path) -> Path:
    write_safetensors(lora_of(LINEARS, 20, scale=0.5), tmp_path / "style.safetensors", {})
    return tmp_path / "style.safetensors"


def test_a_video_with_a_lora(lora_file):
    plain, _ = latents()
    merged, report = latents(loras=(LoraOptions(path=str(lora_file)),))
    attached, attached_report = latents(loras=(LoraOptions(path=str(lora_file)),), lora_mode="attach")
    torch.testing.assert_close(merged, attached, atol=2e-4, rtol=1e-3)
    assert relative(merged, plain) > 0.01
    assert set(report.settings["loras"]) == {"high", "low"}
    assert any("merged, strength 1" in note for note in report.notes)
    assert any("attached: asked for, strength 1" in note for note in attached_report.notes)
    off, _ = latents(loras=(LoraOptions(path=str(lora_file), strength=0.0),))
    assert torch.equal(off, plain)
    high, _ = latents(loras=(LoraOptions(path=str(lora_file), expert="high"),))
    low, _ = latents(loras=(LoraOptions(path=str(lora_file), expert="low"),))
    assert relative(high, merged) > 1e-3 and relative(low, merged) > 1e-3 and relative(high, low) > 1e-3


def test_a_lora_of_strength_0_costs_nothing(lora_file, monkeypatch):
    """Attached, too: bit for bit the run without it, alone and beside another, and no product of low rank more."""
    other = lora_file.with_name("other.safetensors")
    write_safetensors(lora_of(LINEARS, 7, scale=0.5), other, {})
    ranks, real = [], linear.low_rank_input

    def counted(x, down):
        ranks.append(len(down))
        return real(x, down)

    monkeypatch.setattr(linear, "low_rank_input", counted)
    runs = []
    for strengths in ((), (0.0,), (0.5,), (0.5, 0.0), (0.0, 0.5)):
        paths = (other, lora_file) if strengths[:1] == (0.5,) else (lora_file, other)
        loras = [LoraOptions(path=str(path), strength=one) for path, one in zip(paths, strengths, strict=False)]
        ranks.clear()
        runs.append((latents(loras=tuple(loras), lora_mode="attach")[0], list(ranks)))
    for run, same in ((1, 0), (3, 2), (4, 2)):
        assert torch.equal(runs[run][0], runs[same][0]) and runs[run][1] == runs[same][1], run
    assert not runs[0][1] and runs[2][1]


def test_parse_of_the_command_line(tmp_path):
    assert LoraOptions.parse("a.safetensors:0.8") == LoraOptions(path="a.safetensors", strength=0.8)
    assert LoraOptions.parse("low=a.safetensors") == LoraOptions(path="a.safetensors", expert="low")
    assert LoraOptions.parse(r"C:\loras\a.safetensors").path == r"C:\loras\a.safetensors"
    assert LoraOptions.parse(r"C:\loras\a.safetensors:2").strength == 2
    expected = LoraOptions(path=r"C:\a=b.safetensors", strength=0.5, expert="high")
    assert LoraOptions.parse(r"high=C:\a=b.safetensors:0.5") == expected
    assert LoraOptions.parse("a=b.safetensors") == LoraOptions(path="a=b.safetensors")
    (tmp_path / "odd:1").touch()
    assert LoraOptions.parse(str(tmp_path / "odd:1")) == LoraOptions(path=str(tmp_path / "odd:1"))
    with pytest.raises(OptionError, match="strength"):
        LoraOptions.parse("a.safetensors:1000")
    with pytest.raises(OptionError, match="strength"):
        LoraOptions.parse("a.safetensors:nan")


def test_what_packed_weights_do_not_take_is_refused_before_they_are_read():
    module = "blocks.2.ffn.0"
    roles = FORMS["DoRA"](*shapes()[f"{module}.weight"])
    with pytest.raises(OptionError, match=r"DoRA.*--lora-mode merge"):
        check_packed([wanted(kohya(module, **roles))], CONFIG)
    small = {"diffusion_model.blocks.1.norm3.diff": torch.zeros(shapes()["blocks.1.norm3.weight"])}
    check_packed([wanted(lora_of(LINEARS, 1) | small)], CONFIG)
