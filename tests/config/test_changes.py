"""What was read of a file is kept until it changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from wan_core.config.changes import stamps, until_changed


def test_a_file_is_read_again_when_it_changed(tmp_path: Path) -> None:
    """And not before. What a read raises is not kept."""
    file, reads = tmp_path / "text", []

    @until_changed(2)
    def read(path: Path, more: int = 0) -> str:
        reads.append(more)
        return path.read_text()

    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            read(file)
    reads.clear()
    for second, text in enumerate(("one", "two")):
        file.write_text(text)
        os.utime(file, (second, second))
        assert [read(file), read(file), read(file, more=1)] == [text] * 3
    assert reads == [0, 1, 0, 1]


def test_a_folder_changes_with_the_models_in_it(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("x")
    before = stamps([tmp_path])
    (tmp_path / "model-00001-of-00001.safetensors").write_text("x")
    assert before == () and [name for name, *_ in stamps([tmp_path])] == [
        str(tmp_path / "model-00001-of-00001.safetensors")
    ]
