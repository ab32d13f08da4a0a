"""Run by ComfyUI's Python: the resolution schedule on tiny Wan models of ComfyUI's own classes, sampled by its own
samplers. `native_checks` runs its checks.
"""

from __future__ import annotations

import gc
import importlib
from typing import Any

import native_models as world
from native_cache_runs import EULER, SIZE, World, close, engine, native_conditions, padded, policies, sample

HALF = "0.5/0.79-0.94"


def staged(it: World, model: Any, stages: str = HALF, attention: str = "comfyui", **skipping: Any) -> Any:
    """The model with stages, put on it by WanCore Accelerate."""
    from wan_core.config import SkipOptions
    from wan_core.sampling.stages import parse_stages

    node = importlib.import_module("pack.nodes.accelerate").WanCoreAccelerate
    options = SkipOptions(stages=parse_stages(stages), **skipping)
    return node.execute(model, attention=attention, sparse="off", skipping=options).result[0]


def check_full_size(it: World) -> None:
    model = world.tiny("WAN21_T2V")
    assert (sample(staged(it, model, "1/0.5-1"), EULER) == sample(model, EULER)).all()


def check_engine(it: World) -> None:
    """The engine's own run with the same weights, in a stage of both experts' ranges, both ways of guidance."""
    import torch

    from wan_core.sampling.conditioning import Conditioning
    from wan_core.sampling.denoise import Ready, denoise
    from wan_core.sampling.plan import Plan
    from wan_core.sampling.stages import parse_stages, with_stages
    from wan_core.sampling.steps import Step

    world.conditions = native_conditions
    model = world.tiny("WAN21_T2V")
    net = engine(model, 0)
    steps = tuple(
        Step(index=i, timestep=1000 * s, sigma=s, sigma_next=EULER[i + 1], expert="high" if s >= 0.875 else "low",
             guidance=3.0, branches=("cond", "uncond"))
        for i, s in enumerate(EULER[:-1])
    )  # fmt: skip
    plan = Plan(task="t2v-A14B", solver="euler", shift=5.0, boundary=0.875, steps=steps)
    plan = with_stages(plan, parse_stages(HALF))
    assert [step.scale for step in plan.steps].count(0.5) == 4
    texts = {name: padded(world.rows(1, 6, 32, seed=seed)) for name, seed in (("cond", 2), ("uncond", 3))}
    with torch.inference_mode():
        wanted = denoise(plan, Ready(lambda _: net), Conditioning(**texts), world.rows(*SIZE, seed=9))
    for batched in (True, False):
        with it.guidance(batched):
            latents = model.model.process_latent_in(sample(staged(it, model), EULER))
        close(latents, wanted, 1e-4)
    assert world.error(latents, model.model.process_latent_in(sample(model, EULER))) > 1e-2, "stages must show"


def check_variants(it: World) -> None:
    """Models whose inputs all follow run; others are refused by name."""
    from wan_core.config import OptionError

    taken = {"t2v", "i2v", "i2v 2.2", "5B"}
    for name, (make, extra, size) in world.variants().items():
        try:
            latents = sample(staged(it, make()), EULER, extra, size=size)
        except OptionError as fault:
            said = str(fault)
        else:
            said = "" if latents.isfinite().all() else "not finite"
        assert (said == "") == (name in taken | {"odd"}) and ("Resolution Schedule" in said) == bool(said), (name, said)


def check_together(it: World) -> None:
    """With a step cache, sparse attention and every kind of sampler; the same again; nothing is left."""
    from wan_core.config import SparseOptions

    stages = importlib.import_module("pack.nodes.host.native_stages")
    model, runs, real = world.tiny("WAN21_T2V"), [], stages.StagedRun
    stages.StagedRun = lambda *arguments: runs.append(real(*arguments)) or runs[-1]
    for asked, ran in ((HALF, 8), (f"{HALF}:every2", 4), (f"{HALF}:own", 8)):
        sample(staged(it, model, asked), EULER)
        assert runs[-1].small == ran, (asked, runs[-1].small)
    sparse = {"sparse": SparseOptions(sparsity=0.5, reuse=2, kernel="math"), "attention": "math"}
    for policy in (*policies().values(), sparse):
        fast = staged(it, model, **policy)
        first, second = sample(fast, EULER), sample(fast, EULER)
        assert (first == second).all() and first.isfinite().all()
    for sampler in ("dpmpp_2m", "heun", "res_multistep", "lcm", "uni_pc"):
        assert sample(staged(it, model), EULER, sampler=sampler).isfinite().all(), sampler
    stages.StagedRun = real
    assert all(run.small and run.forwards > run.small and not run.videos for run in runs)
    gc.collect()
    assert "wancore_stages" not in str(model.model_options)


def check_sparse(it: World) -> None:
    """A smaller step reads as many blocks as one at full size, by a choice of its own."""
    from wan_core.config import SparseOptions
    from wan_core.sampling.native.sparse import NativeSparse

    seen: set[tuple[int, int, float]] = set()
    real = NativeSparse._state

    def noted(self: Any, forward: Any, layer: int, rule: Any, grid: Any, *more: Any) -> Any:
        state = real(self, forward, layer, rule, grid, *more)
        assert state.tiles.grid == grid and state.rules[0].keep == rule.keep
        seen.add((forward.run.index, grid[1], rule.keep))
        return state

    NativeSparse._state = noted
    try:
        options = {
            "sparse": SparseOptions(sparsity=0.875, dense_steps=0, ramp=0, reuse=3, kernel="math"),
            "attention": "math",
        }
        fast = staged(it, world.tiny("WAN21_T2V"), f"{HALF}:every2", **options)
        assert sample(fast, EULER, size=(1, 16, 3, 16, 16)).isfinite().all()
    finally:
        NativeSparse._state = real
    small = {2, 4}
    assert seen == {(i, 4, 0.5) if i in small else (i, 8, 0.125) for i in range(len(EULER) - 1)}, seen


def check_reuse(it: World) -> None:
    """A step cache reuses nothing that was kept before a step of another size; the first steps of the adaptive cache
    may be many."""
    from wan_core.config import AdaptiveOptions

    real, seen = it.cache.CachedRun._begin, {}

    def noted(self: Any, x: Any, options: Any) -> Any:
        result = real(self, x, options)
        seen[result[0]] = x.shape[3], result[-1]
        return result

    it.cache.CachedRun._begin = noted
    try:
        for retention in (0.1, 0.6):
            policy = {"adaptive": AdaptiveOptions(threshold=10, max_skips=5, retention=retention)}
            sample(staged(it, world.tiny("WAN21_T2V"), f"{HALF}:every2", **policy), EULER)
            assert any(skipped for _, skipped in seen.values()), seen
            assert not any(seen[i][1] and seen[i][0] != seen[i - 1][0] for i in range(1, len(seen))), seen
    finally:
        it.cache.CachedRun._begin = real


def check_shown(it: World) -> None:
    """The plan preview has the sizes, and a run that would end small is refused before its first step."""
    from wan_core.config import OptionError

    preview = importlib.import_module("pack.nodes.native_plan").WanCoreNativePlan
    settings = {"steps": 20, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple"}
    settings |= {"denoise": 1.0, "seconds_per_forward": 1.0}
    _, table = preview.execute(staged(it, world.tiny("WAN21_T2V")), **settings).result
    lcm = preview.execute(staged(it, world.tiny("WAN21_T2V")), **{**settings, "sampler_name": "lcm"}).result[1]
    assert "0.5 of the size" in lcm
    assert "0.5 of the size" in table and "resolution schedule: 0.5 of width and height" in table, table
    ran: list[int] = []
    model = world.tiny("WAN21_T2V")
    model.model.diffusion_model.blocks[0].register_forward_pre_hook(lambda *_: ran.append(1))
    # Two samplers: each counts its own steps, and so does the preview.
    stages = importlib.import_module("pack.nodes.host.native_stages")
    two = staged(it, world.tiny("WAN21_T2V"), "0.5/0.5-0.97:every3")
    sigmas = importlib.import_module("pack.nodes.host").sampler_sigmas(two, "euler", "simple", 20, 1.0).tolist()
    for split in (6, 7, 8):
        table = preview.execute(two, **settings, model_low=two, split_step=split).result[1]
        rows = [line for line in table.splitlines() if line.split()[0].isdigit()]
        small = []
        for own in (sigmas[:split], sigmas[split:-1]):
            run = stages.StagedRun(stages.stages_of(two), own, 0.0, stages.Patches({}))
            small += [stages.stage_at(sigma, run.stages, run.sigmas) is not None for sigma in own]
        assert [("of the size" in row) for row in rows] == small and sum(small) > 4, table
    said = ""
    try:
        sample(staged(it, model, "0.5/0.1-0.9"), EULER)
    except OptionError as fault:
        said = str(fault)
    assert "the last step, at sigma 0.15" in said and not ran
