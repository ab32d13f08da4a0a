"""What is packed for a machine without a registry: ComfyUI's sources, wheels by name, parts that come one by one."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import pack
from benchmarks.fatbin import blank_other_gpus
from benchmarks.pack import GROUPS, HAD, IMPORTS, LEFT_OUT, UNUSED, name_of, needs, skipped


def checkout(root: Path) -> Path:
    copied = (
        "main.py",
        "comfy/ldm/models/autoencoder.py",
        "comfy_api/input/basic.py",
        "custom_nodes/x.py",
        "app/user.py",
    )
    skipped = (
        "models/a.safetensors",
        "comfy_api_nodes/n.py",
        "tests-unit/t.py",
        ".git/HEAD",
        "comfy/__pycache__/m.pyc",
    )
    for name in (*copied, *skipped, "output/o.mp4"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "requirements.txt").write_text(
        "comfyui-frontend-package==1.0\ntorch\nnumpy>=1.25\naiohttp>=3  # web\n\n#more\ncomfy-kitchen==0.2.31\n"
    )
    return root


def test_sources_are_those_that_a_server_imports(tmp_path: Path) -> None:
    root = checkout(tmp_path / "comfy")
    shutil.copytree(root, tmp_path / "packed", ignore=lambda folder, inside: skipped(root, folder, inside))
    names = {str(path.relative_to(tmp_path / "packed")) for path in (tmp_path / "packed").rglob("*") if path.is_file()}
    assert names == {
        "main.py", "comfy/ldm/models/autoencoder.py", "comfy_api/input/basic.py", "custom_nodes/x.py", "app/user.py",
        "requirements.txt",
    }  # fmt: skip


def test_each_project_has_one_version_in_one_group() -> None:
    pins = [pin for group in GROUPS.values() for pin in group]
    names = [name_of(pin) for pin in pins]
    assert len(set(names)) == len(names) and all(pin.count("==") == 1 for pin in pins)
    assert not set(names) & (HAD | UNUSED | LEFT_OUT) and IMPORTS.keys() == GROUPS.keys()
    assert all(pin == f"{name_of(pin)}=={pin.partition('==')[2]}" for pin in pins)


def wheel(path: Path, requires: Sequence[str] = (), **files: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        name, version = path.name.split("-")[:2]
        lines = [f"Name: {name}", *(f"Requires-Dist: {one}" for one in requires)]
        file.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")
        for inside, content in files.items():
            file.writestr(inside.replace("__", "/") + ".py", content)
    return path


def test_a_wheel_needs_what_the_machine_has_not(tmp_path: Path) -> None:
    more = ('pywin32; sys_platform == "win32"', 'pytest; extra == "test"', "torch>=2")
    made = wheel(tmp_path / "some_thing-1.0-py3-none-any.whl", ("attrs>=2", *more))
    assert needs(made) == ["attrs", "torch"]
    assert name_of(made.name) == "some-thing" == name_of("some_thing[x]>=1") and name_of("av") == "av"


def test_parts_that_come_one_after_the_other_are_unpacked_once_all_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: wheels that were downloaded, parts, two deliveries, an interpreter that imports."""
    monkeypatch.setattr(pack, "GROUPS", {"base": ("some-thing==1.0",)})
    monkeypatch.setattr(pack, "IMPORTS", {"base": ("some_thing", "some_thing.inside")})
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    content = b"blob = " + repr(random.Random(0).randbytes(40_000)).encode()
    wheel(wheels / "some_thing-1.0-py3-none-any.whl", some_thing____init__=b"", some_thing__inside=content)
    words = ["--out", str(out), "--wheels", str(wheels), "--part", "0.02", "--test", sys.executable]
    assert pack.main(words) == 0
    parts = sorted(out.glob("base.tar.xz.*"))
    assert len(parts) > 1 and max(part.stat().st_size for part in parts) <= 20_000
    first, second, base = tmp_path / "first", tmp_path / "second", tmp_path / "base"
    for folder, some in ((first, parts[:1]), (second, parts[1:])):
        folder.mkdir()
        for path in (*some, out / "unpack.sh"):
            (folder / path.name).write_bytes(path.read_bytes())
        script = folder / "unpack.sh"
        script.write_text(script.read_text().replace("/tmp/wancore", str(base)))
    said = [
        subprocess.run(
            ["bash", "-c", f"source {folder}/unpack.sh base; echo $PYTHONPATH"], capture_output=True, text=True
        )
        for folder in (first, second)
    ]
    assert "base waits for parts: 1 of" in said[0].stdout and "waits" not in said[1].stdout
    assert (base / "site" / "some_thing" / "inside.py").read_bytes() == content
    assert said[1].stdout.startswith(f"{base}/site:")
    monkeypatch.setattr(pack, "IMPORTS", {"base": ("some_thing.missing",)})
    assert pack.main(words) == 1


def test_device_code_for_other_gpus_is_blanked(tmp_path: Path) -> None:
    """An ELF file with one section of three entries: machine code for 80 and 90, and PTX for 90."""

    def entry(kind: int, arch: int, payload: bytes) -> bytes:
        return (
            struct.pack("<HHIQ", kind, 0, 64, len(payload)).ljust(28, b"\0")
            + struct.pack("<I", arch)
            + bytes(32)
            + payload
        )

    payloads = [b"a" * 64, b"b" * 64, b"c" * 64]
    body = b"".join(entry(*one) for one in ((2, 80, payloads[0]), (2, 90, payloads[1]), (1, 90, payloads[2])))
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    names = b"\0.nv_fatbin\0.shstrtab\0"
    header = bytearray(64)
    header[:4] = b"\x7fELF"
    table = 64 + len(fatbin) + len(names)
    struct.pack_into("<Q", header, 0x28, table)
    struct.pack_into("<HHH", header, 0x3A, 64, 2, 1)
    section = lambda name, at, size: struct.pack("<IIQQQQ", name, 0, 0, 0, at, size).ljust(64, b"\0")  # noqa: E731
    whole = bytes(header) + fatbin + names + section(1, 64, len(fatbin)) + section(12, 64 + len(fatbin), len(names))
    path = tmp_path / "lib.so"
    path.write_bytes(whole)
    blank_other_gpus(path, 90)
    left = path.read_bytes()
    assert len(left) == len(whole) and payloads[1] in left and payloads[0] not in left and payloads[2] not in left
    path.write_bytes(b"no library")
    blank_other_gpus(path, 90)
    assert path.read_bytes() == b"no library"
