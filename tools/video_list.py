"""Make a list of small videos on several ranks of the CPU, kill one midway, and compare with one rank.

    python -m tools.video_list                      # 64 videos, 4 ranks: some minutes
    python -m tools.video_list --videos 8 --ranks 2

Prints one line of JSON: videos made, started twice, with other bytes than from one rank; seconds; what was told.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.faults import below

ROOT = Path(__file__).resolve().parents[1]
GENERATE = ["-m", "wan_core", "generate", "--model", "tiny", "--size", "64x64", "--frames", "17", "--steps", "4"]


def ranks_of(pid: int) -> list[int]:
    """The worker processes of the program `pid`, whose threads started their supervisors."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    supervisors = [int(child) for thread in threads for child in thread.read_text().split()]
    return sorted(rank for supervisor in supervisors for rank in below(supervisor))


def make(path: Path, folder: Path, devices: list[str], kill_at: int | None) -> tuple[float, str]:
    """Make the list in `folder`. kill_at: kill a rank when so many videos are there. Returns seconds and stderr."""
    folder.mkdir()
    command = [sys.executable, *GENERATE, "--prompts", str(path), "--out", str(folder / "x.mp4")]
    begin = time.monotonic()
    with open(folder.with_suffix(".log"), "w+") as log:
        process = subprocess.Popen([*command, "--gpus", ",".join(devices)], cwd=ROOT, stderr=log, stdout=log)
        while process.poll() is None:
            time.sleep(0.1)
            found = ranks_of(process.pid) if kill_at and len(list(folder.glob("*.mp4"))) >= kill_at else []
            if found:
                os.kill(found[-1], signal.SIGKILL)
                kill_at = None
        log.seek(0)
        told = log.read()
    if process.returncode or kill_at is not None:
        raise SystemExit(f"exit code {process.returncode}:\n{told}")
    return time.monotonic() - begin, told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=64)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "list.jsonl"
        lines = [{"prompt": "a red circle moving right", "seed": seed} for seed in range(options.videos)]
        path.write_text("\n".join(map(json.dumps, lines)))
        shared, told = make(path, folder / "shared", ["cpu"] * options.ranks, options.videos // 2)
        alone, _ = make(path, folder / "alone", ["cpu"], None)
        found = {kind: sorted((folder / "shared").glob(f"*.{kind}")) for kind in ("mp4", "json")}
        same = [video.read_bytes() == (folder / "alone" / video.name).read_bytes() for video in found["mp4"]]
        done = [line for line in told.splitlines() if " of " in line and "(group" in line]
        print(
            json.dumps(
                {
                    "videos": len(found["mp4"]),
                    "reports": len(found["json"]),
                    "made_twice": len(done) - len({line.split(": ")[1].split(" ")[0] for line in done}),
                    "other_bytes": same.count(False),
                    "lost": sum("lost it" in line for line in told.splitlines()),
                    "seconds": round(shared, 1),
                    "seconds_one_rank": round(alone, 1),
                }
            )
        )


if __name__ == "__main__":
    main()
