"""A sample of the hostile files, and that `tools/fuzz.py` finds each kind of fault."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests import forked
from tools import fuzz
from tools.hostile.readers import READERS, Reader

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("readers", "cases"), [(tuple(READERS)[:4], 60), (tuple(READERS)[4:], 20)])
def test_a_sample_has_no_fault(readers: tuple[str, ...], cases: int) -> None:
    """The costly first ones are left to the whole run, and to the tests of the limits."""
    command = [sys.executable, "-m", "tools.fuzz", "--first", "30", "--cases", str(cases), "--seed", "7"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run([*command, "--only", *readers], cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| all | {cases * len(readers)} |" in done.stdout and len(READERS) == 10


def _grab() -> bytes:
    return bytearray(2**34)  # pyright: ignore


FAULTS = {
    "crash": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "traceback": lambda _: {}["raw"],
    "over memory": lambda _: _grab(),
    "over time": lambda _: [time.process_time() for _ in iter(int, 1)],
}


def read_once(reader: Reader, folder: Path) -> None:
    for number in range(len(reader.bombs), len(reader.bombs) + 10):
        path = folder / f"{number}-{reader.name}"
        path.write_bytes(reader.case(number, seed=0))
        fuzz.outcome_of(reader, path)


def test_each_fault_is_found_and_the_next_case_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reader = READERS["LoRA"]
    faults = {what.encode(): fault for what, fault in FAULTS.items()}
    faulty = replace(reader, read=lambda path: faults.get(path.read_bytes(), reader.read)(path))
    faulty = replace(faulty, bombs=tuple(lambda what=what: what for what in faults))
    monkeypatch.setitem(fuzz.READERS, "LoRA", faulty)
    monkeypatch.setattr(fuzz, "SECONDS", 1.0)
    monkeypatch.setattr(fuzz, "warm_up", lambda _: None)  # which keeps this whole process from being collected
    read_once(reader, tmp_path)  # what a first reading imports would count against the limit
    outcomes = list(fuzz.run("LoRA", range(6), seed=0))
    assert [outcome.number for outcome in outcomes] == list(range(6))
    assert [outcome.what for outcome in outcomes[:4]] == list(FAULTS), outcomes
    assert not any(outcome.is_fault for outcome in outcomes[4:]) and "| LoRA | 6 |" in fuzz.table(outcomes)
