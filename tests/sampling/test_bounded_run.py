"""Runs that keep a bound on the error of attention: what they measure, keep and say, whatever else they do."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.denoised import denoise
from tests.structured import structured
from wan_core.checkpoint.load import load_dit
from wan_core.config import LoadOptions, LoraOptions, OptionError, Request, SkipOptions, WindowOptions
from wan_core.models.wan.config import T2V_A14B
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.sdpa import SDPA
from wan_core.ops.attention.sparse import sampled
from wan_core.ops.attention.sparse.forward import SparseForward
from wan_core.ops.attention.sparse.kernels import KERNELS
from wan_core.ops.attention.tiles import make_tiles
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.arguments import parse_setting
from wan_core.sampling.cache.skipping import apply_policies, leave_out, skip_forwards
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.context_windows import with_windows
from wan_core.sampling.cutting import cut_plan
from wan_core.sampling.denoise import Progress
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.schedules import Window
from wan_core.sampling.sparsity.bounds import LEVELS
from wan_core.sampling.sparsity.last_run import LAST_FILES, read_last, write_last
from wan_core.sampling.sparsity.measured import Bounded, Measurements
from wan_core.sampling.sparsity.run import Chosen
from wan_core.sampling.sparsity.schedule import (
    bounded,
    parse_sparse,
    sparse_words,
    sparsify,
    with_costs,
    without_estimates,
)
from wan_lab.samples import Sample, drawn_media

TINY = Path(__file__).parents[2] / "wan_core" / "assets" / "tiny"
CPU = torch.device("cpu")
CAPTION = "a red circle moving right on a blue background"
Attention = Sequence[Mapping[str, Any]]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def experts() -> dict[str, WanModel]:
    return {
        name: load_dit(TINY / f"t2v_{name}.safetensors", device=CPU, dtype=torch.float32) for name in ("high", "low")
    }


def bounded_plan(text: str = "0.06", steps: int = 12, skip: str = "", **options: Any) -> Plan:
    plan = make_plan(task="t2v-tiny", steps=steps, **options)
    if skip:
        plan = leave_out(plan, parse_setting(skip), None)
    return sparsify(plan, parse_sparse(f"bound:{text}"))


def run(
    experts: Mapping[str, WanModel], plan: Plan, *, frames: int = 3, batch: int = 1, **hooks: Any
) -> tuple[Tensor, list[dict[str, Any]]]:
    """The latents, and what the report says of attention."""
    generator, config = torch.Generator().manual_seed(1), experts["high"].config
    rows = [torch.randn(1, n, config.text_dim, generator=generator) for n in (6, 1)]
    noise = torch.randn(1, 16, frames, 10, 14, generator=torch.Generator().manual_seed(2)).repeat(batch, 1, 1, 1, 1)
    measurements, attention, notes = Measurements(), list[dict[str, Any]](), list[str]()
    with torch.no_grad():
        conditioning = Conditioning(cond=rows[0], uncond=rows[1])
        x = denoise(plan, experts.__getitem__, conditioning, noise, measurements=measurements, **hooks)
    measurements.add_to(attention, notes)
    return x, attention


def shares(attention: Attention) -> list[list[float]]:
    return [step["shares"] for step in attention]


def assert_kept(attention: Attention, bound: float, steady: bool = True) -> None:
    """After the first two steps of each expert: the mean over layers in every step (or over all steps, where data
    changes abruptly), and 19 of 20 layers and steps within 1.5 of the bound."""
    late: list[list[float]] = []
    for expert in dict.fromkeys(step["expert"] for step in attention):
        late += [[error or 0.0 for error in step["errors"]] for step in attention if step["expert"] == expert][2:]
    means = [sum(row) / len(row) for row in late]
    assert max(means) <= bound if steady else sum(means) / len(means) <= bound
    errors = [error for row in late for error in row]
    assert sum(error <= 1.5 * bound for error in errors) >= 0.95 * len(errors)


# ------------------------------------------------------------------------------------------------- the bound is kept


@pytest.mark.parametrize("bound", [0.03, 0.12])
def test_the_bound_is_kept_in_both_experts(experts: dict[str, WanModel], bound: float) -> None:
    latents, attention = run(experts, bounded_plan(f"{bound}", 20))
    assert_kept(attention, bound)
    assert [step["step"] for step in attention] == list(range(20)) and latents.isfinite().all()
    begins = [n for n, step in enumerate(attention) if not n or step["expert"] != attention[n - 1]["expert"]]
    assert len(begins) == 2
    for begin in begins:
        assert set(attention[begin]["shares"]) == {1.0} and set(attention[begin + 1]["shares"]) == {0.5}
    assert min(share for row in shares(attention) for share in row) < 0.5


@pytest.mark.parametrize(("task", "size"), [("i2v-tiny", 128), ("animate2-tiny", 96)], ids=["image", "driven"])
def test_the_bound_is_kept_on_other_judges(task: str, size: int) -> None:
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", precision="fp32", task=task))
    request = Request(prompt=CAPTION, width=size, height=size, frames=17, steps=12, seed=4)
    with drawn_media(task, replace(request, skip=parse_setting("sparse:bound:0.06")), Sample(CAPTION, 4)) as filled:
        report = pipe.generate(filled).report
    assert_kept(report.attention, 0.06)
    line = next(note for note in report.notes if note.startswith("attention read"))
    assert line.endswith("of 0.06") and json.loads(json.dumps(report.as_dict()))["attention"] == report.attention


@pytest.mark.parametrize("bound", [0.03, 0.12])
def test_the_bound_is_kept_where_data_changes_abruptly(bound: float) -> None:
    """Other queries, keys and values from one step to the next, once in 24 steps."""
    grid, layers = (6, 8, 8), 4
    tiles, keep = make_tiles(grid, 8, CPU), Bounded(bounded(bound), math.prod(grid) // 8)
    for step in range(24):
        keep.begin(step)
        state = SparseForward(KERNELS["math"], [SDPA] * layers, tiles, Chosen(keep.rule), samples=keep.samples)
        for layer in range(layers):
            q, k, v = (x[:, tiles.order] for x in structured(grid, 4, 32, seed=layer + 10 * (step // 12)))
            state.attend(AttentionCall(layer), q, k, v)
    assert_kept([{"expert": "high", **step.as_dict()} for step in keep.finished()], bound, steady=False)


def test_the_bound_is_kept_where_guidance_ends_and_a_cache_skips(experts: dict[str, WanModel]) -> None:
    whole = make_plan(task="t2v-tiny", steps=12)
    steps = (s if s.sigma >= 0.6 else replace(s, guidance=1.0, branches=("cond",)) for s in whole.steps)
    plan = sparsify(replace(whole, steps=tuple(steps)), parse_sparse("bound:0.06"))
    assert {len(step.branches) for step in plan.steps} == {1, 2}
    assert_kept(run(experts, plan)[1], 0.06)
    cached = run(experts, bounded_plan("0.06", 12, "taylorseer:2/1/0.2"))[1]
    assert_kept(cached, 0.06)
    assert len(cached) < 12  # a step that is skipped measures nothing


def test_sampled_errors_are_those_of_all_rows_in_every_layer(
    experts: dict[str, WanModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 of 315 rows of the embedded model, in the steps that read the same share by rule: the second of each
    expert."""
    plan = bounded_plan("0.06", 6)
    sampled_steps = run(experts, plan, frames=9)[1]
    monkeypatch.setattr(sampled, "ROWS", 1000)
    monkeypatch.setattr(sampled, "_jitter", sampled._jitter.__wrapped__)
    true = run(experts, plan, frames=9)[1]
    seconds = [n for n in range(1, 6) if set(sampled_steps[n]["shares"]) == {0.5} == set(true[n]["shares"])]
    assert len(seconds) >= 2
    # Of the first expert alone both runs have had the same latents.
    for sampled_error, error in zip(sampled_steps[seconds[0]]["errors"], true[seconds[0]]["errors"], strict=True):
        assert sampled_error == pytest.approx(error, rel=0.1)


# -------------------------------------------------------------------------------------------------- the same numbers


def test_a_run_that_was_interrupted_or_ran_out_of_memory_gives_the_same_video(
    experts: dict[str, WanModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, seen = bounded_plan("0.06", 10), list[Progress]()
    wanted, attention = run(experts, plan, on_step=seen.append)
    newest = [progress.attention for progress in seen]
    assert newest[0] is None and newest[4] is not None and 0 < newest[4].error <= newest[4].highest < 0.5
    assert newest[4].step == 3 and newest[4].words().endswith(f"error {newest[4].error:.2g}")

    def stop(progress: Progress) -> None:
        if progress.step.index == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(experts, plan, on_step=stop)
    again, repeated = run(experts, plan)
    assert torch.equal(again, wanted) and repeated == attention

    compare, calls = SparseForward.compare, [0]

    def failing(self: SparseForward, *arguments: Any) -> None:
        calls[0] += 1
        if calls[0] == 40:
            raise torch.cuda.OutOfMemoryError
        compare(self, *arguments)

    monkeypatch.setattr(SparseForward, "compare", failing)
    after, measured = run(experts, plan, relieve=lambda _: True)
    assert torch.equal(after, wanted) and measured == attention


def test_batches_read_as_much_as_one_video_and_branch_at_a_time(experts: dict[str, WanModel]) -> None:
    plan = bounded_plan("0.06", 6)
    wanted, attention = run(experts, plan)
    for how in ({"batched": True}, {"batch": 2}):
        videos, measured = run(experts, plan, **how)
        assert shares(measured) == shares(attention)
        for video in videos:
            torch.testing.assert_close(video, wanted[0], rtol=1e-3, atol=1e-3)


def test_windows_and_a_part_of_a_schedule(experts: dict[str, WanModel]) -> None:
    """Windows of a step count together. A run that begins in the middle, as from a video, begins dense."""
    plan = with_windows(make_plan(task="t2v-tiny", steps=8), WindowOptions(length=4, overlap=2), 6)
    plan = sparsify(plan, parse_sparse("bound:0.06"))
    assert max(len(step.windows) for step in plan.steps) > 1
    assert_kept(run(experts, plan, frames=6)[1], 0.06)
    whole = replace(bounded_plan(steps=12), window=Window(start=4, end=12))
    part = with_costs(cut_plan(whole), experts["high"].config, (3, 10, 14))
    measured = run(experts, part)[1]
    assert set(measured[0]["shares"]) == {1.0} and [step.sparsity for step in part.steps][:3] != [0.75] * 3
    assert_kept(measured, 0.06)


def test_a_lora_is_measured_too() -> None:
    lora = next(iter(sorted((TINY / "lora").glob("*.safetensors"))))
    load = LoadOptions(model="tiny", device="cpu", precision="fp32", loras=(LoraOptions(path=str(lora)),))
    request = Request(prompt=CAPTION, steps=6, width=64, height=64, frames=9, skip=parse_setting("sparse:bound:0.06"))
    with_lora, without = (
        Pipeline.load(options).generate(request).report.attention for options in (load, replace(load, loras=()))
    )
    assert [step["step"] for step in with_lora] == list(range(6)) and with_lora != without


# --------------------------------------------------------------------------------------- options, plans and last runs


@pytest.mark.parametrize("text", ["bound:0.06", "bound:0.03:cudnn", "bound:0.12:ramp0.1:cudnn-fp8"])
def test_words_of_a_bound(text: str) -> None:
    options = parse_sparse(text)
    assert parse_sparse(sparse_words(options)) == options and options.bound == float(text.split(":")[1])


@pytest.mark.parametrize("text", ["bound", "bound:", "bound:x", "bound:0", "bound:2", "bound:0.1:x"])
def test_refused_bounds(text: str) -> None:
    with pytest.raises(OptionError, match="bound"):
        parse_sparse(text)


def test_a_plan_says_that_it_does_not_know_and_what_the_last_run_took(tmp_path: Path) -> None:
    file = tmp_path / "high.safetensors"
    file.touch()
    plan = with_costs(skip_forwards(make_plan(), parse_setting("sparse:bound:0.06"), file), T2V_A14B, (21, 90, 160))
    assert "6.25 to 100 % of the keys" in plan.table() and "estimates, for 25 %" in plan.table()
    first = [n for n, step in enumerate(plan.steps) if not step.sparsity]
    assert len(first) == 2 and {plan.steps[n + 1].sparsity for n in first} == {0.5}
    assert {step.sparsity for step in plan.steps} == {0.0, 0.5, 0.75}
    attention = [{"expert": "high", "shares": [1.0, 0.125], "errors": [None, 0.04]}]
    write_last(plan.name, plan.sparse, {"high": file, "low": None}, attention)
    last = read_last(file, plan.name, "high", parse_sparse("bound:0.06"))
    assert last is not None and (last.share, last.error, last.steps) == (0.5625, 0.02, 1)
    assert read_last(file, plan.name, "high", parse_sparse("bound:0.06:ramp0")) is None
    again = skip_forwards(make_plan(), parse_setting("sparse:bound:0.06"), file)
    assert "last run with these weights, high-noise expert: read 56 % of the keys" in again.table()
    assert "estimates, for 56.2 %" in again.table()
    first_time, now = (without_estimates(with_costs(one, T2V_A14B, (21, 90, 160))) for one in (plan, again))
    assert first_time.as_dict() == now.as_dict() != with_costs(again, T2V_A14B, (21, 90, 160)).as_dict()
    native = apply_policies(make_plan(), SkipOptions(sparse=bounded(0.06)), file, of_sampler=True)
    assert "last run" in native.table()
    LAST_FILES.beside(file, "").write_text("{")
    assert "last run" not in skip_forwards(make_plan(), parse_setting("sparse:bound:0.06"), file).table()


def test_nothing_is_written_for_the_embedded_model_or_into_a_folder_that_is_not_there(tmp_path: Path) -> None:
    attention = [{"expert": "high", "shares": [0.5], "errors": [0.04]}]
    for file in (TINY / "t2v_high.safetensors", tmp_path / "none" / "x.safetensors"):
        write_last("t2v-tiny", bounded(0.06), {"high": file}, attention)
        assert not LAST_FILES.beside(file, "").exists()


def test_levels_are_as_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sparse.md").read_text()
    assert "1/16, 3/32, 1/8, 3/16, 1/4, 3/8, 1/2, 3/4" in text and len(LEVELS) == 9


def test_the_first_steps_have_a_third_of_the_bound(experts: dict[str, WanModel]) -> None:
    plan = bounded_plan("0.06", 20)
    assert [step.bound for step in plan.steps] == [pytest.approx(0.02)] * 6 + [0.06] * 14
    assert "attention's error at most 0.02" in plan.table() and "first 30 % of the steps" in plan.table()
    assert {step.bound for step in bounded_plan("0.06:ramp0").steps} == {0.06}
    attention = run(experts, plan)[1]
    assert_kept(attention[:6], 0.02)
    assert max(error or 0.0 for step in attention[8:] for error in step["errors"]) > 0.03


def calls(source: Path, name: str) -> list[ast.Call]:
    """The calls of a function in a file."""
    found = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
    return [node for node in found if getattr(node.func, "id", getattr(node.func, "attr", "")) == name]


def test_nodes_keep_nothing_beside_models() -> None:
    """Neither they nor what workers sample for them say where: any workflow would write into the models folder."""
    sources = [*(ROOT / "nodes").rglob("*.py"), ROOT / "wan_core" / "workers" / "jobs.py"]
    sampled = [call for source in sources for call in calls(source, "sample_latents")]
    assert len(sampled) == 2 and not any(keyword.arg == "files" for call in sampled for keyword in call.keywords)
    assert not [call for source in sources for call in calls(source, "write_last")]
    assert calls(ROOT / "wan_core" / "pipeline" / "denoise.py", "write_last"), "the command line does"
