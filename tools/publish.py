"""The public address of the project, and whether this version may be published in ComfyUI's registry.

    python tools/publish.py                                   exit 1 and say why if it may not
    python tools/publish.py https://github.com/NAME/wancore   write the address: pyproject.toml, then the READMEs

The address stands in pyproject.toml alone (`[project.urls] Repository`; Icon and Banner lie below it), with OWNER in
the place of a name that is not decided. The check imports nothing that is not in Python.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomllib  # pyright: ignore[reportMissingImports] # Python 3.11

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = "OWNER"
ADDRESS = re.compile(r"https://github\.com/([A-Za-z0-9][\w-]*)/([\w.-]+)")
PICTURES = {"Icon": "docs/images/icon.png", "Banner": "docs/images/banner.png"}


def picture_address(repository: str, path: str) -> str:
    """Where GitHub serves a file of the main branch as it is."""
    return f"{repository.replace('https://github.com/', 'https://raw.githubusercontent.com/')}/main/{path}"


def faults(project: dict[str, Any], root: Path) -> Iterator[str]:
    """Why this version may not be published."""
    repository, comfy = project["project"]["urls"]["Repository"], project["tool"]["comfy"]
    address = ADDRESS.fullmatch(repository)
    if address is None:
        yield f"Repository {repository} is no address of GitHub: python tools/publish.py https://github.com/NAME/wancore"
    elif address[1] == PLACEHOLDER:
        yield "the public address is not decided: python tools/publish.py https://github.com/NAME/wancore"
    for name, path in PICTURES.items():
        if comfy.get(name) != picture_address(repository, path):
            yield f"{name} is {comfy.get(name)!r}, not {picture_address(repository, path)}"
        if not (root / path).is_file():
            yield f"{path} is missing"
    if not comfy.get("PublisherId"):
        yield "[tool.comfy] has no PublisherId"
    version = project["project"]["version"]
    if not re.search(rf"^## \[{re.escape(version)}\] - \d", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE):
        yield f"CHANGELOG.md has no chapter {version} with a date: ## [{version}] - YYYY-MM-DD"


def with_address(text: str, address: str) -> str:
    """pyproject.toml with another public address."""
    repository = tomllib.loads(text)["project"]["urls"]["Repository"]
    for path in PICTURES.values():
        text = text.replace(picture_address(repository, path), picture_address(address, path))
    return text.replace(f'"{repository}"', f'"{address}"')


def main(arguments: list[str]) -> int:
    file = ROOT / "pyproject.toml"
    if arguments:
        (address,) = arguments
        if ADDRESS.fullmatch(address) is None:
            print(f"{address} is not https://github.com/NAME/REPOSITORY", file=sys.stderr)
            return 2
        file.write_text(with_address(file.read_text(encoding="utf-8"), address), encoding="utf-8")
        return subprocess.run([sys.executable, str(ROOT / "tools" / "readme_tables.py")]).returncode
    messages = list(faults(tomllib.loads(file.read_text(encoding="utf-8")), ROOT))
    for fault in messages:
        print(f"not published: {fault}", file=sys.stderr)
    return int(bool(messages))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
