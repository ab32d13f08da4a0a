"""What parallel steps (CHORDS, mesh timeN) save and lose, with the embedded model on ranks of the CPU.

    python -m benchmarks.parallel_steps --out benchmarks/results

Rows, each against 50 Euler steps of one rank from the same noise:

2, 4, 8 ranks       `mesh timeN`
N steps, one rank   the same waiting time without other ranks: as many Euler steps as N ranks run in a row

forwards            steps that run one after the other; saved: the share that does not
psnr, psnr_worst    of the decoded frames, mean and worst of the samples; psnr_se: the mean's standard error
captions_true       share of samples whose background, colour, shape and motion are all as the caption says
"""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from wan_core.config import LoadOptions, Request
from wan_core.media.metrics import judge, psnr
from wan_core.media.shapes import SCENES, held_out
from wan_core.parallel.mesh import Mesh, RankMesh
from wan_core.pipeline.evaluate.compare import standard_error
from wan_core.pipeline.evaluate.results import envelope, result_path, write_result
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.chords import BEGINNINGS, Stretches

CPU = torch.device("cpu")
HELD_OUT = [scene for scene in SCENES if held_out(scene)]


def captions(samples: int) -> list[str]:
    return [HELD_OUT[37 * i % len(HELD_OUT)].caption for i in range(samples)]  # neighbours differ


def videos(samples: int, steps: int, ranks: RankMesh | None = None) -> list[np.ndarray]:
    """Frames [F, H, W, 3] of each sample."""
    asked = [Request(prompt=text, seed=i, steps=steps, solver="euler") for i, text in enumerate(captions(samples))]
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"), request=asked[0], ranks=ranks)
    return [pipe.generate(request).frames for request in asked]


def run_rank(rank: int, count: int, port: int, samples: int, steps: int, out: str) -> None:
    """One rank of `count`; the first writes the frames of all samples to `out`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    made = videos(samples, steps, RankMesh.start(Mesh(time=count), CPU))
    if rank == 0:
        np.save(out, np.stack(made))


def over_ranks(count: int, samples: int, steps: int, folder: Path) -> np.ndarray:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = folder / f".time{count}-{os.getpid()}.npy"
    try:
        mp.spawn(run_rank, (count, port, samples, steps, str(out)), nprocs=count)
        return np.load(out)
    finally:
        out.unlink(missing_ok=True)


def row(name: str, forwards: int, steps: int, made: Any, wanted: Any, texts: list[str]) -> dict[str, Any]:
    pairs = [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(made, wanted, strict=True)]
    found = [min(100.0, psnr(a.float() / 255, b.float() / 255)) for a, b in pairs]
    true = [all(astuple(judge(a, text))) for (a, _), text in zip(pairs, texts, strict=True)]
    return {
        "name": name,
        "size": "x".join(map(str, made[0].shape[-2:0:-1])) + f"x{made[0].shape[0]}",
        "samples": len(pairs),
        "forwards": forwards,
        "saved": round(1 - forwards / steps, 3),
        "psnr": round(sum(found) / len(found), 2),
        "psnr_se": round(standard_error(found), 2),
        "psnr_worst": round(min(found), 2),
        "captions_true": round(sum(true) / len(true), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a .json file, or a folder")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    path = result_path(options.out, "parallel-steps", CPU)
    samples, steps, texts = options.samples, options.steps, captions(options.samples)
    wanted = videos(samples, steps)
    rows = [row(f"{steps} steps, one rank", steps, steps, wanted, wanted, texts)]
    for count in BEGINNINGS:
        forwards = Stretches.of(count, steps).forwards
        made = over_ranks(count, samples, steps, path.parent)
        rows.append(row(f"{count} ranks", forwards, steps, made, wanted, texts))
        rows.append(row(f"{forwards} steps, one rank", forwards, steps, videos(samples, forwards), wanted, texts))
        write_result(envelope("parallel-steps", CPU, rows, "benchmarks.parallel_steps"), path)
    for one in rows:
        print(one)


if __name__ == "__main__":
    main()
