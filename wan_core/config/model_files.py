"""The published files that each task needs, from `assets/models.json`, and where they lie in ComfyUI's models folder.

The table is the one list of files: `wancore models`, messages about a missing file and the workflows' links read it. A
row is {"name", "folder", "gb", "repository", "path", "part", "tasks"} and, where another row has the same part of the
same task, "choice": a word that takes this file in its place. Sizes are in GB, as far as they are known.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from wan_core.config.checks import OptionError, unknown
from wan_core.config.printing import PACKAGE, command

TABLE = PACKAGE / "assets" / "models.json"
TRANSFORMERS, TEXT_ENCODERS = ("diffusion_models", "unet"), ("text_encoders", "clip")  # folders, new and old names
ALSO = {names[0]: names for names in (TRANSFORMERS, TEXT_ENCODERS)}
COMFYUI = PACKAGE.parent.parent.parent  # where this checkout is ComfyUI/custom_nodes/NAME
COMPLETE = 0.9  # a file with less than this share of its size in the table is not all there


@dataclass(frozen=True)
class ModelFile:
    """A row of the table. folder: below ComfyUI's models. path: in the repository."""

    name: str
    folder: str
    gb: float
    repository: str
    path: str
    part: str
    tasks: tuple[str, ...]
    choice: str | None = None

    @property
    def address(self) -> str:
        return f"https://huggingface.co/{self.repository}/resolve/main/{self.path}"


@functools.cache
def model_files() -> tuple[ModelFile, ...]:
    rows = json.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(ModelFile(**{**row, "tasks": tuple(row["tasks"])}) for row in rows)


def tasks() -> list[str]:
    return list(dict.fromkeys(task for file in model_files() for task in file.tasks))


def choices(task: str) -> list[str]:
    """The words that take other or more files of a task."""
    return list(dict.fromkeys(one.choice for one in model_files() if task in one.tasks and one.choice))


def files_for(task: str, chosen: Collection[str] = ()) -> list[ModelFile]:
    """One file for each part of a task: that of a chosen word where one has the part, else the plain one. Raises
    OptionError for a task or word without files."""
    if task not in tasks():
        raise unknown("task", task, tasks())
    for word in chosen:
        if word not in choices(task):
            words = ", ".join(choices(task)) or "none"
            raise OptionError(f"{task} has no files of the choice {word!r}; its choices: {words}")
    parts: dict[str, ModelFile] = {}
    for file in model_files():
        taken = file.choice in chosen or (file.choice is None and file.part not in parts)
        if task in file.tasks and taken:
            parts[file.part] = file
    return list(parts.values())


def models_root(folder: Path) -> Path | None:
    """ComfyUI's models folder in `folder`: that, ComfyUI's own, or a download of Comfy-Org; None: there is none."""
    for root in (folder, folder / "models", folder / "split_files"):
        if all(any((root / name).is_dir() for name in names) for names in (TRANSFORMERS, TEXT_ENCODERS)):
            return root
    return None


def find_root(folder: Path | None) -> Path:
    """The models folder of a user's folder, or without one that of the ComfyUI that this checkout or the current folder
    is in. Raises OptionError."""
    if folder is not None:
        if not folder.is_dir():
            raise OptionError(f"there is no folder {folder}: give ComfyUI's models folder")
        return models_root(folder) or folder
    for place in (COMFYUI, Path("ComfyUI"), Path()):
        if (root := models_root(place)) is not None:
            return root
    if COMFYUI.joinpath("custom_nodes") == PACKAGE.parent.parent and (COMFYUI / "models").is_dir():
        return COMFYUI / "models"  # without any folder in it yet
    raise OptionError("no models folder of ComfyUI is here: give it by --folder ComfyUI/models")


def find_file(root: Path, file: ModelFile) -> Path | None:
    """Where a file is in a models folder, subfolders and old names of folders included; None if it is not there."""
    for name in ALSO.get(file.folder, (file.folder,)):
        for path in sorted((root / name).rglob(file.name)):
            if path.is_file():
                return path
    return None


def is_complete(file: ModelFile, size: int) -> bool:
    """Whether a file of `size` bytes can be the whole file."""
    return size >= COMPLETE * file.gb * 1e9


def download_hint(name: str | Path) -> str:
    """`; `wancore models TASK --download` downloads it` for a file of the table, to end a message; else nothing."""
    file = next((one for one in model_files() if one.name == Path(name).name), None)
    if file is None:
        return ""
    words = ["--with", file.choice] if file.choice else []
    return f"; `{command('models', file.tasks[0], *words, '--download')}` downloads it"


def task_hint(task: str | None) -> str:
    """`. `wancore models TASK` lists its files` for a task of the table, for the end of a message; else nothing."""
    if task not in tasks():
        return ""
    return f". `{command('models', str(task))}` lists its files and downloads them"
