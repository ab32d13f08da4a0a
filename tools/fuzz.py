"""Give damaged and hostile files to every reader, and count what they do. Exit code 1 if any does what none may.

    python -m tools.fuzz                         10,800 cases, about 8 minutes on a core
    python -m tools.fuzz --cases 50 --only image video
    python -m tools.fuzz --only pickle --case 15 one case in this process, with its traceback

Files are made by a seeded generator from sound ones (`tools/hostile`). Each is read in a worker process, which may use
1 GiB of memory above what it has at its start and 5 CPU seconds for a file. The allowed outcomes: an error for users (a
`UserError` or `OSError` of one line, exit code 2 on the command line), or a file that is read. The faults:

    crash        the process ended by a signal
    traceback    another exception, or a message of several lines
    over time    more than 5 CPU seconds
    over memory  memory ran out, or resident memory grew by more than 1 GiB

Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tools.hostile.readers import READERS, Reader
from wan_core.config import UserError

SECONDS, MEMORY = 5.0, 2**30
BATCH = 200  # cases of one worker: a new one costs 20 ms, and an old one has more memory that it does not give back
OUTCOMES = ("refused", "accepted", "crash", "traceback", "over time", "over memory")
FAULTS = OUTCOMES[2:]


@dataclass(frozen=True)
class Outcome:
    """What became of a case. what: one of `OUTCOMES`; why: the message; seconds: CPU time; mib: growth of memory."""

    reader: str
    number: int
    what: str
    why: str
    seconds: float = 0.0
    mib: float = 0.0

    @property
    def is_fault(self) -> bool:
        return self.what in FAULTS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cases", type=int, default=1200, help="of each reader (default %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case; the costly ones come first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=READERS, default=list(READERS), metavar="READER")
    parser.add_argument("--case", type=int, help="run one case in this process")
    options = parser.parse_args(arguments)
    if options.case is not None:
        return run_alone(READERS[options.only[0]], options.case, options.seed)
    torch.set_num_threads(1)  # threads do not survive a fork
    outcomes: list[Outcome] = []
    for name in options.only:
        for outcome in run(name, range(options.first, options.first + options.cases), options.seed):
            outcomes.append(outcome)
            if outcome.is_fault:
                print(f"{name} {outcome.number}: {outcome.what}: {outcome.why}", flush=True)
        print(f"{name}: {options.cases} cases", file=sys.stderr, flush=True)
    print(table(outcomes))
    return int(any(outcome.is_fault for outcome in outcomes))


def table(outcomes: Sequence[Outcome]) -> str:
    """A row for each reader: how many cases ended how, the longest time and the largest growth of memory."""
    lines = ["| reader | cases | " + " | ".join(OUTCOMES) + " | most CPU s | most MiB |"]
    lines.append("|---" * (len(OUTCOMES) + 4) + "|")
    readers = list(dict.fromkeys(outcome.reader for outcome in outcomes))
    for name in [*readers, "all"]:
        rows = [outcome for outcome in outcomes if name in ("all", outcome.reader)]
        counts = Counter(outcome.what for outcome in rows)
        numbers = [str(counts[what]) for what in OUTCOMES]
        most = f"{max(row.seconds for row in rows):.1f} | {max(row.mib for row in rows):.0f}"
        lines.append(f"| {name} | {len(rows):,} | {' | '.join(numbers)} | {most} |")
    return "\n".join(lines)


def run_alone(reader: Reader, number: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        begin = time.process_time()
        try:
            reader.read(written(reader, reader.case(number, seed), Path(folder)))
        finally:
            print(f"{time.process_time() - begin:.2f} CPU seconds")
    return 0


# -------------------------------------------------------------------------------------------------------------- workers


def run(name: str, numbers: range, seed: int) -> Iterator[Outcome]:
    """The outcome of each case of a reader, in order. A worker that ends is replaced, from the next case on."""
    reader = READERS[name]
    warm_up(reader)
    begin = numbers.start
    while begin < numbers.stop:
        yield from (outcomes := list(batch(name, begin, min(begin + BATCH, numbers.stop), seed)))
        begin += len(outcomes)


def warm_up(reader: Reader) -> None:
    """Read a sound file and make one of each kind, so that no worker imports or builds anything."""
    # A sound file may be part of nothing.
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder, contextlib.suppress(UserError):
        reader.read(written(reader, reader.warm(), Path(folder)))
    for number in range(len(reader.bombs), len(reader.bombs) + 50):
        reader.case(number, seed=0)
    gc.collect()
    gc.freeze()


def batch(name: str, begin: int, end: int, seed: int) -> Iterator[Outcome]:
    """Run cases in a forked worker; if it ends early, the case that it was at is the last one."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's idle threads are not in the copy, and nothing here needs them
        pid = os.fork()
    if pid == 0:
        os.close(reading)
        work(name, range(begin, end), seed, writing)
    os.close(writing)
    number = begin
    with open(reading, encoding="utf-8") as lines:
        for line in lines:
            yield Outcome(**json.loads(line))
            number += 1
    status = os.waitpid(pid, 0)[1]
    if status != 0:
        ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
        what = "over time" if ended == "SIGPROF" else "crash"
        yield Outcome(name, number, what, f"ended by {ended}", SECONDS if what == "over time" else 0.0)


def work(name: str, numbers: range, seed: int, pipe: int) -> None:
    """Run the cases, write an outcome for each, and end this process."""
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # FFmpeg, libtiff and others write their own warnings
        warnings.simplefilter("ignore")
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        with open(pipe, "w", encoding="utf-8") as out, tempfile.TemporaryDirectory(prefix="fuzz") as folder:
            for number in numbers:
                outcome = one(name, number, seed, Path(folder))
                out.write(json.dumps(vars(outcome)) + "\n")
                out.flush()
                if outcome.what == "over memory":  # what it holds would count against the next
                    break
        code = 0
    except BaseException:  # noqa: BLE001 - the parent sees the exit code, and only this process may end here
        traceback.print_exc(file=sys.stdout)
    finally:
        sys.stdout.flush()
        os._exit(code)


def one(name: str, number: int, seed: int, folder: Path) -> Outcome:
    """Read one case, under the limits."""
    reader = READERS[name]
    path = written(reader, reader.case(number, seed), folder)
    gc.collect()
    before, begin = reset_memory(), time.process_time()
    limit_memory(MEMORY)
    signal.setitimer(signal.ITIMER_PROF, SECONDS * 1.2)
    try:
        what, why = outcome_of(reader, path)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        limit_memory(None)
    seconds, mib = time.process_time() - begin, (peak_memory() - before) / 2**20
    if seconds > SECONDS and what in ("refused", "accepted"):
        what, why = "over time", f"{seconds:.1f} s, {what}: {why}"
    if mib > MEMORY / 2**20 and what in ("refused", "accepted"):
        what, why = "over memory", f"{mib:.0f} MiB, {what}: {why}"
    return Outcome(name, number, what, why[:500], round(seconds, 3), round(mib, 1))


def outcome_of(reader: Reader, path: Path) -> tuple[str, str]:
    try:
        reader.read(path)
    except (UserError, OSError) as fault:
        message = str(fault)
        if not message.isprintable() or len(message) > 3000 or len(message) < 10:
            return "traceback", f"a message of several lines, or too long or short: {message!r}"
        if "allocate" in message or "out of memory" in message.lower():
            return "over memory", message
        return "refused", message
    except MemoryError:
        return "over memory", last_line()
    except Exception as fault:  # noqa: BLE001 - any other is what is looked for
        if "allocate" in str(fault) or "bad_alloc" in str(fault):
            return "over memory", last_line()
        return "traceback", last_line()
    return "accepted", ""


def last_line() -> str:
    """The exception that is handled, and the line of this project that raised it."""
    kind, fault, trace = sys.exc_info()
    frames = [frame for frame in traceback.extract_tb(trace) if "/wan_core/" in frame.filename]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return f"{kind.__name__ if kind else ''} at {place}: {str(fault)[:200]}"


def written(reader: Reader, content: bytes, folder: Path) -> Path:
    for old in folder.iterdir():
        old.unlink()
    for name, other in reader.beside().items():
        (folder / name).write_bytes(other)
    (folder / reader.name).write_bytes(content)
    return folder / reader.name


# --------------------------------------------------------------------------------------------------------------- limits


def limit_memory(more: int | None) -> None:
    """Allow `more` bytes of address space than are in use, twice over: what is reserved and never touched counts too.
    None: no limit."""
    if more is None:
        soft = resource.RLIM_INFINITY
    else:
        soft = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2 * more
    resource.setrlimit(resource.RLIMIT_AS, (soft, resource.getrlimit(resource.RLIMIT_AS)[1]))


def reset_memory() -> int:
    """Resident bytes now, from where `peak_memory` counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_memory()


def peak_memory() -> int:
    """The most resident bytes since `reset_memory`."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    sys.exit(main())
