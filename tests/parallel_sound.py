"""What ranks do with S2V in tests, see `parallel_ranks`."""

from __future__ import annotations

import torch
from parallel_checks import of_one, ranks_of, relative

from tests.animate_references import draw_weights
from tests.s2v_references import S2V, draw_inputs
from wan_core.checkpoint import load_dit
from wan_core.config import MagCacheOptions, SkipOptions
from wan_core.execution.optimize import optimize
from wan_core.ops.attention.registry import BACKENDS
from wan_core.sampling.cache.curves import Curve
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import denoise
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.sparsity.schedule import parse_sparse, sparsify


def plans(how: str) -> tuple[Plan, Plan]:
    """Every step in full; and some of them skipped, for which it takes ten, or two of them sparse."""
    steps = 10 if how == "magcache" else 2
    plan = make_plan(task="s2v-14B", steps=steps, guidance_high=2.0, guidance_low=2.0)
    if how == "sparse":
        return plan, sparsify(plan, parse_sparse("0.7/0/0:ramp0"))
    curve = Curve(
        task=plan.task, source="flat", high_steps=steps, shift=plan.shift, boundary=0.0, solver=plan.solver,
        samples=None, cond=(1.0,) * steps, uncond=(1.0,) * steps,
    )  # fmt: skip
    skip = SkipOptions(magcache=MagCacheOptions(threshold=0.12, max_skips=2, retention=0.2))
    return plan, leave_out(plan, skip, curve)


@torch.no_grad()
def sound_run(mesh: str, how: str, grid: tuple[int, ...], motion: bool) -> tuple[float, float]:
    """Of a run with all that drives S2V: the difference of sharded and whole, and to every forward in full."""
    model = load_dit(draw_weights(S2V), metadata={"num_heads": S2V.num_heads})
    given = draw_inputs(S2V, grid, motion=19 if motion else None)
    x, _, context = (given.pop(name) for name in ("x", "timestep", "context"))
    silent = {"audio": torch.zeros_like(given["audio"])}
    conditioning = Conditioning(cond=context, uncond=context.flip(1), inputs=given, uncond_inputs=silent)

    def run(plan: Plan) -> torch.Tensor:
        return denoise(plan, lambda _: model, conditioning, x)

    attend = BACKENDS["math"].load()
    optimize(model, attend=attend)
    plan, changed = plans(how)
    full, whole = of_one(mesh, lambda: (run(plan), run(changed)))
    optimize(model, attend=attend, ranks=ranks_of(mesh))
    return relative(run(changed), whole), relative(full, whole)
