"""Cause faults in runs of the embedded model, and write what is left after each into docs/reliability.md.

    python -m tools.faults            # prints the table
    python -m tools.faults --write    # replaces it in docs/reliability.md

Every row is one run in a new folder: the command line on the CPU, a fault at a chosen moment, and then a run without a
fault in the same folder, which must succeed and leave no hidden file.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.processes import parents, ranks_below

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
HEADER = "| fault | when | exit | message | files left | next run writes |\n|---|---|---|---|---|---|\n"
GENERATE = ["generate", "--model", "tiny", "--prompt", "a red circle moving right on a blue background"]
GENERATE += ["--size", "128x96", "--frames", "17", "--steps", "6", "--out", "x.mp4"]
RANKS = ("--gpus", "cpu,cpu", "--mesh", "1x1x2", "--step-timeout", "8")
SECONDS = 240.0  # a run that takes longer hangs


@dataclass(frozen=True)
class Fault:
    """`act` is called with the running process when `when` is true of what it printed and of its folder."""

    what: str
    moment: str
    when: Callable[[str, Path], bool] = lambda said, folder: False
    act: Callable[[int], None] = lambda pid: None
    arguments: tuple[str, ...] = ()
    limit: int | None = None  # bytes of the largest file, as on a disk with so much room


def printed(words: str) -> Callable[[str, Path], bool]:
    return lambda said, folder: words in said


def exists(pattern: str) -> Callable[[str, Path], bool]:
    return lambda said, folder: any(folder.glob(pattern))


MOMENTS = {
    "loading": printed("load "),
    "text": printed("text ..."),
    "denoising": printed("step   2/6"),
    "decoding": printed("decode ..."),
    "writing the video": exists(".x.*.part"),
}


def send(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


def to_rank(index: int, number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(ranks_below(pid)[index], number)


def to_supervisor(number: int) -> Callable[[int], None]:
    """Send a signal to the process that started the ranks."""
    return lambda pid: os.kill(parents()[ranks_below(pid)[0]], number)


def faults() -> Iterator[Fault]:
    for moment, when in MOMENTS.items():
        for name, number in (("Ctrl+C", signal.SIGINT), ("SIGTERM", signal.SIGTERM), ("SIGKILL", signal.SIGKILL)):
            yield Fault(name, moment, when, send(number))
    denoising = MOMENTS["denoising"]
    yield Fault("SIGKILL to the supervisor", "denoising", denoising, to_supervisor(signal.SIGKILL), RANKS)
    for rank in (0, 1):
        yield Fault(f"SIGKILL to rank {rank}", "denoising", denoising, to_rank(rank, signal.SIGKILL), RANKS)
    yield Fault("SIGSTOP to rank 1", "denoising", denoising, to_rank(1, signal.SIGSTOP), RANKS)
    yield Fault("SIGKILL to the program", "denoising, two ranks", denoising, send(signal.SIGKILL), RANKS)
    yield Fault("full disk", "before the work", limit=0)
    yield Fault("full disk", "keeping latents: the video fits", limit=45_000)
    yield Fault("full disk", "keeping latents and writing the video", limit=1000)
    yield Fault("full disk", "keeping latents, two ranks", arguments=RANKS, limit=45_000)
    yield Fault("folder that cannot be written", "before the work", arguments=("--out", "/proc/x.mp4"))
    yield Fault("folder that does not exist", "before the work", arguments=("--report", "missing/x.json"))
    yield Fault("second run with the same name", "denoising", denoising)


def run(fault: Fault, folder: Path) -> tuple[int, str]:
    """Exit code and what it printed on stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder.parent)}

    def limited() -> None:
        if fault.limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (fault.limit, fault.limit))

    device = [] if "--gpus" in fault.arguments else ["--device", "cpu"]
    command = [sys.executable, "-u", "-m", "wan_core", *GENERATE, *device, *fault.arguments]
    reading, writing = os.pipe()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=writing, preexec_fn=limited
    )
    os.close(writing)
    os.set_blocking(reading, False)
    said, acted, deadline = "", False, time.monotonic() + SECONDS
    while True:
        ended = process.poll() is not None
        try:
            said += os.read(reading, 1 << 16).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.001)
        if not acted and fault.when(said, folder):
            acted = True
            if "second run" in fault.what:
                again(folder)
            else:
                fault.act(process.pid)
        if ended:
            break
        if time.monotonic() > deadline:
            process.kill()
            raise TimeoutError(f"{fault.what}, {fault.moment}: still running after {SECONDS:g} s\n{said}")
    os.close(reading)
    return process.returncode, said


def again(folder: Path) -> str:
    """Run once more without a fault; the name of the video that it writes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "wan_core", *GENERATE, "--device", "cpu"]
    found = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return found.stdout.strip().splitlines()[-1]


def row(fault: Fault) -> str:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "run")
        folder.mkdir()
        code, said = run(fault, folder)
        message = next((line for line in reversed(said.splitlines()) if line.startswith("python -m wan_core ")), "")
        if not message:
            message = next((line for line in said.splitlines() if "interrupted" in line or "latents" in line), "")
        left = left_in(folder)
        following = again(folder)
        hidden = [name for name in left_in(folder) if name.startswith(".")]
        assert not hidden, f"{fault.what}, {fault.moment}: the next run left {hidden}"
    message = message.replace("|", "/").replace(str(folder), "FOLDER").replace(place, "TEMP")
    message = re.sub(r"process \d+", "process N", message).replace(f"on {socket.gethostname()} ", "")
    short = message if len(message) <= 160 else f"{message[:157]}..."
    return f"| {fault.what} | {fault.moment} | {code} | {short or '-'} | {words(left)} | {following} |"


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def words(left: list[str]) -> str:
    """Names of files, hidden ones by what they are."""
    kinds = {".part": "a hidden partial file", ".claim": "a hidden claim"}
    return ", ".join(sorted({kinds.get(Path(name).suffix, name) for name in left})) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"replace the table in {PAGE.name}")
    options = parser.parse_args()
    rows = []
    for fault in faults():
        rows.append(row(fault))
        print(rows[-1], flush=True)
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n" + HEADER + "\n".join(rows) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
