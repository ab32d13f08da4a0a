"""Measure what step caches and sparse attention need to know of a model, in full runs of a few videos.

MagCache's curve: the mean over tokens of ||residual_t|| / ||residual_(t-1)||, per step and branch; it depends little on
the prompt. The coverage of sparse attention: the attention that selected blocks cover, by layer and head.

Legend: B batch, L tokens, H heads, D head dim, C channels, n blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from wan_core.config import OptionError, SparseOptions
from wan_core.execution.optimize import begin_run
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import BlockInputs, Place, Run
from wan_core.ops.attention.sparse.routing import Rule, choose, estimate
from wan_core.ops.attention.tiles import Tiles
from wan_core.ops.kernels.block_layout import block_sizes
from wan_core.ops.kernels.blocked import pool
from wan_core.sampling.cache.magcache import Curve, curve_name
from wan_core.sampling.cache.skipping import check_cacheable
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import Progress, Ready, denoise
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.budgets import SHARES, Coverage, choose_keeps
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles
from wan_core.sampling.steps import Branch, Expert, Step

ROWS = 16  # blocks of queries of a layer that are measured
MEASURED = 4  # number of evenly spaced steps of each expert whose coverage is measured
CALIBRATION = "a calibration"  # what the refusal of a solver calls it


class Recorder:
    """The runner that records, for every forward, the ratio of its residual to the branch's last one. Forwards must run
    one branch at a time."""

    name: ClassVar[str] = "calibration"
    place: ClassVar[Place] = Place.RESIDUALS

    def __init__(self) -> None:
        self.norms: dict[Branch, Tensor] = {}  # [B, L] of the branch's last residual
        self.ratios: dict[tuple[int, Branch], Tensor] = {}

    def __call__(self, inputs: BlockInputs, inner: Run) -> Tensor:
        before = inputs.tokens.clone()  # blocks may overwrite tokens
        after = inner(inputs)
        (branch,) = cast("tuple[Branch, ...]", inputs.info.branches)
        norm, last = torch.linalg.vector_norm((after - before).float(), dim=-1), self.norms.get(branch)  # [B, L]
        self.ratios[inputs.info.step, branch] = norm.new_ones(()) if last is None else (norm / last).mean()
        self.norms[branch] = norm
        return after


@torch.no_grad()
def record(
    plan: Plan,
    acquire: Callable[[Expert], WanModel],
    conditioning: Conditioning,
    noise: Tensor,
    on_step: Callable[[Progress], None] | None = None,
    on_block: Callable[[], None] = lambda: None,
) -> dict[tuple[int, Branch], float]:
    """Run `plan` in full and return the ratio of every step and branch; arguments as of `denoise`."""
    recorder = Recorder()
    with ExitStack() as seams:

        def watched(expert: Expert) -> WanModel:
            seams.close()  # the last expert's
            model = acquire(expert)
            begin_run(model)  # reset state of the previous video, which would change this video's ratios
            seams.enter_context(model.runners.adding(recorder))
            return model

        denoise(plan, Ready(watched), conditioning, noise, on_step=on_step, on_block=on_block)
    return {key: float(ratio) for key, ratio in recorder.ratios.items()}


def calibrate(
    plan: Plan,
    runs: Sequence[dict[tuple[int, Branch], float]],
    source: str,
    videos: Sequence[int],
    *,
    image: bool = False,
) -> Curve:
    """The mean of recorded runs of `plan` as a curve. videos: number of videos in each run, its weight in the mean.
    image: TI2V started from an image. Raises OptionError for a plan of one step."""
    if len(plan.steps) < 2:
        raise OptionError("1 step given; a ratio needs two: calibrate with the steps you will use, 20 or more")

    def mean(index: int, branch: Branch) -> float:
        key = (index, branch if (index, branch) in runs[0] else "cond")  # without guidance: cond is used for both
        return sum(run[key] * count for run, count in zip(runs, videos, strict=True)) / sum(videos)

    return Curve(
        task=curve_name(plan.task, image),
        source=source,
        high_steps=sum(step.expert == "high" for step in plan.steps),
        shift=plan.shift,
        boundary=plan.boundary,
        solver=plan.solver,
        samples=sum(videos),
        cond=tuple(mean(step.index, "cond") for step in plan.steps),
        uncond=tuple(mean(step.index, "uncond") for step in plan.steps),
    )


def measure_curve(
    plan: Plan,
    acquire: Callable[[Expert], WanModel],
    videos: Iterable[tuple[Conditioning, Tensor]],
    *,
    source: str,
    on_step: Callable[[int], None] = lambda done: None,
    on_block: Callable[[], None] = lambda: None,
) -> Curve:
    """The curve of a model over `videos`, (conditioning, noise) of each. `plan` skips nothing.

    on_step(done) is called with the number of steps of all videos so far, on_block after every block; both may raise to
    interrupt.
    """
    check_cacheable(plan.solver, CALIBRATION)
    runs, counts, done, image = [], [], 0, False

    def note(_: Progress) -> None:
        nonlocal done
        done += 1
        on_step(done)

    for conditioning, noise in videos:
        runs.append(record(plan, acquire, conditioning, noise, note, on_block))
        counts.append(len(noise))
        image = conditioning.known is not None
    return calibrate(plan, runs, source, counts, image=image)


# ------------------------------------------------------------------------------------------------- sparse attention


def measure_coverage(
    plan: Plan, acquire: Callable[[Expert], WanModel], videos: Iterable[tuple[Conditioning, Tensor]], *, source: str
) -> dict[Expert, Coverage]:
    """The coverage of each expert over `videos`, (conditioning, noise) of each. `plan` must not skip anything."""
    watchers: dict[Expert, Watcher] = {}
    looked = {step.index for phase in plan.phases for step in spread_steps(phase)}
    for conditioning, noise in videos:
        with ExitStack() as stack:

            def watched(expert: Expert, stack: ExitStack = stack, x: Tensor = noise) -> WanModel:
                stack.close()  # the previous expert has finished its steps
                model = acquire(expert)
                watcher = watchers.setdefault(expert, Watcher())
                first = next(step.index for step in plan.steps if step.expert == expert)
                watcher.looks = first in looked
                stack.enter_context(in_tiles(model, watcher.around(model, x)))
                return model

            def note(progress: Progress) -> None:
                for watcher in watchers.values():
                    watcher.looks = progress.step.index + 1 in looked

            denoise(plan, Ready(watched), conditioning, noise, on_step=note, on_block=lambda: None)
    return {expert: watcher.result(plan.task, source, expert) for expert, watcher in watchers.items()}


def spread_steps(phase: Sequence[Step]) -> list[Step]:
    """`MEASURED` evenly spaced steps of a phase, first and last included."""
    count = min(MEASURED, len(phase))
    return [phase[round(i * (len(phase) - 1) / max(1, count - 1))] for i in range(count)]


class Watcher:
    """Measures the coverage in all layers of an expert and sums it up."""

    def __init__(self) -> None:
        self.looks = False
        self.tokens = self.block = 0
        self.sums: dict[int, Tensor] = {}  # layer -> [H, shares]
        self.counts: dict[int, int] = {}

    def around(self, model: WanModel, x: Tensor) -> SparseTiles:
        patch = model.config.patch_size
        grid = x.shape[2] // patch[0], x.shape[3] // patch[1], x.shape[4] // patch[2]
        return SparseTiles(model, SparseOptions(sparsity=0), None, grid, observe=self)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> None:
        if not self.looks:
            return
        self.tokens, self.block = len(tiles.order), tiles.block
        covered = coverage(q, k, tiles.block, tiles.forced, SHARES)
        self.sums[layer] = self.sums.get(layer, 0) + covered
        self.counts[layer] = self.counts.get(layer, 0) + 1

    def result(self, task: str, source: str, expert: Expert) -> Coverage:
        """The mean coverage; reads the sums back from the device."""
        layers = [(self.sums[n] / self.counts[n]).clamp(0, 1).tolist() for n in sorted(self.sums)]
        return Coverage(
            task=task,
            source=source,
            expert=expert,
            tokens=self.tokens,
            block=self.block,
            samples=self.counts[0],
            shares=SHARES,
            mass=tuple(tuple(tuple(head) for head in layer) for layer in layers),
        )


def coverage_words(coverages: Mapping[Expert, Coverage]) -> str:
    """A table of the mass at a few shares: the same share in all layers (even), and calibrated shares (shared)."""
    lines = [f"{'expert':<8}{'share':>8}{'even':>8}{'shared':>8}"]
    for expert, one in coverages.items():
        layers = range(len(one.mass))
        for share in (0.125, 0.25, 0.5):
            even = sum(one.of_layer(n, share) for n in layers) / len(one.mass)
            best = sum(one.of_layer(n, keep) for n, keep in zip(layers, choose_keeps(one, share), strict=True))
            lines.append(f"{expert:<8}{share:>8.3g}{even:>8.3f}{best / len(one.mass):>8.3f}")
    return "\n".join(lines)


def coverage_places(out: Path, experts: Sequence[Expert]) -> dict[Expert, Path]:
    """The path of each expert's file in the folder `out`, or with the name `out`."""
    if out.is_dir():
        return {expert: out / f"{expert}.sparse.json" for expert in experts}
    stem = out.name.removesuffix(".json").removesuffix(".sparse")
    return {expert: out.with_name(f"{stem}.{expert}.sparse.json") for expert in experts}


def coverage(q: Tensor, k: Tensor, block: int, forced: Tensor, shares: Sequence[float]) -> Tensor:
    """The mean mass of attention, as computed in full, on the blocks that are chosen at each share: float32
    [H, shares]. q, k [B, L, H, D]; `ROWS` blocks of queries are looked at, evenly spread."""
    count = forced.shape[0]
    sizes = block_sizes(k.shape[1], block, k.device)
    scores = estimate(pool(q, block)[0], *pool(k, block), sizes, "spread")
    rows = torch.linspace(0, count - 1, min(ROWS, count), device=q.device).long()
    # each [B, H, rows, n]
    selected = [choose(scores, Rule(share), forced, sizes).kept(count)[:, :, rows] for share in shares]
    shares_covered = torch.zeros(q.shape[2], len(shares), device=q.device)
    for position, row in enumerate(rows.tolist()):
        queries = q[:, row * block : (row + 1) * block]
        for head in range(q.shape[2]):
            mass = block_mass(queries[:, :, head], k[:, :, head], block).mean(1)  # [B, n]
            shares_covered[head] += torch.stack([(mass * each[:, head, position]).sum(-1).mean() for each in selected])
    return shares_covered / len(rows)


def block_mass(q: Tensor, k: Tensor, block: int) -> Tensor:
    """The attention of one head's queries [B, L, D] by blocks of its keys [B, S, D]: float32 [B, L, n]."""
    weights = ((q.float() @ k.float().mT) * q.shape[-1] ** -0.5).softmax(-1)
    return F.pad(weights, (0, -weights.shape[-1] % block)).unflatten(-1, (-1, block)).sum(-1)
