"""The suites of starting and streaming, on the embedded model: what they call the same is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest
import torch

from benchmarks import cold, startup
from benchmarks.process import host_peak, reset_host_peak
from benchmarks.ready import ready_rows
from benchmarks.startup import Loading, cold_rows, write_experts
from wan_core.cli import main
from wan_core.config import LoadOptions, OptionError
from wan_core.execution import optimize as optimizing
from wan_core.execution.compile_cache import OWN_CACHES
from wan_core.pipeline.sources import find_models

CPU = torch.device("cpu")


def test_streaming_rows(tmp_path):
    path = tmp_path / "streaming.json"
    arguments = [
        "--device",
        "cpu",
        "--suite",
        "streaming",
        "--size",
        "48x48x5",
        "--runs",
        "1",
        "--setting",
        "cards",
        "--setting",
        "switch",
    ]
    assert main(["bench", *arguments, "--out", str(path)]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    for precision in ("bf16", "fp8"):
        for blocks in (0, 3):
            row = rows[f"{precision}, {blocks} blocks"]
            assert row["identical"] and row["resident_blocks"] == blocks and row["slowdown"] > 0
        assert rows[f"{precision}, resident"]["resident_blocks"] == 6
        assert rows[f"{precision}, 0 blocks"]["planned_gib"] <= rows[f"{precision}, resident"]["planned_gib"]
        switches = [row for name, row in rows.items() if name.startswith(f"{precision}, switch")]
        assert len(switches) == 4 and all(row["switch_ms"] > 0 for row in switches)
    assert rows["fp8, 0 blocks"]["host_gib"] <= rows["bf16, 0 blocks"]["host_gib"]


def test_loading_rows(tmp_path):
    files = write_experts("tiny", tmp_path, CPU, None)
    rows = {row["name"]: row for row in Loading(files, CPU, torch.float32, 1).rows()}
    assert rows["ours, bf16"]["identical"] and rows["ours, fp8"]["identical"]
    assert all("failed" not in row for row in rows.values())
    assert rows["ours, bf16"]["ratio_to"] == "load_file" and rows["load_file"]["ratio"] == 1


def test_pipelines_that_take_turns_hold_memory_flat():
    """Text to video and image to video, two sizes, eight videos: no tensor stays behind. In a process of its own: what
    is counted are all tensors of a process, those of other tests among them."""
    code = """
import json, torch
from benchmarks.turns import turns_rows
torch.set_num_threads(1)
print(json.dumps(list(turns_rows("tiny", ["64x32x9"], torch.device("cpu"), None, 8))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert "failed" not in row and len(row["device_mib"]) == 8
    assert row["device_growth_mib"] < 0.05 and row["compilations"] == 0
    assert row["seconds"] > 0 and row["switch_ms"] > 0


def test_prompts_after_the_first():
    rows = {row["name"]: row for row in ready_rows("tiny", ["64x64x17"], CPU, None)}
    assert list(rows) == ["first prompt", "second prompt", "changed size", "back again"]
    assert all("failed" not in row and row["compilations"] == row["compiled_anew"] == 0 for row in rows.values())
    assert rows["changed size"]["size"] == "32x32x9" and all(row["seconds"] < 10 for row in rows.values())


@pytest.mark.slow
def test_a_cold_process(tmp_path):
    """One that keeps what it compiled, and one that finds it."""
    files = write_experts("tiny", tmp_path, CPU, None)
    first, second = (startup.cold(files, "48x48x5", CPU, tmp_path, []) for _ in range(2))
    assert "used again" in second["note"] and "first time" in first["note"]
    assert first["first_forward"] == {"graphs": 0, "compiled anew": 0}  # nothing was left to it
    assert second["first_forward"] == {"graphs": 1, "compiled anew": 0}  # all of it was found
    assert set(first["prepared"]) == {"import the compiler", "artifacts", "forward"}
    assert set(second["prepared"]) == {"import the compiler", "artifacts"}
    assert all(row["read"] > 0 and 0 < row["seconds"] < row["process_seconds"] for row in (first, second))


def test_a_cold_process_that_compiles_nothing_imports_no_compiler(tmp_path):
    files = write_experts("tiny", tmp_path, CPU, None)
    row = startup.cold(files, "48x48x5", CPU, tmp_path, ["--compile", "off"])
    assert row["prepared"] == {} and row["first_forward"] == {"graphs": 0, "compiled anew": 0} and row["note"] == ""


def test_a_cold_process_writes_a_profile(tmp_path, monkeypatch, capsys):
    """What the process runs, in this one: dynamo decides what is compiled, the compiler behind it is left out."""
    for name in ("WANCORE_CACHE", *OWN_CACHES):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(optimizing, "compile_blocks", partial(optimizing.compile_blocks, backend="eager"))
    torch.compiler.reset()
    files, profile = write_experts("tiny", tmp_path, CPU, None), tmp_path / "profile.txt"
    monkeypatch.setattr(sys, "argv", ["cold", "cpu", "48x48x5", *map(str, files), "--profile", str(profile)])
    cold.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["first_forward"]["graphs"] == 0 and "forward" in found["prepared"] and found["warm_forward"] > 0
    assert "cumulative" in profile.read_text()


def test_the_cold_processes_that_are_compared(tmp_path, monkeypatch):
    """Each with the arguments that its name says and with what the first one kept."""
    started, seconds = [], iter((12.0, 4.0, 6.0, 3.0, 5.0, 1.0, 2.0))

    def run(files, size, device, kept, more):
        started.append((kept.name, more))
        return {"seconds": next(seconds)}

    monkeypatch.setattr(startup, "cold", run)
    rows = list(cold_rows([tmp_path / "a"], "48x48x5", CPU, tmp_path, 2, tmp_path / "profile.txt"))
    off, profile = ["--compile", "off"], ["--profile", str(tmp_path / "profile.txt")]
    expected = [
        ("nothing kept", [("kept", [])], 1),
        ("artifacts kept", [("kept", [])] * 2, 2),
        ("not compiled, first time", [("kept", off)], 4),
        ("not compiled", [("kept", off)] * 2, 2.4),
        ("profiled", [("kept", profile)], None),
    ]
    assert [(row["name"].removeprefix("cold process, "), row.get("ratio")) for row in rows] == [
        (name, ratio) for name, _, ratio in expected
    ]
    assert started == [start for _, starts, _ in expected for start in starts]
    assert [row["all_seconds"] for row in rows if "all_seconds" in row] == [[4, 6], [1, 5]]


def test_a_cold_process_keeps_what_it_compiles_in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WANCORE_CACHE", str(tmp_path))
    for name in OWN_CACHES:
        monkeypatch.setenv(name, str(tmp_path / "elsewhere"))
    found = {}
    monkeypatch.setattr(
        startup.subprocess, "run", lambda *_, env, **__: found.update(env) or subprocess.CompletedProcess([], 0, "{}")
    )
    startup.child([], "48x48x5", CPU, tmp_path / "kept", [])
    assert found["WANCORE_CACHE"] == str(tmp_path / "kept") and not set(OWN_CACHES) & set(found)


def test_the_peak_of_host_memory_begins_anew():
    if not reset_host_peak():
        pytest.skip("this system does not let a process reset its peak")

    def rises() -> tuple[int, int]:
        """With 64 MiB held, and after they were given back and the peak begun anew."""
        before = reset_host_peak()
        held = torch.ones(64 << 20, dtype=torch.uint8)
        rise = host_peak() - before
        del held
        return rise, reset_host_peak() - before

    found = [rises() for _ in range(5)]  # a busy system may take other pages away meanwhile
    assert max(rise for rise, _ in found) > 50 << 20 and min(after for _, after in found) < 50 << 20
    assert host_peak() - reset_host_peak() < 50 << 20


def test_options_belong_to_their_suites(capsys):
    assert main(["bench", "--device", "cpu", "--suite", "streaming", "--scratch", "/tmp"]) == 2
    assert "--scratch means nothing" in capsys.readouterr().err
    assert main(["bench", "--device", "cpu", "--suite", "streaming", "--profile", "x.txt"]) == 2
    assert "--profile means nothing" in capsys.readouterr().err
    assert main(["bench", "--device", "cpu", "--suite", "streaming", "--setting", "vae"]) == 2
    assert "the suite streaming has cards, switch, turns" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["random:t2v-A14B:0", "random:t2v-A14B:41", "random:t2v-A14B:two"])
def test_random_models_have_as_many_blocks_as_there_are(model):
    assert find_models(LoadOptions(model="random:t2v-A14B:3")).dit.num_layers == 3
    with pytest.raises(OptionError, match="1 to 40 are possible"):
        find_models(LoadOptions(model=model))
