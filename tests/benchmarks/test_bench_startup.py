"""The suites of starting and streaming, on the embedded model: what they call the same is the same."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import startup
from benchmarks.__main__ import main as bench_main
from benchmarks.loading import Loading
from benchmarks.measure import host_peak, reset_host_peak
from benchmarks.startup import cold_rows, write_experts
from wan_core.config import LoadOptions, OptionError
from wan_core.pipeline.sources import find_models

CPU = torch.device("cpu")


def test_streaming_rows(tmp_path):
    path = tmp_path / "streaming.json"
    arguments = ["streaming", "--device", "cpu", "--size", "48x48x5", "--runs", "1"]
    assert bench_main([*arguments, "--out", str(path)]) == 0
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    for precision in ("bf16", "fp8"):
        for blocks in (0, 4):
            row = rows[f"{precision}, {blocks} blocks"]
            assert row["identical"] and row["resident_blocks"] == blocks and row["slowdown"] > 0
        assert rows[f"{precision}, resident"]["resident_blocks"] == 8
        assert rows[f"{precision}, 0 blocks"]["planned_gib"] <= rows[f"{precision}, resident"]["planned_gib"]
    assert rows["fp8, 0 blocks"]["host_gib"] <= rows["bf16, 0 blocks"]["host_gib"]


def test_loading_rows(tmp_path):
    files = write_experts("tiny", tmp_path, CPU, None)
    rows = {row["name"]: row for row in Loading(files, CPU, torch.float32, 1).rows()}
    assert all("failed" not in row for row in rows.values())
    assert rows["ours, bf16"]["ratio_to"] == "load_file" and rows["load_file"]["ratio"] == 1


def test_a_cold_process(tmp_path):
    """A real process: its phases, and a second forward."""
    row = startup.cold(write_experts("tiny", tmp_path, CPU, None), "48x48x5", CPU, tmp_path)
    assert list(row["phases"])[-3:] == ["load both experts", "attention's library", "first forward"]
    assert 0 < row["warm_forward"] < row["seconds"] < row["process_seconds"]


def test_the_cold_processes_that_are_compared(tmp_path, monkeypatch):
    """One with empty caches, then as many as were asked for in the folder that it filled."""
    started, seconds = [], iter((12.0, 4.0, 6.0))

    def run(files, size, device, storage):
        started.append(storage.name)
        return {"seconds": next(seconds)}

    monkeypatch.setattr(startup, "cold", run)
    rows = list(cold_rows([tmp_path / "a"], "48x48x5", CPU, tmp_path, 2))
    assert [(row["name"].removeprefix("cold process, "), row.get("ratio")) for row in rows] == [
        ("nothing kept", 1),
        ("kernels kept", 2),
    ]
    assert started == ["kept"] * 3
    assert [row["all_seconds"] for row in rows if "all_seconds" in row] == [[4, 6]]


def test_the_peak_of_host_memory_begins_anew():
    if not reset_host_peak():
        pytest.skip("this system does not let a process reset its peak")

    def rises() -> tuple[int, int]:
        """With 64 MiB held, and after they were given back and the peak begun anew."""
        before = reset_host_peak()
        memory = torch.ones(64 << 20, dtype=torch.uint8)
        rise = host_peak() - before
        del memory
        return rise, reset_host_peak() - before

    measured = [rises() for _ in range(5)]  # a busy system may take other pages away meanwhile
    assert max(rise for rise, _ in measured) > 50 << 20 and min(after for _, after in measured) < 50 << 20
    assert host_peak() - reset_host_peak() < 50 << 20


def test_options_belong_to_their_suites(capsys):
    assert bench_main(["--device", "cpu", "--suite", "streaming", "--scratch", "/tmp"]) == 2
    assert "--scratch means nothing" in capsys.readouterr().err
    assert bench_main(["--device", "cpu", "--suite", "streaming", "--setting", "vae"]) == 2
    assert "the suite streaming has bf16, fp8" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["random:t2v-A14B:0", "random:t2v-A14B:41", "random:t2v-A14B:two"])
def test_random_models_have_as_many_blocks_as_there_are(model):
    assert find_models(LoadOptions(model="random:t2v-A14B:3")).dit.num_layers == 3
    with pytest.raises(OptionError, match="1 to 40 are possible"):
        find_models(LoadOptions(model=model))
