"""The ladder: its jobs, what fits into the time, and how it goes on after a failure, a kill, on another machine."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.__main__ import build_parser
from benchmarks.ladder import Ladder
from benchmarks.ladder_jobs import JOBS, Job
from benchmarks.options import SUITES
from benchmarks.run import check_options
from wan_core.cli import parse
from wan_core.config import OptionError

# A suite's file as the suite itself writes it, by a program that starts in no time.
WRITES = """
import json, sys
rows = [{"name": "one", "size": "", "seconds": 1.0}, *json.loads(sys.argv[2])]
result = {"suite": "x", "command": "c", "commit": None, "device": "NVIDIA H200", "versions": {}, "rows": rows}
open(sys.argv[1], "w").write(json.dumps(result))
sys.exit(int(sys.argv[3]))
"""


def job(name: str, program: str = WRITES, rows: object = (), code: int = 0, **more: object) -> Job:
    command = shlex.join(["-S", "-c", program, "{out}", json.dumps(rows), str(code)])
    return Job(**{"name": name, "table": "a table", "command": command, "seconds": 5, **more})  # type: ignore[arg-type]


def results(out: Path) -> dict[str, dict]:
    return {path.stem.rsplit("-", 2)[0]: json.loads(path.read_text()) for path in sorted(out.glob("*.json"))}


def test_a_setting_that_the_suite_lacks_is_refused() -> None:
    with pytest.raises(OptionError, match="the suite everyday has on, fresh, t2v, off, cold"):
        check_options(build_parser().parse_args(["everyday", "--setting", "tiles"]))


@pytest.mark.parametrize("cpu", [False, True])
@pytest.mark.parametrize("one", JOBS, ids=lambda one: one.name)
def test_every_command_is_one_that_its_suite_takes(one: Job, cpu: bool, tmp_path: Path) -> None:
    """Options, settings and names of setups, as the suite checks them before any work."""
    arguments = one.words(tmp_path, tmp_path / "result.json", cpu=cpu)
    assert arguments[:2] == ["-m", "benchmarks"] and arguments[2] in SUITES
    options = build_parser().parse_args(arguments[2:])
    check_options(options)
    assert options.out == tmp_path / "result.json"
    if options.suite == "videos":
        for setting in options.setting:
            parse(["generate", "--prompt", "x", *shlex.split(setting.partition(":")[2])])
    if options.suite in ("everyday", "templates"):
        names = side_names(min(one.gpus, 2) if cpu else one.gpus)
        assert set(options.setup) <= names, set(options.setup) - names


def side_names(gpus: int) -> set[str]:
    import torch

    from benchmarks import everyday, official

    return {side.name for side in everyday.sides_for(gpus, torch.device("cuda"))} | {*official.SIDES}


def test_jobs_that_fit_run_and_each_result_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ladder = Ladder(tmp_path / "out", tmp_path / "scratch", 1)
    jobs = [job("long", seconds=3600), job("first"), job("second")]
    assert ladder.run(jobs, 1) == 0
    assert "long: not run: takes 3600 s" in capsys.readouterr().out
    by_job = results(tmp_path / "out")
    assert list(by_job) == ["first", "second"]
    assert by_job["first"]["job"] == "first" and by_job["first"]["rows"][0]["seconds"] == 1.0
    assert Ladder(tmp_path / "out", tmp_path, 1).run(jobs, 1) == 0  # as on another machine, with the folder
    assert "first: not run: done" in capsys.readouterr().out


def test_a_job_that_fails_is_noted_and_the_next_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = job("bad", "raise SystemExit('there is no kernel')")
    half = job("half", rows=[{"name": "two", "size": "", "failed": "no memory"}], code=1)
    ladder = Ladder(tmp_path, tmp_path, 1)
    assert ladder.run([bad, half, job("good")], None) == 1
    said = capsys.readouterr().out
    assert (
        "bad: failed: exit code 1: there is no kernel" in said and "half: done, 1 rows failed: two: no memory" in said
    )
    assert list(results(tmp_path)) == ["good", "half"]
    assert ladder.run([bad], None) == 0 and "bad: not run: failed" in capsys.readouterr().out
    ladder.again = True
    assert ladder.run([job("bad")], None) == 0 and "bad" in results(tmp_path)
    assert not (tmp_path / "unfinished" / "bad.failed").exists()


def test_a_job_that_takes_too_long_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    ladder = Ladder(tmp_path, tmp_path, 1)
    (tmp_path / "unfinished").mkdir()
    endless = job("endless", sleeping(tmp_path))
    assert ladder.one(endless, limit=3, left=100).startswith("failed: took longer than 3 s")
    assert gone(int((tmp_path / "child").read_text()))
    assert ladder.one(endless, limit=100, left=3) == "stopped: the time is over"
    assert ladder.why_not(endless, [endless]) is None  # it is tried again


def test_it_goes_on_after_a_kill(tmp_path: Path) -> None:
    """The killed ladder leaves no process behind, and the next one finishes the job."""
    program = f"""
from pathlib import Path
from benchmarks.ladder import Ladder
from tests.benchmarks.test_ladder import job, sleeping
out = Path({str(tmp_path)!r})
Ladder(out, out, 1).run([job("a"), job("b", sleeping(out)), job("c")], None)
"""
    ladder = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[2], start_new_session=True)
    child = tmp_path / "child"
    deadline = time.monotonic() + 60
    while not (child.is_file() and child.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    ladder.send_signal(signal.SIGKILL)
    ladder.wait()
    assert gone(int(child.read_text()))
    assert list(results(tmp_path)) == ["a"]
    assert Ladder(tmp_path, tmp_path, 1).run([job("a"), job("b"), job("c")], None) == 0
    assert list(results(tmp_path)) == ["a", "b", "c"]


def sleeping(folder: Path) -> str:
    """A program that starts a server of its own and waits for it."""
    return f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
open({str(folder / "child")!r}, "w").write(str(child.pid))
child.wait()
"""


def gone(pid: int) -> bool:
    """Whether the process ends within ten seconds; one that nobody waited for counts as ended."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    return False
