"""tools/figures.py: figures in the prose of README and docs are those of committed results."""

from __future__ import annotations

import json
from pathlib import Path

from tools.figures import LEFT, ROOT, faults

RESULT = {"rows": [{"name": "ours", "seconds": 9.2345, "psnr": 31.27, "peak_gib": 20.5}, {"seconds": 11.58}]}


def project(root: Path, text: str) -> list[str]:
    """The faults of a README with this text beside one result."""
    for folder in ("docs", "benchmarks/results"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "benchmarks" / "results" / "forward-h200-20261120.json").write_text(json.dumps(RESULT))
    (root / "benchmarks" / "results" / "other-h200-20261121.json").write_text('{"rows": [{"seconds": 44.0}]}')
    (root / "README.md").write_text(text)
    (root / "README.zh.md").write_text("")
    return list(faults(root))


def test_every_figure_of_readme_and_docs_is_in_a_result() -> None:
    unsupported_figures = list(faults(ROOT))
    assert not unsupported_figures, "\n".join(unsupported_figures)
    assert all((ROOT / page).is_file() for page in LEFT)


def test_figures_are_compared_as_they_are_rounded(tmp_path: Path) -> None:
    right = "It takes 9.2 s (9,235 ms) for 11.6 s, 1.25 times as fast, with 31.3 dB and 20.5 GiB; `7 s` is code."
    assert project(tmp_path, right) == []
    assert project(tmp_path, "An estimate is 1 s, by the plan 3 GiB: 4 s (read).\n\n| 3 s |\n") == []
    wrong = "Line.\n\nIt takes 9.3 s,\n12 and 13 s, 1.3 times as fast, with 31.2 dB and 9.2 GiB.\n"
    assert [fault.partition(" is")[0] for fault in project(tmp_path, wrong)] == [
        "README.md:3: 9.3 s",
        "README.md:4: 13 s",
        "README.md:4: 31.2 dB",
        "README.md:4: 9.2 GiB",
    ]


def test_a_paragraph_that_names_a_result_is_compared_with_that_alone(tmp_path: Path) -> None:
    text = "Of `forward-h200`: 44 s.\n\nOf any: 44 s.\n- Of `forward-h200-20261120.json` and `other-h200`: 44 s.\n"
    assert project(tmp_path, text) == ["README.md:1: 44 s is not in forward-h200-20261120"]
