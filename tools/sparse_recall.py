"""How much attention a choice of blocks keeps, and how far its output is off, over the share of blocks that is read.

    python -m tools.sparse_recall    # a table, and a file in benchmarks/results, which tools/plots.py draws

On q, k and v drawn with the structure of trained video models (`benchmarks.structured`) and on those of the embedded
model's layers in a clip of 81 frames. Ways to choose: by the same number of blocks for every row or by mass, with
tokens in tiles or as they come, by means alone or with their scatter, with and without the means of the rest.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from benchmarks.structured import mass_kept, structured
from wan_core.checkpoint import load_dit, load_text_encoder
from wan_core.ops.attention.protocol import Dense
from wan_core.ops.attention.sdpa import math_reference, sdpa
from wan_core.ops.attention.sparse.reference import sparse_reference
from wan_core.ops.attention.sparse.routing import Rule, route
from wan_core.ops.attention.sparse.tiles import Grid, make_tiles
from wan_core.ops.kernels.block_layout import Pooled
from wan_core.ops.kernels.blocked import finish, pool
from wan_core.pipeline.evaluate.results import envelope, result_path, write_result
from wan_core.pipeline.sources import TINY

CPU = torch.device("cpu")
KEEPS, MASSES = (0.0625, 0.125, 0.25, 0.5, 0.75), (0.3, 0.5, 0.7, 0.85)
WAYS = {  # name -> whether: tokens in raster order, blocks chosen by mass, spread counts, means for the rest
    "tiles, spread, pooled": (False, False, True, True),
    "tiles, spread": (False, False, True, False),
    "tiles, mean": (False, False, False, False),
    "by mass, tiles, pooled": (False, True, True, True),
    "raster, spread, pooled": (True, False, True, True),
}
Point = tuple[float, float, float]  # share of blocks read, mass kept, relative error of the output


def study(q: Tensor, k: Tensor, v: Tensor, grid: Grid, block: int) -> dict[str, list[Point]]:
    """The points of every way, for q, k, v [1, L, H, D] in raster order."""
    found: dict[str, list[Point]] = {}
    for name, (raster, by_mass, spread, pooled) in WAYS.items():
        tiles = make_tiles(grid, block, CPU, raster=raster)
        laid = [t[:, tiles.order] for t in (q, k, v)]
        exact = math_reference(*laid)
        for number in MASSES if by_mass else KEEPS:
            score = "spread" if spread else "mean"
            rule = Rule(0.9, number, 0.03, score) if by_mass else Rule(number, score=score)
            chosen = route(laid[0], laid[1], block, rule, tiles.forced)
            kept = chosen.kept(tiles.blocks)
            out, lse = sparse_reference(*laid, chosen, block)
            means = Pooled(pool(laid[1], block)[0], pool(laid[2], block)[0], kept) if pooled else None
            out = finish(out, lse, laid[0], block, pooled=means)
            mass = mass_kept(laid[0], laid[1], kept, block).mean()
            error = (out - exact).norm() / exact.norm()
            found.setdefault(name, []).append((float(kept.float().mean()), float(mass), float(error)))
    return found


def embedded(grid: Grid) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of every layer of the embedded model's high-noise expert, at a video of that many tokens."""
    model = load_dit(TINY / "t2v_high.safetensors", device=CPU, dtype=torch.float32)
    text = load_text_encoder(TINY / "text_encoder.safetensors", device=CPU, dtype=torch.float32)
    seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def look(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append((q, k, v))
        return sdpa(q, k, v)

    for block in model.blocks:
        block.self_attn.attend = Dense(look)
    x = torch.randn(1, 16, grid[0], 2 * grid[1], 2 * grid[2], generator=torch.Generator().manual_seed(0))
    model(x, torch.tensor([850.0]), text.encode(["a red circle moving right on a blue background"]))
    return seen


def mean_of(studies: list[dict[str, list[Point]]]) -> dict[str, list[Point]]:
    def mean(name: str, place: int) -> Point:
        a, b, c = (sum(s[name][place][i] for s in studies) / len(studies) for i in range(3))
        return a, b, c

    return {name: [mean(name, place) for place in range(len(studies[0][name]))] for name in WAYS}


@torch.no_grad()
def main() -> None:
    drawn, clip = (6, 16, 20), (21, 6, 6)
    studies = {
        "drawn with structure, blocks of 32 of 1,920": study(*structured(drawn, 6, 64), drawn, 32),
        "embedded model, all layers, blocks of 8 of 756": mean_of([study(*layer, clip, 8) for layer in embedded(clip)]),
    }
    rows = []
    for source, found in studies.items():
        print(f"\n{source}\n{'':<26}{'read':>8}{'mass':>8}{'error':>8}")
        for name, points in found.items():
            for read, mass, error in points:
                print(f"{name:<26}{read:>8.3f}{mass:>8.3f}{error:>8.3f}")
                rows.append(
                    {"name": name, "source": source}
                    | {"read": round(read, 4), "mass": round(mass, 4), "error": round(error, 4)}
                )
    result = envelope("sparse-recall", CPU, rows, "tools.sparse_recall")
    print(write_result(result, result_path(Path("benchmarks/results"), "sparse-recall", CPU)))


if __name__ == "__main__":
    main()
