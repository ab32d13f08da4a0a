"""What the package says about itself, what installing it may not do, and what reporters of bugs read."""

from __future__ import annotations

import re
from pathlib import Path

import tomllib

import wan_core
from wan_core.cli import main

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def names(requirements: str) -> list[str]:
    """The normalised package names of a requirements file."""
    lines = (line.split("#")[0].strip() for line in requirements.splitlines())
    return [re.split(r"[\[<>=!~; ]", line)[0].lower().replace("_", "-") for line in lines if line]


def test_one_version() -> None:
    assert PROJECT["project"]["version"] == wan_core.__version__
    assert f"## [{wan_core.__version__}]" in text("CHANGELOG.md")


def test_no_installation_replaces_torch() -> None:
    """A node pack that requires torch makes pip replace the build that fits the machine."""
    extras = "\n".join(line for lines in PROJECT["project"]["optional-dependencies"].values() for line in lines)
    for listed in (text("requirements.txt"), extras):
        assert not {"torch", "torchvision", "torchaudio", "triton"} & set(names(listed))


def test_every_requirement_is_pinned_for_the_repeatable_set_up() -> None:
    pinned = set(names(text("constraints.txt")))
    for file in ("requirements.txt", "tests/requirements.txt"):
        assert set(names(text(file))) <= pinned, file


def test_the_registry_takes_the_name() -> None:
    """ComfyUI's registry refuses names that contain its own; https://docs.comfy.org/registry/specifications."""
    assert "comfyui" not in PROJECT["project"]["name"].lower()
    assert {"PublisherId", "DisplayName", "Icon", "requires-comfyui"} <= PROJECT["tool"]["comfy"].keys()


def test_every_asset_is_installed() -> None:
    package = ROOT / "wan_core"
    listed = {
        path for pattern in PROJECT["tool"]["setuptools"]["package-data"]["wan_core"] for path in package.glob(pattern)
    }
    assert {path for path in (package / "assets").rglob("*") if path.is_file()} <= listed


def test_the_engine_and_the_lab_are_installed_alone(tmp_path: Path, capsys, monkeypatch) -> None:
    """The benchmarks stay in the repository, and the command that was theirs says so."""
    from setuptools import find_packages

    packages = find_packages(str(ROOT), include=PROJECT["tool"]["setuptools"]["packages"]["find"]["include"])
    assert "wan_core.pipeline" in packages and {name.split(".")[0] for name in packages} == {"wan_core", "wan_lab"}
    installed = tmp_path / "site" / "wan_core" / "cli" / "__init__.py"
    monkeypatch.setattr("wan_core.cli.__file__", str(installed))
    assert main(["bench", "single"]) == 2
    assert "python -m benchmarks" in capsys.readouterr().err
