"""Checksums in files that one run leaves for another, and what is on the disk when a file has its name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from random import Random

import pytest
import torch

from wan_core.checkpoint.save import save_latents
from wan_core.config import durable, outputs
from wan_core.config.durable import SEAL, UNSEALED, DamagedFile, check_seal, flush, seal
from wan_core.config.outputs import folder_beside, write_text


def sealed(path: Path, text: str) -> Path:
    path.write_text(text)
    seal(path)
    return path


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    """Also within the checksum. Where its name is changed, the file counts as one without, as those of before."""
    path = sealed(tmp_path / "x.json", f'{{"{SEAL}": "{UNSEALED}", "numbers": [1, 2, 3]}}\n')
    content = path.read_bytes()
    assert check_seal(path)
    name = range(1, content.index(b'"', content.index(b": ")) + 66)
    for at in range(len(content)):
        for bit in (0x01, 0x20, 0x80):
            path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
            with contextlib.suppress(DamagedFile):
                assert not check_seal(path) and at in name


@pytest.mark.parametrize("size", [1, 500, 20_000])
def test_what_is_cut_added_or_exchanged_is_found(tmp_path: Path, size: int) -> None:
    random = Random(size)
    path = tmp_path / "x.safetensors"
    save_latents(path, torch.randn(1, 16, 1, 1, size), 8, {SEAL: UNSEALED, "prompt": f'"{SEAL}": "{UNSEALED}"'})
    content = path.read_bytes()
    assert check_seal(path)
    for _ in range(20):
        one, other = sorted(random.sample(range(100 + 64, len(content)), 2))
        damaged = [
            content[:one],
            content + b"\0",
            content[:one] + bytes(other - one) + content[other:],
            content[:one] + content[other:] + content[one:other],
        ]
        for each in damaged:
            path.write_bytes(each)
            if each != content:
                with pytest.raises(DamagedFile, match="does not fit its checksum"):
                    check_seal(path)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file, then its name, then the folder: a power failure between two of them leaves nothing half written."""
    done: list[tuple[str, str]] = []
    replace = os.replace

    def replaced(old: Path, new: Path) -> None:
        done.append(("name", new.name))
        replace(old, new)

    monkeypatch.setattr(outputs, "flush", lambda path: done.append(("disk", path.suffix or path.name)))
    monkeypatch.setattr(os, "replace", replaced)
    write_text(tmp_path / "x.json", "{}")
    assert done == [("disk", ".part"), ("name", "x.json"), ("disk", tmp_path.name)]
    done.clear()
    with folder_beside(tmp_path / "pictures") as folder:
        (folder / "00001.png").touch()
    assert done == [("disk", ".png"), ("disk", ".part"), ("name", "pictures"), ("disk", tmp_path.name)]


def test_what_the_disk_does_not_take_has_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int) -> None:
        raise OSError(durable.errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        write_text(tmp_path / "x.json", "{}")
    assert not list(tmp_path.iterdir())
    flush(tmp_path)  # a folder's names are as good as they can be
