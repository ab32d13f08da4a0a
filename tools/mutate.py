"""Break lines of the engine and the nodes at random (`tools/breaks.py`), and see which of them the tests notice.

    python -m tools.mutate record WORK tests/sampling tests/models    which test runs which line, and how long it takes
    python -m tools.mutate run WORK --count 100 --seed 1              breaks lines, results in WORK/broken.json
    python -m tools.mutate again WORK tests/mutations.json            breaks the lines of a list again

All of it happens in WORK/tree, a copy of the tracked files. For each broken line the tests that run it are run, the
quickest first, up to `--seconds` of them. `record` needs the package coverage. Linux only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tools.breaks import Break, breaks

SOURCES = (*(f"wan_core/{room}" for room in ("sampling", "pipeline", "execution", "checkpoint", "models")), "nodes")
OWN = ("wan_core", "nodes", "tests", "tools", "benchmarks")  # packages that are imported from the copy
SHARED = ("torch", "hypothesis", "av", "PIL.Image", "safetensors.torch", "diffusers", "transformers")  # imported once


def copy_tree(tree: Path) -> None:
    """The tracked files as they are now. A file that has not changed keeps its time, so that its byte code is valid."""
    names = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, names):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, tree / name)


class Watcher:
    """A plugin of pytest: keeps the seconds of every test and which did not pass. coverage: each test is a context."""

    def __init__(self, coverage: Any = None) -> None:
        self.coverage, self.seconds, self.not_passed = coverage, dict[str, float](), dict[str, str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if self.coverage is not None:
            self.coverage.switch_context(item.nodeid)
        result = yield
        if self.coverage is not None:
            self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self.not_passed[report.nodeid] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.not_passed[report.nodeid] = "failed"


def record_here(out: Path, tests: Sequence[str]) -> None:
    """Run the tests in this folder; write the seconds of each, and by file and line those that run it. A record that
    is there gets what these tests did."""
    from coverage import Coverage  # type: ignore[import-not-found]

    coverage = Coverage(data_file=None, include=[f"{source}/*" for source in SOURCES])
    watcher = Watcher(coverage)
    coverage.start()
    pytest.main(["-q", "-n", "0", *tests], plugins=[watcher])
    coverage.stop()
    record = json.loads(out.read_text()) if out.is_file() else {"seconds": {}, "lines": {}}
    for file in coverage.get_data().measured_files():
        of_file = record["lines"].setdefault(str(Path(file).relative_to(Path.cwd())), {})
        for line, names in coverage.get_data().contexts_by_lineno(file).items():
            earlier = set(of_file.get(str(line), ())) - watcher.seconds.keys()
            of_file[str(line)] = sorted(earlier | set(names) - watcher.not_passed.keys())
    record["seconds"] |= watcher.seconds
    out.write_text(json.dumps(record))


def tests_of(record: dict[str, Any], one: Break, most: float) -> list[str]:
    """The tests that run a line, the quickest first, `most` seconds of them. Where no test does, because it is run at
    import, those of the whole file."""
    lines, seconds = record["lines"].get(one.file, {}), record["seconds"]
    names = {test for n in range(one.place[0], one.place[2] + 1) for test in lines.get(str(n), ()) if test}
    names = names or {test for tests in lines.values() for test in tests if test}
    chosen, total = [], 0.0
    for test in sorted(names, key=lambda name: (seconds[name], name)):
        total += seconds[test]
        if total > most and chosen:
            break
        chosen.append(test)
    return chosen


def run_tests(tree: Path, tests: Sequence[str]) -> None:
    """In a child process: run the tests of the copy until one fails, and write which."""
    os.setsid()
    os.chdir(tree)
    sys.path[0], sys.dont_write_bytecode = str(tree), True
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
        del sys.modules[name]
    output = os.open("../output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    watcher, options = Watcher(), ["-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    code = int(pytest.main([*options, *tests], plugins=[watcher]))
    failed = [name for name, outcome in watcher.not_passed.items() if outcome == "failed"]
    Path("../failed.txt").write_text("" if code == 0 else next(iter(failed), f"pytest ended with code {code}"))


def noticed(tree: Path, tests: Sequence[str], limit: float) -> str:
    """The first of the tests that fails, `timeout` or `crash`; "" if all pass."""
    failed = tree.parent / "failed.txt"
    failed.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            run_tests(tree, tests)
        finally:
            os._exit(0)
    end = time.monotonic() + limit
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timeout"
        time.sleep(0.05)
    return failed.read_text() if failed.is_file() else "crash"


def try_break(tree: Path, one: Break, tests: Sequence[str], limit: float) -> str:
    """What notices a broken line: `noticed`. The file is whole again afterwards."""
    path = tree / one.file
    text, times = path.read_text(encoding="utf-8"), path.stat()
    try:
        path.write_text(one.applied(text), encoding="utf-8")
        return noticed(tree, tests, limit)
    finally:
        path.write_text(text, encoding="utf-8")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def draw_breaks(tree: Path, record: dict[str, Any], count: int, seed: int) -> list[Break]:
    """Random lines that a test or an import runs, one random `Break` of each, three times as often one that is not
    rough. What tests run does not change the order of the lines."""
    of_line: dict[tuple[str, int], list[Break]] = {}
    for path in sorted(path for source in SOURCES for path in (tree / source).rglob("*.py")):
        file = str(path.relative_to(tree))
        for one in breaks(file, path.read_text(encoding="utf-8")):
            of_line.setdefault((file, one.place[0]), []).append(one)
    chance, lines = random.Random(seed), sorted(of_line)
    chance.shuffle(lines)
    drawn = [chance.choices(of_line[line], [1 if one.rough else 3 for one in of_line[line]])[0] for line in lines]
    return [one for one in drawn if str(one.place[0]) in record["lines"].get(one.file, {})][:count]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("record", "record-here", "run", "again"))
    parser.add_argument("work", type=Path)
    parser.add_argument("names", nargs="*", help="tests to record, or the list to try again")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    work, os.environ["CI"] = options.work.resolve(), "1"
    tree = work / "tree"
    if options.what == "record-here":
        record_here(work, options.names)
        return 0
    copy_tree(tree)
    if options.what == "record":
        command = [sys.executable, "-m", "tools.mutate", "record-here", str(work / "record.json"), *options.names]
        return subprocess.run(command, cwd=tree).returncode
    record = json.loads((work / "record.json").read_text())
    if options.what == "run":
        rows = [asdict(one) | {"noticed_by": ""} for one in draw_breaks(tree, record, options.count, options.seed)]
    else:
        rows = json.loads(Path(options.names[0]).read_text())["lines"]
    for name in SHARED:
        importlib.import_module(name)
    for number, row in enumerate(rows, 1):
        began, one = time.monotonic(), Break(row["file"], tuple(row["place"]), row["before"], row["after"])
        tests = [row["noticed_by"]] if "::" in row["noticed_by"] else tests_of(record, one, options.seconds)
        row["noticed_by"] = try_break(tree, one, tests, 120 + 10 * options.seconds)
        outcome = f"{one.file}:{one.place[0]}: {one.before!r} -> {one.after!r}: {row['noticed_by'] or 'NOT NOTICED'}"
        print(f"{number} {time.monotonic() - began:.0f} s, {len(tests)} tests, {outcome}", flush=True)
        (work / "broken.json").write_text(json.dumps({"lines": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
