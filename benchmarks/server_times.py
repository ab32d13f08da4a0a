"""What a server of ComfyUI says and does, and when. Copied into its `custom_nodes`, it is a pack without nodes.

Standard library only. Times are `perf_counter`, which all processes of a host share on Linux. It writes into the folder
that TIMES names, and does nothing without it:

times.jsonl     a line for each log record: [time, message]
profile.json    with PROFILE: {thread: {function: samples}} since the first prompt, SAMPLES a second. A
                function counts in every sample in which it runs or waits for one that it called. A sample needs the
                GIL, so that whatever keeps the GIL is seen when it gives it away
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

TIMES, PROFILE = "WANCORE_SERVER_TIMES", "WANCORE_SERVER_PROFILE"  # environment variables
SAMPLES = 100
SHOWN = 100  # functions of a thread
LEAST = 3  # samples of what is shown
WRITTEN_EVERY = 0.2  # seconds
NODE_CLASS_MAPPINGS: dict[str, type] = {}


class Times(logging.Handler):
    """Keeps log records. begun: set with the first prompt."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self.file = path.open("w", buffering=1)
        self.begun = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message == "got prompt":
            self.begun.set()
        self.file.write(json.dumps([round(time.perf_counter(), 4), message[:300]]) + "\n")


def functions(frame: FrameType | None) -> set[str]:
    """Those that are on the stack, `file:name`, with the last two parts of the file's path."""
    found = set()
    while frame is not None:
        code = frame.f_code
        found.add(f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_name}")
        frame = frame.f_back
    return found


def profile(path: Path, begun: threading.Event) -> None:
    """Until the process ends."""
    begun.wait()
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    written = time.perf_counter()
    while True:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                counts[names.get(ident, "unknown")].update(functions(frame))
        if time.perf_counter() - written > WRITTEN_EVERY:
            part = path.with_suffix(".part")
            part.write_text(json.dumps(counts))
            part.replace(path)  # whole at any time: the server may be ended meanwhile
            written = time.perf_counter()
        time.sleep(1 / SAMPLES)


def said(folder: Path, begin: float) -> list[list[Any]]:
    """[seconds after `begin`, message] of what a server that has ended logged since `begin`."""
    records = map(json.loads, (folder / "times.jsonl").read_text().splitlines())
    return [[round(at - begin, 3), message] for at, message in records if at >= begin]


def profile_text(folder: Path) -> str:
    """Seconds of each thread by function, most first."""
    lines = []
    for thread, counts in json.loads((folder / "profile.json").read_text()).items():
        lines.append(thread)
        most = sorted(counts.items(), key=lambda item: -item[1])[:SHOWN]
        lines += [f"  {count / SAMPLES:8.2f} {name}" for name, count in most if count >= LEAST]
    return "\n".join(lines)


def main(folder: Path) -> None:
    times = Times(folder / "times.jsonl")
    logging.getLogger().addHandler(times)
    if os.environ.get(PROFILE):
        threading.Thread(target=profile, args=(folder / "profile.json", times.begun), daemon=True).start()


if TIMES in os.environ:
    main(Path(os.environ[TIMES]))
