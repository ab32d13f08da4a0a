"""Torch archives under the name of another format, and archives whose members are not as torch.save writes them."""

from __future__ import annotations

import io
import shutil
import struct
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.hostile.checkpoints import base_pickle, weights
from wan_core.checkpoint import CheckpointError, find_parts, open_checkpoint
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


WRAPPERS = ("", "model.", "_orig_mod.", "model._fsdp_wrapped_module.")
KEYS = ("state_dict", "model", "module", "generator_ema", "generator", "ema", "anything")
OUTER = ({}, {"step": 3}, {"args": {}, "step": 3}, {"critic": {"head": torch.zeros(1)}})


@settings(max_examples=15, deadline=None)
@given(
    levels=st.lists(st.sampled_from(KEYS), max_size=3), outer=st.sampled_from(OUTER), wrapper=st.sampled_from(WRAPPERS)
)
def test_the_tensors_of_a_model_are_found_in_dicts(levels: list[str], outer: dict[str, Any], wrapper: str) -> None:
    """Whatever the names of the dicts, where it is clear which dict is meant; never a wrong one."""
    own = {f"{wrapper}{name}": value for name, value in weights("vae 2.1").items()}
    content = own
    for key in levels:
        content = {key: content}
    content = {**outer, **content} if levels else content
    file = io.BytesIO()
    torch.save(content, file)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.pt")
        path.write_bytes(file.getvalue())
        several = sum(isinstance(value, dict) for value in content.values()) > 1
        if several and levels and levels[-1] not in KEYS[:5]:
            with pytest.raises(CheckpointError, match="it holds several dicts"):
                open_checkpoint(path)
            return
        assert open_checkpoint(path).tensors.keys() == own.keys()
        assert not inspect(path)["problems"]


def test_the_folder_of_a_repository_in_a_cache_is_its_snapshot(tmp_path: Path) -> None:
    root, old, new = tmp_path / "models--Wan-AI--Wan2.2", "0" * 40, "1" * 40
    for name, content in ((old, b"older"), (new, base_pickle("vae 2.1"))):
        (root / "snapshots" / name).mkdir(parents=True)
        (root / "blobs").mkdir(exist_ok=True)
        (root / "blobs" / name).write_bytes(content)
        (root / "snapshots" / name / "Wan2.1_VAE.pth").symlink_to(root / "blobs" / name)
    with pytest.raises(CheckpointError, match=f"2 snapshots, and no refs/main that names one .*{old}"):
        find_parts(root)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(new)
    assert find_parts(root) == {"vae": root / "snapshots" / new / "Wan2.1_VAE.pth"}
    assert open_checkpoint(root).tensors.keys() == weights("vae 2.1").keys() and not inspect(root)["problems"]
    for wrong in ("../" + new, "", "x" * 300):  # it is a claim of a file
        (root / "refs" / "main").write_text(wrong)
        with pytest.raises(CheckpointError, match="2 snapshots"):
            open_checkpoint(root)
    (root / "refs" / "main").unlink()
    shutil.rmtree(root / "snapshots" / old)
    assert find_parts(root) == {"vae": root / "snapshots" / new / "Wan2.1_VAE.pth"}
    shutil.rmtree(root / "snapshots" / new)
    with pytest.raises(CheckpointError, match="no snapshot: download it again"):
        open_checkpoint(root)
