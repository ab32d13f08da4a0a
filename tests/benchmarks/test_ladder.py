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
from benchmarks.ladder import Ladder, in_order, main, running, wait
from benchmarks.ladder_jobs import FILES, JOBS, NEEDS, Job, missing, on_a_cpu
from benchmarks.options import SUITES
from benchmarks.run import check_options
from wan_core.cli import parse

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


def test_names_are_unique_and_all_that_is_needed_is_known() -> None:
    assert len({job.name for job in JOBS}) == len(JOBS)
    for one in JOBS:
        assert one.files in FILES and set(one.needs) <= NEEDS.keys() and 1 <= one.gpus <= 8
        assert not any(one.name != other.name and other.name.startswith(f"{one.name}-h") for other in JOBS)


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

    several = everyday.several_sides(gpus, torch.device("cuda"), guided=True)
    sides = (*everyday.SIDES, *everyday.OFF_SIDES, *everyday.ACCELERATED, *several, *official.SIDES)
    return {side.name for side in sides}


def test_a_command_is_small_on_a_cpu() -> None:
    arguments = shlex.split("-m benchmarks videos --model random:t2v-A14B --size 1x1 --size 2x2 --runs 3 --gpus 4")
    small = shlex.split("-m benchmarks videos --model tiny --size 64x64x5 --runs 1 --gpus 2 --device cpu")
    assert on_a_cpu(arguments) == small
    cards = [word for n in (8, 9) for word in ("--setting", f"{n}: --x --memory-limit 8 --host-memory-limit {n}")]
    settings = on_a_cpu([*arguments, "--setting", "a: --mesh 2x1x2", *cards])[11:-2]
    assert settings == ["--setting", "a: --mesh 2x1x1", "--setting", "8: --x --host-memory-limit 8"]


def test_what_needs_the_most_gpus_that_are_there_comes_first() -> None:
    assert [one.gpus for one in in_order(4)] == sorted((one.gpus for one in JOBS), reverse=True)
    assert in_order(1) == [one for one in JOBS if one.gpus == 1] + [one for one in JOBS if one.gpus > 1]
    two = in_order(2)
    assert [one.gpus for one in two if one.gpus <= 2] == sorted((j.gpus for j in JOBS if j.gpus <= 2), reverse=True)
    assert missing(job("x", gpus=4), 2, cpu=False) == "needs 4 GPUs" and missing(job("x", gpus=4), 0, cpu=True) is None


def test_a_list_says_what_is_done_and_counts_the_rest(tmp_path: Path) -> None:
    jobs = [job("a"), job("b", gpus=4), job("c", files="i2v", seconds=7), job("d", files="i2v", seconds=9)]
    ladder = Ladder(tmp_path, tmp_path, 1)
    ladder.run(jobs[:1], None)
    lines = list(ladder.listed(jobs))
    assert lines[1].endswith("[done]") and lines[2].endswith("[needs 4 GPUs]")
    assert lines[-1].startswith(f"4 jobs, {7 + 9 + FILES['i2v']} s")


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


def test_a_job_that_was_asked_for_and_did_not_run_is_a_failure(tmp_path: Path) -> None:
    many = job("many", gpus=4)
    ladder = Ladder(tmp_path, tmp_path, 1)
    assert ladder.run([many], None) == 0 and ladder.run([many], None, asked=True) == 1
    same = [job("a"), job("b")]
    assert Ladder(tmp_path, tmp_path, 0, cpu=True).why_not(same[1], same) == "on a CPU the same as a"
    assert Ladder(tmp_path, tmp_path, 0, cpu=True).why_not(same[1], same[1:]) is None


def test_a_ladder_that_is_detached_outlives_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    words = ["--out", str(out), "--scratch", str(tmp_path), "--gpus", "0", "--minutes", "0.001"]
    assert wait(out, 0) == 0  # there is none
    assert main(["--detach", *words]) == 0
    started = wait(out, 0)
    again = main(["--detach", *words])
    assert (started, again) == (75, 1) or running(out) is None
    assert main(["--wait", "60", "--out", str(out)]) == 0 and running(out) is None
    assert f"{JOBS[0].name}: not run: needs 1 GPU" in capsys.readouterr().out


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


def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["--only", "none"], "no job 'none'"), ([], "give --out")):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err
    assert main(["--dry-run", "--gpus", "1"]) == 0
    assert f"{len(JOBS)} jobs" in capsys.readouterr().out
