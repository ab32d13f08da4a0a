"""Torch archives under the name of another format, and archives whose members are not as torch.save writes them."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import pytest
import torch

from tools.hostile.checkpoints import base_pickle, weights
from wan_core.checkpoint import CheckpointError, open_checkpoint
from wan_core.cli.inspect import inspect


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth", "model.SAFETENSORS", "model"])
def test_an_archive_is_read_whatever_its_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(base_pickle("vae 2.1"))
    opened = open_checkpoint(tmp_path / name)
    assert opened.tensors.keys() == weights("vae 2.1").keys()
    assert all(torch.equal(opened.read(key), value) for key, value in weights("vae 2.1").items())
    assert not inspect(tmp_path / name)["problems"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
def test_compressed_members_are_refused(name: str, tmp_path: Path) -> None:
    """Mapped, the bytes of a compressed member would be taken for values; unpacked, they may be any number."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(base_pickle("dit"))) as old, zipfile.ZipFile(file, "w") as new:
        for member in old.infolist():
            how = zipfile.ZIP_STORED if member.filename.endswith("data.pkl") else zipfile.ZIP_DEFLATED
            new.writestr(member.filename, old.read(member), how)
    (tmp_path / name).write_bytes(file.getvalue())
    with pytest.raises(CheckpointError, match="compressed members"):
        open_checkpoint(tmp_path / name)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pth"])
@pytest.mark.parametrize("what", ["the name of its pickle", "its end", "sizes"])
def test_a_wrong_header_inside_is_an_error_of_one_line(what: str, name: str, tmp_path: Path) -> None:
    content = base_pickle("dit")
    if what == "the name of its pickle":  # in the member's own header, which torch and zipfile compare with the list
        at = content.index(b"data.pkl")
        content = content[:at] + b"\xff" + content[at + 1 :]
    elif what == "its end":
        content = content[:-30]
    else:
        listed, sizes = content.index(b"PK\x01\x02"), struct.pack("<II", 2**31, 2**31)
        content = content[: listed + 20] + sizes + content[listed + 28 :]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"archive.*Download it again|unpack it first") as refused:
        open_checkpoint(tmp_path / name)
    assert str(refused.value).isprintable()
    assert inspect(tmp_path / name)["problems"] == [str(refused.value)]
