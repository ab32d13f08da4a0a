"""Skipped steps in the loop: what they compute, what they leave behind, and that skipping nothing changes nothing."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import forked
from tests.denoised import denoise
from tests.sampling.test_denoise import EXPERTS, NOISE, TEXT, small_dit
from wan_core.config import (
    MagCacheOptions,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
)
from wan_core.models.wan.runners import BlockInputs, ForwardInfo, Place
from wan_core.sampling.cache.curves import find_curve
from wan_core.sampling.cache.residual import residual_program, residuals
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.plan import make_plan
from wan_core.sampling.solvers import SOLVERS, History
from wan_core.sampling.sparsity.schedule import sparsify

CURVE = find_curve(None, "t2v-A14B")
MAG = {"threshold": 0.24, "max_skips": 2, "retention": 0.1}
SETTINGS = {
    "magcache": SkipOptions(magcache=MagCacheOptions(**MAG)),
    "taylorseer": SkipOptions(taylorseer=TaylorSeerOptions(interval=3, retention=0.1)),
}


def run(plan, noise=NOISE, conditioning=TEXT, experts=EXPERTS, **options):
    with torch.no_grad():
        return denoise(plan, experts.__getitem__, conditioning, noise, **options)


def path(plan, batched):
    """The latents after every step."""
    seen = []
    run(plan, batched=batched, on_step=lambda progress: seen.append(progress.latents))
    return seen


def textbook(plan, noise):
    """The loop written out: the residual of every branch and expert in a list, forecasts by numpy's polynomials."""
    x, history = noise, History()
    residuals: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for step in plan.steps:
        model, t, velocities = EXPERTS[step.expert], torch.full((len(noise),), step.timestep), {}
        for branch in step.branches:
            text = model.prepare_text(getattr(TEXT, branch).expand(len(noise), -1, -1))
            grid, past = model.token_grid(x), residuals.setdefault((step.expert, branch), [])
            tokens, (time, modulation) = model.embed_patches(x), model.embed_time(t)
            if branch in step.skipped:
                used = past[-2:] if step.action == "forecast" else past[-1:]
                stacked = torch.stack([r for _, r in used]).flatten(1).double().numpy()
                line = np.polynomial.polynomial.polyfit([float(i) for i, _ in used], stacked, len(used) - 1)
                value = np.polynomial.polynomial.polyval(float(step.index), line)
                after = tokens + torch.from_numpy(value).float().view_as(tokens)
            else:
                inputs = (tokens, modulation, model.rope(grid, x.device), text, ForwardInfo(), grid)
                after = model.run_blocks(BlockInputs(*inputs))
                past.append((step.index, after - tokens))
            velocities[branch] = model.unpatchify(model.head(after, time), grid)
        if "uncond" in velocities:
            velocity = velocities["uncond"] + step.guidance * (velocities["cond"] - velocities["uncond"])
        else:
            velocity = velocities["cond"]
        x, history = SOLVERS[plan.solver](x, velocity, step.index, plan.sigmas, history)
    return x


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_the_textbook(name, batched):
    plan = leave_out(make_plan(steps=24, solver="euler"), SETTINGS[name], CURVE)
    assert plan.saved > 0.2
    noise = draw_noise(3, (2, *NOISE.shape[1:]))
    with torch.no_grad():
        expected = textbook(plan, noise)
    torch.testing.assert_close(run(plan, noise, batched=batched), expected, rtol=1e-4, atol=1e-4)
    full = run(make_plan(steps=24, solver="euler"), noise, batched=batched)
    assert not torch.allclose(expected, full, rtol=1e-3, atol=1e-3), "skipping must show, or nothing is tested"


@pytest.mark.parametrize("batched", [False, True])
def test_a_cache_that_never_skips_is_bit_identical_to_none(batched):
    """No skip allowed; every step stored and none used; and the steps before the first that is skipped."""
    plan = make_plan(steps=16)
    exact = run(plan, batched=batched)
    never = [
        SkipOptions(magcache=MagCacheOptions(threshold=0, max_skips=2, retention=0.2)),
        SkipOptions(magcache=MagCacheOptions(threshold=10, max_skips=0, retention=0.2)),
        SkipOptions(magcache=MagCacheOptions(threshold=10, max_skips=5, retention=1)),
        SkipOptions(taylorseer=TaylorSeerOptions(interval=1)),
    ]
    for options in never:
        same = leave_out(plan, options, CURVE)
        assert same.forwards == plan.forwards
        assert torch.equal(run(same, batched=batched), exact), options
    for name in ("magcache", "taylorseer"):
        skipping = leave_out(plan, SETTINGS[name], CURVE)
        first = next(s.index for s in skipping.steps if s.skipped)
        equal = [torch.equal(a, b) for a, b in zip(path(plan, batched), path(skipping, batched), strict=True)]
        assert equal == [i < first for i in range(16)], name


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_left_from_run_to_run(name):
    """The same video again, after others of another size, prompt and length, and after one that was broken off."""
    options = SETTINGS[name]
    plan = leave_out(make_plan(steps=20), options, CURVE)
    experts = {"high": small_dit(seed=1), "low": small_dit(seed=2)}
    first = run(plan, experts=experts)
    run(plan, draw_noise(9, (1, 16, 2, 6, 4)), Conditioning(cond=TEXT.uncond, uncond=TEXT.cond), experts, batched=True)
    run(leave_out(make_plan(steps=13, boundary=0.5), options, CURVE), experts=experts)

    def interrupt(progress):
        if progress.step.index == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, experts=experts, on_step=interrupt)
    assert all(model.runners.runners == [] for model in experts.values())
    assert torch.equal(run(plan, experts=experts), first)
    fresh = {"high": small_dit(seed=1), "low": small_dit(seed=2)}
    assert torch.equal(run(plan, experts=fresh), first)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_blocks_run_exactly_as_often_as_the_plan_says(name, batched):
    rows, forwards = [], []
    experts = {"high": small_dit(seed=1), "low": small_dit(seed=2)}
    for model in experts.values():
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    plan = leave_out(make_plan(steps=24), SETTINGS[name], CURVE)
    run(plan, experts=experts, batched=batched, on_step=lambda p: forwards.append(p.forwards))
    assert sum(rows) == plan.forwards * 2  # two blocks
    assert forwards == [step.forwards for step in plan.steps]


def storing(cache) -> ForwardInfo:
    """The first forward of which the cache keeps the residual."""
    return ForwardInfo(next(iter(cache.kept["cond"].program.store)), ("cond",))


def test_residuals_go_beneath_what_shards_the_tokens():
    """A runner that changes the tokens' shape, as sharding does, stands outside the cache, whichever comes first."""
    plan = leave_out(make_plan(steps=20), SETTINGS["magcache"], CURVE)

    class Halves:
        name, place = "halves", Place.SHARDS

        def __call__(self, inputs, inner):
            half = dataclasses.replace(inputs, tokens=inputs.tokens[:, :9].contiguous(), rope=inputs.rope[:9])
            return torch.cat([inner(half), inputs.tokens[:, 9:]], 1)

    def shapes(model, cache):
        assert str(model.runners) == "halves > residual cache > blocks (resident weights)"
        model(NOISE, torch.tensor([900.0]), TEXT.cond, storing(cache))
        return [tuple(one.buffer.shape) for one in cache.kept.values() if one.buffer is not None]

    model = small_dit(seed=1)
    with torch.no_grad():
        with model.runners.adding(Halves()), residuals(model, plan.phases[0]) as cache:
            assert shapes(model, cache) == [(1, 1, 9, 32)]
        with residuals(model, plan.phases[0]) as cache, model.runners.adding(Halves()):
            assert shapes(model, cache) == [(1, 1, 9, 32)]
    assert model.runners.runners == []


class MemoryRunsOut:
    """In every step the `nth` forward of those that run the blocks runs out of memory once, in the last block."""

    def __init__(self, model, nth):
        self.nth, self.calls, self.again, self.relieved = nth, 0, False, 0
        self.handle = model.blocks[-1].ffn[2].register_forward_pre_hook(self.count)

    def count(self, *_):
        self.calls += 1
        if self.calls == self.nth and not self.again:
            raise torch.cuda.OutOfMemoryError("full")

    def relieve(self, expert):
        self.calls, self.again = 0, True
        self.relieved += 1
        return True

    def next_step(self, progress):
        self.calls, self.again = 0, False


FAULTY = {name: (options, None) for name, options in SETTINGS.items()} | {
    "sparse": (SkipOptions(), "0.5:ramp0"),
    "sparse taylorseer": (SkipOptions(taylorseer=TaylorSeerOptions(interval=2)), "0.5:ramp0"),
}


def faulty_plan(name, steps):
    options, sparse = FAULTY[name]
    plan = leave_out(make_plan(steps=steps, solver="euler"), options, CURVE)
    return plan if sparse is None else sparsify(plan, SparseOptions.parse(sparse))


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", FAULTY)
def test_a_step_that_runs_again_changes_nothing(name, batched):
    """Memory runs out when residuals and routes of a step have been written, in every step that computes: the video is
    bit for bit that of a run with enough memory."""
    plan, noise, model = faulty_plan(name, 12), draw_noise(5, (1, 16, 3, 6, 8)), small_dit(seed=1)
    experts = {"high": model, "low": model}
    forwards = []
    exact = run(
        plan, noise, experts=experts, batched=batched, on_step=lambda progress: forwards.append(progress.forwards)
    )
    computed = sum(count > 0 for count in forwards)
    for nth in (1,) if batched else (1, 2):
        fault = MemoryRunsOut(model, nth)
        latents = run(plan, noise, experts=experts, batched=batched, relieve=fault.relieve, on_step=fault.next_step)
        fault.handle.remove()
        assert fault.relieved == (computed if nth == 1 else forwards.count(2)) > 0
        assert torch.equal(latents, exact)


@settings(max_examples=20)
@given(st.integers(10, 60), st.integers(1, 5), st.floats(0, 0.4))
def test_programs_hold_what_they_use(steps, interval, retention):
    """Carried out on numbers: every residual that a skipped step sums up is there, and is of the newest computed
    steps."""
    options = SkipOptions(taylorseer=TaylorSeerOptions(interval=interval, retention=retention))
    for phase in leave_out(make_plan(steps=steps), options, None).phases:
        for branch in ("cond", "uncond"):
            program, slots, computed = residual_program(phase, branch), {}, []
            assert program.slots <= 2
            for step in phase:
                if branch in step.skipped:
                    used = [slots[slot] for slot, _ in program.use[step.index]]
                    assert used == computed[-2:]
                elif branch in step.branches:
                    computed.append(step.index)
                    if step.index in program.store:
                        slots[program.store[step.index]] = step.index
            assert set(program.store.values()) <= set(range(program.slots))


def test_memory_follows_the_plan():
    """Nothing is stored that no step will use, and buffers have the tokens' dtype."""
    plan = make_plan(steps=20)
    model = small_dit(seed=1).bfloat16()
    with residuals(model, plan.phases[0]) as cache:
        assert cache is None and model.runners.runners == []
    seer = leave_out(plan, SkipOptions(taylorseer=TaylorSeerOptions(interval=2)), None)
    only = [dataclasses.replace(s, branches=("cond",), skipped=s.skipped[:1]) for s in seer.phases[0]]
    with residuals(model, only) as cache:
        assert [cache.kept[name].program.slots for name in ("uncond", "cond")] == [0, 2]
        with torch.no_grad():
            model(NOISE, torch.tensor([900.0]), TEXT.cond, storing(cache))
        assert {
            b: (one.buffer.dtype, one.buffer.shape[0]) for b, one in cache.kept.items() if one.buffer is not None
        } == {"cond": (torch.bfloat16, 2)}


def test_the_second_of_two_videos_equals_that_of_another_process(tmp_path):
    """Through the command line: both in this process, one after the other, and the second in a process that has not
    made the first."""
    from wan_core.checkpoint.save import load_latents
    from wan_core.cli import main

    def arguments(out, second):
        size = ["--steps", "10", "--frames", "5", "--size", "64x48" if second else "48x64", "--seed", str(int(second))]
        prompt = f"a red circle moving {'right' if second else 'left'} on a blue background"
        keep = ["--out", str(tmp_path / "x.mp4"), "--save-latents", str(out), "--device", "cpu"]
        cache = ["--taylorseer", "3/0.2"]
        return ["generate", "--model", "tiny", *cache, *size, "--prompt", prompt, *keep, "--overwrite"]

    fresh, row = tmp_path / "fresh.safetensors", tmp_path / "row.safetensors"
    code = f"from wan_core.cli import main; raise SystemExit(main({arguments(fresh, True)!r}))"
    alone = forked.run([sys.executable, "-c", code])
    assert alone.returncode == 0, alone.stderr
    for second in (False, True):
        assert main(arguments(row, second)) == 0
    assert torch.equal(load_latents(fresh)[0], load_latents(row)[0])


def test_one_pipeline_makes_the_same_video_again(tiny_assets):
    """The models stay loaded: a cached video, one of another size and prompt, one in full, one with a LoRA, and the
    first again."""
    from tests.loras_on import loras_on
    from wan_core.config import LoadOptions, LoraOptions, Request
    from wan_core.pipeline.loras import read_loras
    from wan_core.pipeline.pipeline import Pipeline
    from wan_core.pipeline.sources import TINY_LORAS

    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    caption = "a red circle moving right on a blue background"
    cached = Request(prompt=caption, width=64, height=48, frames=5, steps=12, skip=SETTINGS["taylorseer"])
    first = pipe.generate(cached)
    assert any(note.startswith("forwards: ") and "saved" in note for note in first.report.notes)
    pipe.generate(
        dataclasses.replace(cached, width=48, height=64, prompt="a green square standing still on a white background")
    )
    full = pipe.generate(dataclasses.replace(cached, skip=None))
    experts = {name: pipe.models.expert(name) for name in ("high", "low")}
    loras = [LoraOptions(path=str(path), expert=expert, strength=0.5) for expert, path in TINY_LORAS.items()]
    for name, wanted in read_loras(loras, pipe.models.dit_config, two_experts=True).items():
        loras_on(experts[name]).attached.apply(experts[name], wanted)
    changed = pipe.generate(cached)
    for model in experts.values():
        loras_on(model).attached.clear(model)
    assert not torch.equal(first.latents, changed.latents)
    again = pipe.generate(cached)
    assert torch.equal(first.latents, again.latents) and not torch.equal(first.latents, full.latents)
    fresh = Pipeline.load(LoadOptions(model="tiny", device="cpu")).generate(cached)
    assert torch.equal(first.latents, fresh.latents)
    assert "taylorseer" in first.report.settings["skipping"] and "skipping" not in full.report.settings
