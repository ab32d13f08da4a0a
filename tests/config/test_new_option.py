"""A new option of a run is declared once: command line, lists, plans, workers, widgets and reports have it then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_an_option_of_a_run_is_everywhere_once_it_is_declared(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.config.new_option", str(tmp_path)]
    found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    assert found == {
        "request": 0.25,
        "its JSON": True,
        "plan": 0.25,
        "its JSON for workers": True,
        "plan --json": 0.25,
        "table of the plan": True,
        "report and video": 0.25,
        "list": [0.5, 0.0],
        "keys": 2,
        "default": False,
        "last widgets": ["grain", "grain"],
        "entered": [0.25, 0.0],
        "beyond its range": "grain 2 given; allowed are 0 to 1",
        "key without it": True,
    }
