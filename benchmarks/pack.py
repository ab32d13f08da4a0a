"""`python -m benchmarks pack`: what the ladder needs on a GPU machine without a package registry, as files to copy.

    python -m benchmarks pack --out packs --comfyui ~/comfy/ComfyUI
    python -m pip install --no-index --no-deps --target site packs/wheels/*/*.whl   # there; then PYTHONPATH=site

comfyui.tar.xz   ComfyUI's sources without nodes of paid services, blueprints, tests and web examples
wheels/NAME      wheels of a group of libraries (GROUPS) for Linux x86-64 and `--python`, by `pip download`; of group
                 `comfyui` those that its requirements.txt names and the machine is not expected to have (HAD)

Sizes are printed. None of it is needed where pip reaches a registry.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

GROUPS: dict[str, tuple[str, ...]] = {
    "attention": ("flash-attn-4==4.0.0b36", "nvidia-cudnn-frontend==1.32.0", "nvidia-cutlass-dsl==4.8.1"),
    "peers": ("diffusers==0.42.1", "comfy-kitchen==0.2.40"),
    "tests": ("pytest", "pytest-xdist", "hypothesis", "gguf", "av"),
}
HAD = re.compile(r"^(torch|nvidia|triton|numpy|scipy|transformers|tokenizers|safetensors)")
# The page is not used, and its workflows are large.
LEFT_OUT = re.compile(r"^comfyui-(frontend-package|workflow-templates|embedded-docs)")
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)]
PLATFORMS += [f"manylinux{name}_x86_64" for name in ("1", "2010", "2014")]
NOT_SOURCES = re.compile(
    r"^(\.git|\.ci|\.github|\.venv|tests[^/]*|script_examples|blueprints|comfy_api_nodes|input|output|models|user|temp)(/|$)"
    r"|(^|/)__pycache__(/|$)"
)


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    groups = {name: GROUPS[name] for name in GROUPS if not options.only or name in options.only}
    if options.comfyui is not None:
        archive = pack_sources(options.comfyui, options.out / "comfyui.tar.xz")
        print(f"{archive.stat().st_size / 1e6:8.1f} MB  {archive}")
        groups["comfyui"] = requirements(options.comfyui)
    for name, wanted in groups.items():
        folder = options.out / "wheels" / name
        download(wanted, folder, options.python)
        size = sum(path.stat().st_size for path in folder.glob("*.whl"))
        print(f"{size / 1e6:8.1f} MB  {folder}, {len(list(folder.glob('*.whl')))} wheels", flush=True)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, required=True, help="folder for the packs")
    made.add_argument("--comfyui", type=Path, help="checkout of ComfyUI to pack, with what it requires")
    made.add_argument("--python", default="3.12", help="version of the GPU machine's Python (default %(default)s)")
    made.add_argument("--only", action="append", choices=tuple(GROUPS), help="only this group; repeatable")
    return made


def pack_sources(checkout: Path, archive: Path) -> Path:
    """What `main.py` imports, in a folder ComfyUI."""

    def kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if NOT_SOURCES.search(entry.name.removeprefix("ComfyUI").lstrip("/")) else entry

    with tarfile.open(archive, "w:xz") as tar:
        tar.add(checkout, "ComfyUI", filter=kept)
    return archive


def requirements(checkout: Path) -> tuple[str, ...]:
    """Lines of the checkout's requirements.txt, without HAD and LEFT_OUT."""
    lines = [line.partition("#")[0].strip() for line in (checkout / "requirements.txt").read_text().splitlines()]
    return tuple(line for line in lines if line and not HAD.match(line.lower()) and not LEFT_OUT.match(line.lower()))


def download(wanted: Sequence[str], folder: Path, python: str) -> None:
    """The wheels, and those that they need; not what the machine has, which pip alone would fetch, torch among it."""
    folder.mkdir(parents=True, exist_ok=True)
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--pre", "--no-deps", "--only-binary=:all:", *platforms]
    command += ["--python-version", python, "--implementation", "cp", "-d", str(folder)]
    left, asked = list(wanted), set[str]()
    while left:
        requirement = left.pop(0)
        if (name := name_of(requirement)) in asked:
            continue
        asked.add(name)
        subprocess.run([*command, requirement], check=True)
        left += [one for path in folder.glob("*.whl") if name_of(path.name) == name for one in needs(path, python)]


def needs(wheel: Path, python: str) -> list[str]:
    """What a wheel requires on that machine, without extras and what it has."""
    from packaging.requirements import Requirement

    with ZipFile(wheel) as file:
        info = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(info).decode().splitlines()
    found = [Requirement(line.partition(":")[2].strip()) for line in lines if line.startswith("Requires-Dist:")]
    where = {"python_version": python, "sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}
    found = [one for one in found if one.marker is None or one.marker.evaluate(where)]
    return [f"{one.name}{one.specifier}" for one in found if not HAD.match(one.name.lower())]


def name_of(requirement: str) -> str:
    """The project of a requirement or of a wheel's file."""
    name = requirement.partition("-")[0] if requirement.endswith(".whl") else re.split(r"[^\w.-]", requirement)[0]
    return name.lower().replace("_", "-")
