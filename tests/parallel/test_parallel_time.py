"""Parallel steps (CHORDS): what ranks compute is what the published rule computes in one process, slot by slot."""

from __future__ import annotations

from dataclasses import replace

import parallel_checks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.workers.test_agreements import REPORTED
from wan_core.config import OptionError, SkipOptions, SparseOptions, TaylorSeerOptions
from wan_core.models.wan.config import T2V_A14B
from wan_core.parallel.chords import BEGINNINGS, Stretches, check_chords
from wan_core.parallel.layers import check_layers
from wan_core.parallel.mesh import Mesh
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.plan import make_plan
from wan_core.sampling.sparsity.schedule import sparsify


def one_process(starts: tuple[int, ...], sigmas: tuple[float, ...]) -> Tensor:
    """The rule as in the paper: all ranks in one slot after another, each from what the one before has in that slot."""
    steps = len(sigmas) - 1

    def jump(x: Tensor, v: Tensor, i: int, j: int) -> Tensor:
        return x + v * (sigmas[j] - sigmas[i])

    at: dict[int, tuple[int, Tensor]] = {0: (0, torch.linspace(-2, 2, 10))}
    begun: dict[int, tuple[int, Tensor, Tensor]] = {}
    while True:
        now = {k: (i, x, parallel_checks.bent(x, sigmas[i])) for k, (i, x) in at.items()}
        for k, (i, x, v) in now.items():
            begun.setdefault(k, (i, x, v))
            new = jump(x, v, i, i + 1)
            b, begin, slope = begun[k]
            if k > 0 and now[k - 1][0] == b:
                _, theirs, their_v = now[k - 1]
                new = (new - jump(begin, slope, b, i + 1)) + jump(theirs, their_v, b, i + 1)
                del begun[k]
            at[k] = i + 1, new
        last = len(now) - 1
        if len(now) < len(starts):
            i, x, v = now[last]
            assert i == starts[last]
            at[last + 1] = starts[last + 1], jump(x, v, i, starts[last + 1])
        elif at[last][0] == steps:
            return at[last][1]


@pytest.mark.parametrize(
    ("starts", "steps"),
    [((0, 3), 10), ((0, 1), 5), ((0, 7), 8), ((0, 2, 4, 8), 12), ((0, 1, 5, 6), 9)],
)
def test_ranks_compute_the_rule(ranks, starts, steps):
    mesh, plan = f"time{len(starts)}", make_plan(steps=steps, solver="euler")
    answers = ranks.ask("chords", mesh=mesh, starts=starts, steps=steps)
    wanted = one_process(starts, plan.sigmas)
    assert all(torch.equal(x, wanted) for x, _ in answers)
    assert [count for _, count in answers] == [
        steps - starts[-1] + len(starts) - 1 - rank for rank in range(len(starts))
    ]


@pytest.mark.parametrize("count", [2, 4])
def test_steps_that_begin_one_after_the_other_equal_the_sequential_run(ranks, count):
    """Nothing is saved, and every step is corrected to what one rank computes: the same bits."""
    sigmas = make_plan(steps=9, solver="euler").sigmas
    x = torch.linspace(-2, 2, 10)
    for i, sigma in enumerate(sigmas[:-1]):
        x = x + parallel_checks.bent(x, sigma) * (sigmas[i + 1] - sigma)
    for latents, _ in ranks.ask("chords", mesh=f"time{count}", starts=tuple(range(count)), steps=9):
        assert torch.equal(latents, x)


REQUEST = {"steps": 10, "solver": "euler", "width": 48, "height": 48, "frames": 5, "guidance_mode": "sequential"}


@pytest.fixture(scope="module")
def plain(ranks):
    """The latents of two ranks that share the steps and nothing else."""
    return ranks.ask("trajectory", mesh="time2", decode=False, request=REQUEST)[0][0]


@pytest.mark.parametrize("mesh", ["time4", "time2+1x1x2", "time2+2x1x1", "time2+layers2"])
def test_a_trajectory(ranks, plain, mesh):
    """Both experts. Exact meshes inside change nothing but rounding; the ranks of all agree bit for bit."""
    request = REQUEST
    answers = ranks.ask("trajectory", mesh=mesh, decode=False, request=request)
    assert all(torch.equal(latents, answers[0][0]) for latents, _, _ in answers)
    alone = parallel_checks.trajectory(None, decode=False, request=request)[0]
    error = parallel_checks.relative(answers[0][0], alone)
    assert 1e-4 < error < 1, error
    if "+" in mesh:
        assert parallel_checks.relative(answers[0][0], plain) < 5e-5
    forwards = Stretches.of(Mesh.parse(mesh).time, 10).forwards
    assert f"time: {forwards} forwards in a row instead of 10" in answers[0][2]["notes"]


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (T2V_A14B, 41, "has 40 blocks"),
        (replace(T2V_A14B, family="animate"), 2, "family animate"),
    ],
)
def test_layers_refused(config, ranks, message):
    check_layers(Mesh(layers=2), T2V_A14B, make_plan())
    with pytest.raises(OptionError, match=message):
        check_layers(Mesh(layers=ranks), config, make_plan())


@given(st.sampled_from(sorted(BEGINNINGS)), st.integers(1, 120))
def test_hand_overs_fit(count, steps):
    """Whatever is sent is received, in the same order; the last rank ends at the last step."""
    try:
        stretches = Stretches.of(count, steps)
    except OptionError:
        return
    assert stretches.end(count - 1) == steps and stretches.forwards <= steps and stretches.end(0) == stretches.forwards
    for rank in range(1, count):
        sent = [
            i for i in range(stretches.starts[rank - 1], stretches.end(rank - 1)) if stretches.corrects(rank - 1, i)
        ]
        steps_of_rank = range(stretches.starts[rank], stretches.end(rank))
        taken = [source for i in steps_of_rank if (source := stretches.corrected_from(rank, i)) is not None]
        assert sent == taken


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"solver": "unipc"}, "use solver euler"),
        ({"skip": SkipOptions(taylorseer=TaylorSeerOptions(interval=2))}, "step caching"),
        ({"sparse": SparseOptions(sparsity=0.5)}, "sparse attention"),
        ({"steps": 4}, "4 steps cannot"),
    ],
)
def test_refused(changed, message):
    options = {"steps": 20, "solver": "euler", **changed}
    skip, sparse = options.pop("skip", SkipOptions()), options.pop("sparse", None)
    plan = leave_out(make_plan(**options), skip, None)
    plan = plan if sparse is None else sparsify(plan, sparse)
    with pytest.raises(OptionError, match=message):
        check_chords(plan, 4)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("2x1x1", f"{REPORTED} --guidance-mode sequential"),
        ("1x1x2", REPORTED),
    ],
)
def test_all_ranks_ask_equally_often_whether_to_stop(ranks, mesh, options):
    """`tests/workers/test_agreements.py` has more options, without processes."""
    (asked, due), (others, _) = ranks.ask("questions", mesh=mesh, arguments=options.split())
    assert asked == others and sum(asked) > due
