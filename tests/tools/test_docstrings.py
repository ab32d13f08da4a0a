"""tools/docstrings.py: which docstrings it refuses, and that the code has none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docstrings import main

SOURCE = '''"""Speech."""

class Models:
    """Of a task."""

    def speech(self):
        """Likewise, of sound."""
        async def heard():
            """As `speech`."""

    def offset(self):
        """Offset of the first frame, as in `speech`."""

    def plain(self):
        return "Of nothing"
'''


def test_a_fragment_is_refused_with_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.py"
    file.write_text(SOURCE)
    assert main([str(file)]) == 1
    *refused, advice = capsys.readouterr().out.splitlines()
    assert sorted(refused) == [
        f"{file}:4: Of a task.",
        f"{file}:7: Likewise, of sound.",
        f"{file}:9: As `speech`.",
    ]
    assert "names its subject" in advice


def test_the_code_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert (main([]), capsys.readouterr().out) == (0, "")
