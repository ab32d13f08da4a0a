"""`tools.judges`: rows of two batches of clips, with FP8's own rounding beside the words; measured again, replaced."""

import json

import pytest

from tools import judges


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_a_judge_joins_its_batches_and_replaces_its_rows(tmp_path, monkeypatch, precision):
    out = tmp_path / "judged.json"
    words = ["judges", "--judge", "embedded, text", "--steps", "2", "--batch", "1", "--rounded", "--out", str(out)]
    for count in ("2", "1"):
        monkeypatch.setattr("sys.argv", [*words, "--precision", precision, "--attention", "sdpa", "--count", count])
        assert judges.main() == 0
        rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
        assert list(rows) == [f"embedded, text: {word}" for word in ("bf16", "full", "careful", "balanced", "fast")]
        assert all(row["samples"] == int(count) and row["precision"] == precision for row in rows.values())
        forwards = {name.split(": ")[1]: row["forwards"] for name, row in rows.items()}
        assert forwards["careful"] == forwards["full"]  # in two steps no cache
        psnr = {name.split(": ")[1]: row.get("psnr") for name, row in rows.items()}
        assert psnr["fast"] < 99 == psnr["careful"] and 15 < psnr["bf16"] < 99
