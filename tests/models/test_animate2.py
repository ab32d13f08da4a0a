"""Animate-2 against ComfyUI's and diffusers' modules, its layouts, and what only its own mathematics shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import wan_core
from tests.animate_references import ANIMATE2, COMFYUI_GRIDS, DATA, draw_inputs, draw_weights
from tests.family_models import distance, load_tiny, run
from wan_core.checkpoint import CheckpointError
from wan_core.config import LoadOptions, OptionError, PlanNumbers
from wan_core.execution.optimize import optimize
from wan_core.models.wan.families import choose_task, family_of
from wan_core.models.wan.families.animate2 import (
    ANIMATE2_14B,
    FORMS,
    Animate2Config,
    Form,
    attention,
)
from wan_core.models.wan.families.animate2 import model as animate2_model
from wan_core.models.wan.families.animate2.attention import (
    Driven,
    DrivenAttention,
    HostLayers,
    Recording,
    choose_form,
)
from wan_core.models.wan.families.animate2.model import Animate2Model
from wan_core.models.wan.families.task import Clues
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.registry import BACKENDS, AttentionError, resolve_attention
from wan_core.ops.attention.sdpa import SDPA
from wan_core.pipeline.settings import resolve_settings
from wan_core.pipeline.sources import find_models
from wan_core.sampling.presets import preset_plan

GRID = (1, 4, 2, 3)
CUDA, GIB = torch.device("cuda"), 2**30


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return draw_weights(ANIMATE2)


@pytest.fixture(scope="module")
def model() -> WanModel:
    return load_tiny("animate2")


def test_matches_comfyui(model):
    """Its outputs are kept, with the version that made them: `tests/animate_references.py`."""
    assert model.family == "animate2" and model.config == ANIMATE2
    kinds = {"": {}, " defaults": {"pose_image": None, "pose_context": None}, " no pose": {"pose": None}}
    kinds[" strengths"] = {"pose_strength": 0.6, "reference_strength": 1.7}
    with safe_open(DATA / "animate2_comfyui.safetensors", "pt") as references:
        for grid in COMFYUI_GRIDS:
            for kind, changed in kinds.items():
                output = run(model, draw_inputs(ANIMATE2, grid), **changed)
                assert distance(output, references.get_tensor(f"{grid}{kind}")) <= 1e-5, (grid, kind)


def test_matches_diffusers(monkeypatch):
    """Its mask over packed tokens, uncompiled; the forward without the prompt leaves a block out."""
    from diffusers.models.transformers import transformer_wan_animate_2 as theirs_module

    make_mask = theirs_module.create_block_mask
    monkeypatch.setattr(theirs_module, "create_block_mask", lambda *a, **k: make_mask(*a, **{**k, "_compile": False}))
    config = Animate2Config(**{**vars(ANIMATE2), "dim": 32, "num_layers": 11})
    torch.manual_seed(0)
    theirs = theirs_module.WanAnimate2Transformer3DModel(
        dim=config.dim, ffn_dim=config.ffn_dim, freq_dim=config.freq_dim, text_dim=config.text_dim,
        num_heads=config.num_heads, num_layers=config.num_layers,
    ).eval()  # fmt: skip
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.08)
    ours = wan_core.load_dit(theirs.state_dict(), metadata={"num_heads": 2})
    assert ours.config == config
    grid = (1, 3, 2, 2)
    inputs = draw_inputs(config, grid)
    frame, sizes = grid[2] * grid[3], torch.tensor([[grid[1] - 1, *grid[2:]]])
    cache = theirs_module.WanAnimate2KVCache(config.num_layers)
    shared = {"kv_cache": cache, "return_dict": False}
    pose, x, time = inputs["pose"][0], inputs["x"][0], inputs["timestep"]
    with torch.no_grad():
        theirs(
            [pose[:16]], time, [inputs["pose_context"][0]], [pose[16:]], kv_cache_mode="extract",
            seq_len=(grid[1] - 1) * frame, encoder_hidden_states_image=inputs["pose_image"], offset_grid_sizes=sizes,
            **shared,
        )  # fmt: skip
        for unconditional in (False, True):
            [expected] = theirs(
                [x[:16]], time, [inputs["context"][0]], [x[16:]], kv_cache_mode="cached", seq_len=grid[1] * frame,
                encoder_hidden_states_image=inputs["image"], reference_grid_sizes=sizes,
                origin_len=4 * (grid[1] - 2) + 1, origin_area=[16 * grid[2], 16 * grid[3]],
                is_uncondtion=unconditional, **shared,
            )[0]  # fmt: skip
            assert distance(run(ours, inputs, unconditional=unconditional)[0], expected) <= 1e-5


# ------------------------------------------------------------------------------------------------------------ attention


def one_softmax(q, k, v, own: Driven, log_scale: float) -> torch.Tensor:
    """The whole square with its mask: frame j > 0 sees all of the video and frame j - 1 of the driving video."""
    L, M = q.shape[1], own.keys.shape[1]
    frame = torch.arange(L) // own.frame
    keys = torch.cat([k, own.keys.expand(len(k), -1, -1, -1)], 1)
    values = torch.cat([v, own.values.expand(len(v), -1, -1, -1)], 1)
    bias = torch.zeros(L, L + M)
    bias[:, :L] += log_scale * (frame == 1)
    bias[:, L:].masked_fill_(frame[:, None] != torch.arange(M) // own.frame + 1, -torch.inf)
    scores = torch.einsum("blhd,bshd->bhls", q, keys) * q.shape[-1] ** -0.5 + bias
    return torch.einsum("bhls,bshd->blhd", scores.softmax(-1), values)


@pytest.mark.parametrize(
    ("frames", "rows", "few", "at_once", "log_scale"), [(2, 1, 1, 8192, 0.0), (5, 2, 1, 6, -1.3), (4, 4, 2, 9, 2.0)]
)
def test_equals_one_softmax_over_the_whole_square(monkeypatch, frames, rows, few, at_once, log_scale):
    """few: driving videos, which serve several branches."""
    monkeypatch.setattr(attention, "AT_ONCE", at_once)
    torch.manual_seed(0)
    frame = 3
    q, k, v = torch.randn(3, rows, frames * frame, 2, 8)
    keys, values = torch.randn(2, few, (frames - 1) * frame, 2, 8)
    own = Driven(frame, keys, values, log_scale)
    repeated = Driven(frame, keys.repeat(rows // few, 1, 1, 1), values.repeat(rows // few, 1, 1, 1))
    output = DrivenAttention(SDPA)(q, k, v, AttentionCall(own=own))
    torch.testing.assert_close(output, one_softmax(q, k, v, repeated, log_scale), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [[15], [4, 4, 4, 3], [1, 9, 5]])
def test_around_a_ring_equals_one_softmax(parts):
    """Every rank has some of the tokens, and all of the driving video."""
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 2, 15, 2, 8)
    keys, values = torch.randn(2, 1, 12, 2, 8)
    own = Driven(3, keys, values, -1.3, 0.5)
    scaled = torch.cat([v[:, :3] * 0.5, v[:, 3:]], 1)
    expected = one_softmax(q, k, scaled, own, -1.3)
    split = [x.split(parts, 1) for x in (q, k, v)]

    class FakeRing:
        lengths = parts

        def __init__(self, index: int) -> None:
            self.index = index

        def around(self, *_):
            yield from ((rank, split[1][rank], split[2][rank]) for rank in range(len(parts)))

        def merge(self, partials):
            return attention.merge_lse(partials)

    for index, queries in enumerate(split[0]):
        output = DrivenAttention(SDPA).over_ring(queries, k, v, FakeRing(index), AttentionCall(own=own))
        begin = sum(parts[:index])
        torch.testing.assert_close(output, expected[:, begin : begin + parts[index]], rtol=1e-5, atol=1e-5)


def test_the_driving_pass_is_recorded_and_attends_as_usual():
    q, k, v = torch.randn(3, 1, 4, 2, 8)
    recording = Recording()
    out = DrivenAttention(SDPA)(q, k, v, AttentionCall(layer=3, own=recording))
    assert torch.equal(out, SDPA(q, k, v)) and torch.equal(recording.layers[3][0], k)


def test_fp8_attention_stays_close(model):
    """A backend that computes in FP8 gives its log-sum-exp too."""
    inputs = draw_inputs(ANIMATE2, GRID)
    exact = run(model, inputs)
    try:
        optimize(model, attend=resolve_attention("math-fp8", torch.device("cpu"), torch.float32)[1])
        assert 1e-5 < distance(run(model, inputs), exact) < 0.05
    finally:
        optimize(model, attend=SDPA)
    assert torch.equal(run(model, inputs), exact)


@pytest.mark.parametrize("name", [name for name, backend in BACKENDS.items() if not backend.gives_lse])
def test_attention_without_a_log_sum_exp_is_refused_before_the_first_forward(model, name):
    """The error names what can be taken. `optimize`, which is handed an object, refuses it too."""
    options = LoadOptions(model="random:animate2-14B", attention=name)
    with pytest.raises(AttentionError, match=f"{name}.*use auto, or one of sdpa"):
        resolve_settings(find_models(options), options, torch.device("cpu"))
    with pytest.raises(OptionError, match="use auto, or one of sdpa"):
        optimize(model, attend=BACKENDS[name].load())
    inputs = draw_inputs(ANIMATE2, GRID)
    assert torch.isfinite(run(model, inputs)).all(), "the model is as before"


@pytest.mark.parametrize("videos", [1, 2])
def test_kept_in_host_memory_it_is_the_same(model, monkeypatch, caplog, videos):
    """A layer's keys and values arrive while the one before computes; two places serve all layers."""
    caplog.set_level("INFO")
    inputs = draw_inputs(ANIMATE2, (videos, *GRID[1:]))
    there = run(model, inputs)
    assert "are kept" not in caplog.text
    monkeypatch.setattr(animate2_model, "choose_form", lambda *_: Form(on_host=True))
    assert torch.equal(run(model, inputs), there)
    assert "of the driving video (0.0 GiB) are kept" in caplog.text
    x, timestep, context = (inputs.pop(name) for name in ("x", "timestep", "context"))
    with torch.no_grad():
        prepared = model.prepare_text(context, **inputs)
        assert isinstance(prepared.own.layers, HostLayers)
        for _ in range(2):  # steps
            assert torch.equal(model(x, timestep, prepared), there)
        for row in range(videos):
            here = slice(row, row + 1)
            output = model(x[here], timestep[here], prepared.rows(row, row + 1))
            assert distance(output, there[here]) <= 1e-5


def test_only_the_unconditional_forward_leaves_its_block_out():
    config = Animate2Config(**{**vars(ANIMATE2), "num_layers": 4, "unconditional_skips": 2})
    model = Animate2Model(config).eval()
    model.load_state_dict(draw_weights(config))
    inputs = draw_inputs(config, (2, 3, 2, 2))
    cond, uncond = run(model, inputs), run(model, inputs, unconditional=True)
    mixed = run(model, inputs, unconditional=[False, True])
    assert distance(mixed, torch.stack([cond[0], uncond[1]])) <= 1e-5
    assert distance(uncond, cond) > 1e-3
    undriven = run(model, inputs, unconditional=True, pose=None)
    model.blocks[2].ffn[2].bias.data += 1
    assert torch.equal(run(model, inputs, unconditional=True, pose=None), undriven)


def test_branches_share_the_driving_video(model):
    """Two prompts of one video: the driving video is passed over once, and each branch sees it."""
    inputs, other = draw_inputs(ANIMATE2, GRID), draw_inputs(ANIMATE2, GRID, seed=5)
    shared = {name: inputs[name] for name in ("image", "pose", "pose_image", "pose_context")}
    both = torch.cat([inputs["context"], other["context"]])
    with torch.no_grad():
        prepared = model.prepare_text(both, **(shared | {"image": inputs["image"].expand(2, -1, -1)}))
        assert prepared.own.layers.videos == 1
        together = model(inputs["x"].repeat(2, 1, 1, 1, 1), inputs["timestep"].repeat(2), prepared)
        for row, context in enumerate((inputs["context"], other["context"])):
            expected = run(model, inputs, context=context)[0]
            assert distance(together[row], expected) <= 1e-5
            alone = model(inputs["x"], inputs["timestep"], prepared.rows(row, row + 1))
            assert distance(alone[0], expected) <= 1e-5


# ---------------------------------------------------------------------------------------------- the kept driving video


@pytest.mark.parametrize("videos", [1, 2])
@torch.no_grad()
def test_in_fp8_the_video_is_almost_the_same_wherever_they_are(
    model: WanModel, videos: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = draw_inputs(ANIMATE2, (videos, 3, 4, 6))
    x, timestep, context = (inputs.pop(name) for name in ("x", "timestep", "context"))
    exact = model(x, timestep, model.prepare_text(context, **inputs))
    outputs = []
    for on_host in (False, True):
        monkeypatch.setattr(animate2_model, "choose_form", lambda *_, h=on_host: Form(on_host=h, fp8=True))
        prepared = model.prepare_text(context, **inputs)
        outputs += [model(x, timestep, prepared) for _ in range(2)]
        for row in range(videos):
            here = slice(row, row + 1)
            alone = model(x[here], timestep[here], prepared.rows(row, row + 1))
            torch.testing.assert_close(alone, outputs[-1][here], atol=1e-4, rtol=1e-4)
    assert all(torch.equal(one, outputs[0]) for one in outputs)
    assert 0 < (outputs[0] - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize(
    ("device", "host", "planned", "form"),
    [
        (90, 100, None, Form()),
        (40, 100, None, Form(on_host=True)),
        (45, 20, None, Form(fp8=True)),
        (10, 50, None, Form(on_host=True, fp8=True)),
        (10, 5, None, Form(on_host=True, fp8=True)),
        (40, None, None, Form(on_host=True)),
        (60, 100, Form(), Form()),  # less runs beside than without a plan
        (58, 100, Form(), Form(on_host=True)),  # others took what was planned
        (90, 0, Form(on_host=True), Form(on_host=True)),  # counted by the plan
        (32, 0, Form(fp8=True), Form(fp8=True)),
    ],
)
def test_the_first_form_that_fits_is_taken(
    device: int, host: int | None, planned: Form | None, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """58.3 GiB at 1280x720, of which each of 80 tensors takes 1 GiB of pinned memory. 11.3 GiB are kept free beside
    them, or what the plan says: here 1."""
    monkeypatch.setattr(attention, "free_on", lambda _: device * GIB)
    monkeypatch.setattr(attention, "available_bytes", lambda: None if host is None else (host + 4) * GIB)
    forms = [
        one._replace(activations=GIB)
        for one in family_of(ANIMATE2_14B).prepared_forms(ANIMATE2_14B, (1, 16, 22, 90, 160), 2)
    ]
    assert [round(one.device / GIB, 1) for one in forms] == [57.7, 2.9, 29.7, 1.5]
    chosen = next((one for one in forms if one.form == planned), None)
    assert choose_form(forms, chosen, 79200, 5120, CUDA) == form
    assert choose_form(forms, chosen, 79200, 5120, torch.device("cpu")) == (planned or FORMS[0])


# -------------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("name", ["wan_animate_2_14B_bf16", "wan_animate2", "Wan-Animate-2"])
def test_what_nothing_tells_from_image_to_video_is_asked_for(weights, tmp_path, name):
    """Without metadata, tensors are those of Wan 2.1 image-to-video. A name that says otherwise is no proof."""
    heads = {"num_heads": 2}
    assert wan_core.load_dit(weights, metadata=heads).family == "wan"
    path = tmp_path / f"{name}.safetensors"
    save_file(weights, path, {"num_heads": "2"})
    with pytest.raises(CheckpointError, match=r"families wan and animate2.*family='animate2'.*--task animate2-14B"):
        wan_core.load_dit(path)
    assert wan_core.load_dit(path, family="animate2").family == "animate2"
    assert wan_core.load_dit(path, family="wan").family == "wan"
    with pytest.raises(OptionError, match=r"family 'animate3' is not known; use one of: animate, s2v, .*mean animate"):
        wan_core.load_dit(path, family="animate3")


@pytest.mark.parametrize(
    ("name", "task"),
    [("wan_animate2_14B.safetensors", "animate2-14B"), ("Animate-2-distilled.safetensors", "animate2-14B-distilled")],
)
def test_the_name_tells_distilled_weights(name, task):
    choice = choose_task(ANIMATE2, Clues(Path(name)))
    assert choice.task.name == task and "distilled" in choice.why
    assert len(preset_plan(PlanNumbers(), [Path(name)], task=choice.task).steps) == choice.task.steps
    with pytest.raises(OptionError, match="one transformer"):
        choose_task(ANIMATE2, Clues(Path(name), alone=False))
