"""`tools.judges`: rows of two batches of clips, with FP8's own rounding beside the words; measured again, replaced."""

import json
from dataclasses import replace

from tools import judges


def test_a_judge_joins_its_batches_and_replaces_its_rows(tmp_path, monkeypatch):
    out, judge = tmp_path / "judged.json", judges.JUDGES["embedded, text"]
    monkeypatch.setitem(judges.JUDGES, judge.name, replace(judge, size=(32, 32), frames=5))
    words = ["judges", "--judge", "embedded, text", "--steps", "2", "--batch", "1", "--rounded", "--out", str(out)]
    for count in ("2", "1"):
        monkeypatch.setattr("sys.argv", [*words, "--precision", "fp8", "--attention", "sdpa", "--count", count])
        assert judges.main() == 0
        rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
        assert list(rows) == [f"embedded, text: {word}" for word in ("full", "bf16", "careful", "balanced", "fast")]
        assert all(row["samples"] == int(count) and row["precision"] == "fp8" for row in rows.values())
        forwards = {name.split(": ")[1]: row["forwards"] for name, row in rows.items()}
        assert forwards["careful"] == forwards["full"]  # in two steps no cache
        psnr = {name.split(": ")[1]: row.get("psnr") for name, row in rows.items()}
        assert psnr["fast"] < 99 == psnr["careful"] and 15 < psnr["bf16"] < 99


def test_the_judge_of_four_steps_runs_with_the_embedded_loras(tmp_path, monkeypatch):
    out = tmp_path / "judged.json"
    words = ["--judge", "embedded, text, four steps", "--count", "1", "--setting", "speed:fast"]
    monkeypatch.setattr("sys.argv", ["judges", *words, "--out", str(out)])
    assert judges.main() == 0
    full, fast = json.loads(out.read_text())["rows"]
    assert full["steps"] == 4 and full["forwards"] == 4 and full["truth"] == 1  # unguided, and what the caption says
    assert 20 < fast["psnr"] < 99
