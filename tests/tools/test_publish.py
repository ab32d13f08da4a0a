"""The pack can be published in ComfyUI's registry as soon as its address is decided, and not before."""

from __future__ import annotations

import io
import subprocess
import zipfile
from pathlib import Path

import pytest
import tomllib

from tools import publish

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
LARGEST = 16_000_000  # bytes of the archive: most of it is the embedded model
NEEDED = ("__init__.py", "pyproject.toml", "requirements.txt", "LICENSE", "README.md", "nodes/__init__.py")


def said(text: str, root: Path) -> list[str]:
    return list(publish.faults(tomllib.loads(text), root))


def test_the_placeholder_is_refused_and_an_address_is_not(tmp_path: Path) -> None:
    """Icon and Banner follow the address; another picture, and a version whose chapter has no date, are refused."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    changelog, version = tmp_path / "CHANGELOG.md", tomllib.loads(TEXT)["project"]["version"]
    changelog.write_text(f"## [{version}] - 2030-01-02\n")
    decided = publish.with_address(TEXT, "https://github.com/somebody/wancore")
    assert said(decided, tmp_path) == [] and "OWNER" not in decided.replace("refuses OWNER", "")
    assert said(publish.with_address(decided, "https://github.com/OWNER/wancore"), tmp_path) == [
        "the public address is not decided: python tools/publish.py https://github.com/NAME/wancore"
    ]
    assert "is no address of GitHub" in said(publish.with_address(decided, "https://example.org/x"), tmp_path)[0]
    assert "Icon is" in said(decided.replace("images/icon.png", "images/other.png"), tmp_path)[0]
    assert "no chapter 9.9.9" in said(decided.replace('version = "0', 'version = "9.9.9"\nx = "0', 1), tmp_path)[0]
    changelog.write_text(f"## [{version}] - unreleased\n")
    assert f"no chapter {version} with a date" in said(decided, tmp_path)[0]


def test_the_archive_is_small_and_whole() -> None:
    """What `comfy node pack` makes of the files that git knows."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs git")
    listed = ["git", "-c", "core.quotePath=false", "ls-files", "-z", "--cached"]
    ignored = [*listed, "--ignored", "--exclude-from=.comfyignore"]
    every, excluded = (
        set(subprocess.run(one, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")) - {""}
        for one in (listed, ignored)
    )
    names = {name for name in every - excluded if (ROOT / name).is_file()}
    assert names >= {*NEEDED} and any(name.startswith("wan_core/assets/tiny/") for name in names)
    tops = {name.partition("/")[0] for name in names}
    assert not tops & {"tests", "benchmarks", "docs", "tools", ".github", ".ci"}
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in sorted(names):
            packed.write(ROOT / name, name)
    size = len(archive.getvalue())
    assert size <= LARGEST, f"the archive has {size} bytes: leave out what the pack does without (.comfyignore)"
