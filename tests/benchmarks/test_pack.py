"""What is packed for a machine without a registry: ComfyUI's sources, and which wheels are asked for."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

from benchmarks.pack import name_of, needs, pack_sources, requirements


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
    archive = pack_sources(checkout(tmp_path / "comfy"), tmp_path / "comfyui.tar.xz")
    with tarfile.open(archive) as tar:
        names = {name.removeprefix("ComfyUI/") for name in tar.getnames() if tar.getmember(name).isfile()}
    assert names == {
        "main.py", "comfy/ldm/models/autoencoder.py", "comfy_api/input/basic.py", "custom_nodes/x.py", "app/user.py",
        "requirements.txt",
    }  # fmt: skip
    assert requirements(tmp_path / "comfy") == ("aiohttp>=3", "comfy-kitchen==0.2.31")


def test_a_wheel_needs_what_the_machine_has_not(tmp_path: Path) -> None:
    wheel = tmp_path / "some_thing-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(
            "some_thing-1.0.dist-info/METADATA",
            """Name: some-thing
Requires-Dist: attrs>=2
Requires-Dist: torch>=2
Requires-Dist: pywin32; sys_platform == "win32"
Requires-Dist: pytest; extra == "test"
""",
        )
    assert needs(wheel, "3.12") == ["attrs>=2"]
    assert name_of(wheel.name) == "some-thing" == name_of("some_thing[x]>=1") and name_of("av") == "av"
