"""`python -m benchmarks ladder`: the jobs of `ladder_jobs` one after the other, as far as the time goes.

    python -m benchmarks ladder --dry-run --gpus 1                 # the list, with seconds and what is missing here
    python -m benchmarks ladder --on-cpu --out out/ladder          # every job, small, on the CPU: no typo meets a GPU
    python -m benchmarks ladder --gpus 1 --minutes 25 --out benchmarks/results --scratch /dev/shm/wc

A job is a process of its own with a limit of time. Its result is `OUT/NAME-DEVICE-DATE.json`. While it runs, its rows
so far are in `OUT/unfinished/NAME.json`, and what it prints in `NAME.log` there. `NAME.failed` says why one failed; the
next job begins. The same command goes on where the last one ended, whatever ended it, on another machine too: what has
a result is done, and what failed is tried again with `--again` only. A job that does not fit into the time that is left
is passed over for one that does. On a machine with several GPUs the jobs that need them come first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.ladder_jobs import FILES, JOBS, ON_DISK, Job, missing

ROOT = Path(__file__).resolve().parents[1]
MANY = 8  # GPUs of the machine that a list is for where none is named
CPU_SECONDS = 600  # for a job on a CPU, which other programs may keep busy
CPU_JOBS = 2  # at once, where nothing is measured
# Ends a job's whole group of processes when the ladder ends in whatever way: its end of the pipe closes.
WATCH = "import os, sys; sys.stdin.read(1) or os.killpg(int(sys.argv[1]), 9)"


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0, or 1 if a job of this run failed."""
    options = parser().parse_args(arguments)
    gpus = options.gpus if options.gpus is not None else MANY if options.dry_run else count_gpus()
    jobs = [job for job in in_order(gpus) if not options.only or job.name in options.only]
    if unknown := set(options.only or ()) - {job.name for job in jobs}:
        parser().error(f"no job {min(unknown)!r}; --dry-run lists them")
    if not options.dry_run and options.out is None:
        parser().error("give --out, the folder of the results")
    out = None if options.out is None else options.out / "cpu" if options.on_cpu else options.out
    ladder = Ladder(out, options.scratch or default_scratch(), gpus, cpu=options.on_cpu, again=options.again)
    if options.dry_run:
        print("\n".join(ladder.listed(jobs)))
        return 0
    return ladder.run(jobs, options.minutes, asked=bool(options.only))


def in_order(gpus: int) -> list[Job]:
    """What needs several GPUs comes first where they are, since they are there more rarely."""
    return sorted(JOBS, key=lambda job: -job.gpus if job.gpus <= gpus else 0)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks ladder", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, help="folder of the results, which are also what is done")
    made.add_argument("--gpus", type=int, help="GPUs that jobs may use (default: all there are)")
    made.add_argument("--minutes", type=float, help="stop after so long (default: no limit)")
    made.add_argument("--scratch", type=Path, help="folder for model files, 36 GB a task (default: in /dev/shm)")
    made.add_argument("--only", action="append", metavar="NAME", help="only this job; repeatable")
    made.add_argument("--again", action="store_true", help="try jobs again that failed")
    made.add_argument("--dry-run", action="store_true", help="print the jobs, and run none")
    made.add_argument("--on-cpu", action="store_true", help="run every job small on the CPU; results go to OUT/cpu")
    return made


def count_gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def default_scratch() -> Path:
    memory = Path("/dev/shm")
    base = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    return base / "wancore-ladder"


@dataclass
class Ladder:
    """out: the folder of the results, None where only a list is wanted."""

    out: Path | None
    scratch: Path
    gpus: int
    cpu: bool = False
    again: bool = False

    def state(self, job: Job) -> str:
        """`done`, `failed`, or empty."""
        if self.out is None:
            return ""
        if any(named(path) == job.name for path in self.out.glob(f"{job.name}-*.json")):
            return "done"
        return "failed" if self.unfinished(job, "failed").is_file() else ""

    def unfinished(self, job: Job, ending: str) -> Path:
        assert self.out is not None
        return self.out / "unfinished" / f"{job.name}.{ending}"

    def why_not(self, job: Job, jobs: Sequence[Job]) -> str | None:
        """Why the job, one of `jobs`, is not run here; None: it is."""
        same = self.cpu and next((one for one in jobs if one.on_a_cpu() == job.on_a_cpu()), job)
        if same and same.name != job.name:
            return f"on a CPU the same as {same.name}"
        state = self.state(job)
        if state == "done" or (state == "failed" and not self.again):
            return state
        return missing(job, self.gpus, cpu=self.cpu)

    def listed(self, jobs: Sequence[Job]) -> Iterator[str]:
        """The lines of a table: seconds, and those of all jobs up to this one that are to be done."""
        total, written = 0, set[str]()
        yield f"{'job':<26}{'seconds':>8}{'in all':>8}{'GPUs':>5}  table"
        for job in jobs:
            reason, seconds, shown = self.why_not(job, jobs), self.seconds(job, written), ""
            if reason not in ("done", "failed") and job.gpus <= self.gpus:
                total += seconds
                written.add(job.files)
                shown = str(total)
            line = f"{job.name:<26}{seconds:>8}{shown:>8}{job.gpus:>5}  {job.table}"
            yield line + ("" if reason is None else f" [{reason}]")
        yield f"{len(jobs)} jobs, {total} s, {total / 60:.0f} minutes with model files"

    def seconds(self, job: Job, written: set[str]) -> int:
        """The estimate, with the model files where no job of this run has written them."""
        if self.cpu:
            return CPU_SECONDS
        return job.seconds + (0 if job.files in written else FILES[job.files])

    def run(self, jobs: Sequence[Job], minutes: float | None, *, asked: bool = False) -> int:
        """1 if a job failed, or if one of those that were `asked` for by name was neither run nor done before."""
        assert self.out is not None
        (self.out / "unfinished").mkdir(parents=True, exist_ok=True)
        for folder in (self.scratch, ON_DISK):
            folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.scratch.glob("wancore-*"):  # of a job that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        end = float("inf") if minutes is None else time.monotonic() + 60 * minutes
        written = set[str]()

        def run(job: Job) -> bool:
            reason, seconds = self.why_not(job, jobs), self.seconds(job, written)
            left = end - time.monotonic()
            if reason is None and not self.cpu and seconds > left:
                reason = f"takes {seconds} s, and {left:.0f} are left"
            if reason is not None:
                tell(f"{job.name}: not run: {reason}")
                return not asked or reason == "done" or reason.startswith("on a CPU")
            begin = time.monotonic()
            ended = self.one(job, seconds if self.cpu else 2 * seconds + 60, left)
            written.add(job.files)
            tell(f"{job.name}: {ended} ({time.monotonic() - begin:.0f} s)")
            return not ended.startswith("failed")

        with ThreadPoolExecutor(CPU_JOBS if self.cpu else 1) as pool:
            return int(not all(list(pool.map(run, jobs))))

    def one(self, job: Job, limit: float, left: float) -> str:
        """Run the job. Returns what became of it."""
        part, log, note = (self.unfinished(job, ending) for ending in ("json", "log", "failed"))
        for path in (part, note):
            path.unlink(missing_ok=True)
        command = [sys.executable, *job.words(self.scratch, part, cpu=self.cpu)]
        begin = time.monotonic()
        with log.open("w") as printed, own_group(command, printed) as process:
            try:
                code = process.wait(min(limit, left))
            except subprocess.TimeoutExpired:
                if left <= limit:
                    return "stopped: the time is over"
                code = None
        seconds = round(time.monotonic() - begin, 1)
        result = json.loads(part.read_text(encoding="utf-8")) if part.is_file() else {"rows": []}
        result |= {"job": job.name, "table": job.table, "job_seconds": seconds}
        measured = [row for row in result["rows"] if "failed" not in row]
        faults = [f"{row['name']}: {row['failed']}" for row in result["rows"] if "failed" in row]
        if code == 0 or (code == 1 and measured):
            device = str(result["device"]).split(",")[0].replace("NVIDIA ", "").replace(" ", "-").lower()
            assert self.out is not None
            write(self.out / f"{job.name}-{device}-{date.today():%Y%m%d}.json", result)
            part.unlink(missing_ok=True)
            return f"done, {len(faults)} rows failed: {faults[0]}" if faults else "done"
        reason = f"took longer than {limit:.0f} s" if code is None else faults[0] if faults else last_line(log, code)
        write(note, result | {"failed": reason})
        return f"failed: {reason}"


@contextmanager
def own_group(command: Sequence[str], printed: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own, all of which ends with this context, or with this process."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    watch = subprocess.Popen(
        [sys.executable, "-S", "-c", WATCH, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        watch.communicate(b"x")


def last_line(log: Path, code: int) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f"exit code {code}: {lines[-1][:300] if lines else 'it printed nothing'}"


def named(path: Path) -> str:
    """The job of a result file; empty for what is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8")).get("job", "")
    except (OSError, ValueError):
        return ""


def write(path: Path, result: dict[str, Any]) -> None:
    """Beside and then renamed: a kill leaves no half of a file."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def tell(words: str) -> None:
    print(words, flush=True)
