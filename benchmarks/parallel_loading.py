"""Loading in suite `parallel`: whole by one GPU, and a part by each."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from benchmarks.measure import make_room, measure
from benchmarks.ranks import Ranks
from benchmarks.rows import Row, guarded
from wan_core.checkpoint import load_dit, open_checkpoint
from wan_core.checkpoint.save import save
from wan_core.execution.report import GIB
from wan_core.parallel.mesh import RankMesh
from wan_core.parallel.weights import shared_checkpoint


def loading_rows(ranks: Ranks) -> Iterator[Row]:
    """Both experts from their file, which is in the page cache: it was written a moment ago, and is read twice."""
    folder = Path(tempfile.gettempdir()) / f"wancore-bench-{os.environ['MASTER_PORT']}"
    path, size = folder / "expert.safetensors", ranks.sizes[0]
    if ranks.first:
        folder.mkdir(exist_ok=True)
        save(ranks.plain()[0], path)
        make_room(ranks.device)
    ranks.wait()
    try:
        seconds: dict[str, float] = {}
        for name, share in (("1 GPU", None), (f"shared by {ranks.count} GPUs", ranks.world)):
            row = {}
            if share is not None or ranks.first:
                row = guarded(f"load both experts, {name}", size, None, lambda s=share: _load(ranks, path, s))
            ranks.wait()
            if "seconds" in row and seconds:
                row |= {"ratio": round(seconds["one"] / row["seconds"], 4), "ratio_to": "load both experts, 1 GPU"}
            seconds.setdefault("one", row.get("seconds", float("nan")))
            yield row
            make_room(ranks.device)
    finally:
        ranks.wait()
        if ranks.first:
            path.unlink(missing_ok=True)
            folder.rmdir()


def _load(ranks: Ranks, path: Path, share: RankMesh | None) -> Row:
    def both() -> Tensor:
        loaded = []
        for _ in range(2):
            checkpoint = open_checkpoint(path)
            checkpoint = checkpoint if share is None else shared_checkpoint(checkpoint, share)
            loaded.append(load_dit(checkpoint, device=ranks.device, dtype=ranks.dtype))
        return loaded[0].patch_embedding.weight[:1].clone()

    measured = measure(lambda: both, ranks.device, min(ranks.runs, 3))
    return {**measured.numbers(), "file_gib": round(path.stat().st_size / GIB, 2)}
