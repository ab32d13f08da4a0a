"""Calibration of sparse attention: the attention that selected blocks cover in a dense run, by layer and head.

Legend: B batch, L tokens, H heads, D head dim, n blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from wan_core.config import SparseOptions
from wan_core.media.pictures import EXPERT_COLOUR, FAINT, INK, LINE, PHASE_COLOUR, Canvas
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.sparse.routing import Rule, choose, estimate
from wan_core.ops.attention.tiles import Tiles
from wan_core.ops.kernels.block_layout import block_sizes
from wan_core.ops.kernels.blocked import pool
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import Progress, Ready, denoise
from wan_core.sampling.plan import Expert, Plan, Step
from wan_core.sampling.sparsity.budgets import SHARES, Coverage, choose_keeps
from wan_core.sampling.sparsity.run import SparseTiles, in_tiles

MEASURED = 4  # number of evenly spaced steps of each expert that are measured
ROWS = 16  # blocks of queries of a layer that are measured


def measure_coverage(
    plan: Plan, acquire: Callable[[Expert], WanModel], videos: Iterable[tuple[Conditioning, Tensor]], *, source: str
) -> dict[Expert, Coverage]:
    """The coverage of each expert over `videos`, (conditioning, noise) of each. `plan` must not skip anything."""
    watchers: dict[Expert, Watcher] = {}
    looked = {step.index for phase in plan.phases for step in some(phase)}
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


def some(phase: Sequence[Step]) -> list[Step]:
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


def draw_coverage(found: Mapping[Expert, Coverage], size: tuple[int, int] = (960, 540)) -> Image.Image:
    """A panel for each expert: the attention mass that selected blocks cover over their share, a line per layer, and
    each layer's share at 25 % on average."""
    canvas = Canvas(*size)
    first = next(iter(found.values()))
    title = f"{first.task}   attention covered by chosen blocks   {first.tokens} tokens, blocks of {first.block}"
    canvas.text(24, 16, title, size=17)
    canvas.text(
        24, 40, f"{first.source}: a line for each layer, its heads' mean; below, what each reads at 25 %", FAINT, 12
    )
    width = (size[0] - 48) / len(found)
    for number, (expert, one) in enumerate(found.items()):
        left, right = 24 + number * width + 44, 24 + (number + 1) * width - 12
        top, bottom = 84, size[1] - 130

        def at(share: float, mass: float, box: tuple[float, ...] = (left, right, top, bottom)) -> tuple[float, float]:
            return box[0] + share * (box[1] - box[0]), box[3] - mass * (box[3] - box[2])

        for mark in (0, 0.25, 0.5, 0.75, 1):
            canvas.line([at(0, mark), at(1, mark)], LINE)
            canvas.text(left - 8, at(0, mark)[1], f"{mark:g}", FAINT, 11, "rm")
            canvas.text(at(mark, 0)[0], bottom + 14, f"{100 * mark:g} %", FAINT, 11, "mm")
        canvas.text(left, top - 8, f"{expert}-noise expert", INK, 12, "ls")
        for layer in range(len(one.mass)):
            points = [at(share, one.of_layer(layer, share)) for share in (0, *one.shares)]
            canvas.line(points, EXPERT_COLOUR[expert])
        keeps = choose_keeps(one, 0.25)
        step = (right - left) / len(keeps)
        for layer, keep in enumerate(keeps):
            x = left + layer * step
            canvas.box(x + 1, size[1] - 24 - 70 * keep, x + step - 1, size[1] - 24, PHASE_COLOUR)
        canvas.text(left - 8, size[1] - 24, "0", FAINT, 11, "rm")
        canvas.text(left - 8, size[1] - 94, "1", FAINT, 11, "rm")
    return canvas.finish()


def words(found: Mapping[Expert, Coverage]) -> str:
    """A table of the mass at a few shares: the same share in all layers (even), and calibrated shares (shared)."""
    lines = [f"{'expert':<8}{'share':>8}{'even':>8}{'shared':>8}"]
    for expert, one in found.items():
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
    some = torch.linspace(0, count - 1, min(ROWS, count), device=q.device).long()
    # each [B, H, rows, n]
    selected = [choose(scores, Rule(share), forced, sizes).kept(count)[:, :, some] for share in shares]
    shares_covered = torch.zeros(q.shape[2], len(shares), device=q.device)
    for position, row in enumerate(some.tolist()):
        queries = q[:, row * block : (row + 1) * block]
        for head in range(q.shape[2]):
            mass = block_mass(queries[:, :, head], k[:, :, head], block).mean(1)  # [B, n]
            shares_covered[head] += torch.stack([(mass * each[:, head, position]).sum(-1).mean() for each in selected])
    return shares_covered / len(some)


def block_mass(q: Tensor, k: Tensor, block: int) -> Tensor:
    """The attention of one head's queries [B, L, D] by blocks of its keys [B, S, D]: float32 [B, L, n]."""
    weights = ((q.float() @ k.float().mT) * q.shape[-1] ** -0.5).softmax(-1)
    return F.pad(weights, (0, -weights.shape[-1] % block)).unflatten(-1, (-1, block)).sum(-1)
