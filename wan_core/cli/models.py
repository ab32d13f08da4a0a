"""The command models: which files a task needs, which are there, and their download into ComfyUI's folders."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from wan_core.config.checks import OptionError
from wan_core.config.model_files import (
    ModelFile,
    choices,
    files_for,
    find_file,
    find_root,
    is_complete,
    model_files,
    tasks,
)
from wan_core.config.printing import command, module

UNFINISHED = ".wancore-download"  # below the models folder, where ComfyUI looks for no models
NOTES = (".metadata", ".lock", ".TAG", ".gitignore")  # of huggingface_hub, beside downloads
SPARE = 2**30  # bytes that stay free on the disk


def add_models_options(parser: argparse.ArgumentParser) -> None:
    words = list(dict.fromkeys(one.choice for one in model_files() if one.choice))
    parser.add_argument("task", nargs="?", help=f"one of {', '.join(tasks())} (default: all, in short)")
    parser.add_argument(
        "--with",
        dest="chosen",
        action="append",
        default=[],
        choices=words,
        metavar="WORD",
        help=f"other or more files: {', '.join(words)}; several times for several",
    )
    parser.add_argument("--folder", type=Path, help="ComfyUI's models folder (default: of the ComfyUI around this)")
    parser.add_argument("--download", action="store_true", help="download what is missing, by huggingface_hub")
    parser.add_argument("--json", action="store_true", help="print the files as JSON")


def run_models(options: argparse.Namespace) -> int:
    """Print the files of the task and where they are. Returns 1 if some are missing or not complete, else 0."""
    if options.task is None:
        if options.download or options.chosen:
            raise OptionError(f"a task is needed: give one of {', '.join(tasks())}")
        return list_tasks(options)
    files = files_for(options.task, options.chosen)
    root = find_root(options.folder)
    if options.download:
        download_missing(root, files)
    paths = {file: find_file(root, file) for file in files}
    if options.json:
        print(json.dumps([_as_dict(file, path) for file, path in paths.items()], indent=1))
    else:
        print("\n".join([f"{options.task}, in {root}", *(_line(file, path, root) for file, path in paths.items())]))
        print_advice(options, paths)
    return int(not all(_whole(file, path) for file, path in paths.items()))


def list_tasks(options: argparse.Namespace) -> int:
    """Print for each task how many of its files are there. Returns 1 if no task has all."""
    root = find_root(options.folder)
    whole = {}
    for task in tasks():
        files = files_for(task)
        whole[task] = [file for file in files if _whole(file, find_file(root, file))]
        missing = [file for file in files if file not in whole[task]]
        state = "complete" if not missing else f"{_gb(missing)} missing"
        if not options.json:
            words = f"  (--with {', '.join(choices(task))})" if choices(task) else ""
            print(f"{task:<24} {len(whole[task])} of {len(files)} files, {state}{words}")
    if options.json:
        print(json.dumps({task: [file.name for file in files] for task, files in whole.items()}, indent=1))
    return int(not any(len(files) == len(files_for(task)) for task, files in whole.items()))


def print_advice(options: argparse.Namespace, paths: dict[ModelFile, Path | None]) -> None:
    missing = [file for file, path in paths.items() if path is None]
    for file, path in paths.items():
        if path is not None and not _whole(file, path):
            print(f"{path} is smaller than the published file: an unfinished download? Delete it to have it again")
    if missing:
        words = [word for one in options.chosen for word in ("--with", one)]
        words += [] if options.folder is None else ["--folder", str(options.folder)]
        print(
            f"{_gb(missing)} missing. `{command('models', options.task, *words, '--download')}` downloads it. By hand:"
        )
        for file in missing:
            print(f"  {file.address}\n    into {file.folder}")
    elif not options.chosen and choices(options.task):
        print(f"Other files: --with {', '.join(choices(options.task))}")


def download_missing(root: Path, files: Sequence[ModelFile]) -> None:
    """Download the files that are not in the models folder. What is there stays as it is. Raises OptionError without
    huggingface_hub or room on the disk, OSError if a download fails: the next call goes on with its unfinished file."""
    missing = [file for file in files if find_file(root, file) is None]
    if not missing:
        return
    if importlib.util.find_spec("huggingface_hub") is None:
        addresses = "; ".join(f"{file.address} into {root / file.folder}" for file in missing)
        raise OptionError(
            f"huggingface_hub is not installed: `{module('pip', 'install', 'huggingface_hub')}`, or download by hand: "
            f"{addresses}"
        )
    free, needed = shutil.disk_usage(root).free, sum(file.gb for file in missing) * 1e9 + SPARE
    if free < needed:
        raise OptionError(f"{needed / 1e9:.0f} GB are needed in {root}, and {free / 1e9:.0f} GB are free")
    from huggingface_hub import hf_hub_download

    for file in missing:
        print(f"{file.name}, {file.gb:g} GB, into {file.folder}", file=sys.stderr)
        fetch(root, file, hf_hub_download)
    unfinished = root / UNFINISHED
    if any(path.is_file() and not path.name.endswith(NOTES) for path in unfinished.rglob("*")):
        print(f"downloads of other files that are not finished stay in {unfinished}", file=sys.stderr)
    else:
        shutil.rmtree(unfinished, ignore_errors=True)


def fetch(root: Path, file: ModelFile, download: Callable[..., str]) -> Path:
    """Download a file beside the models and move it to its folder when it is whole. Raises OptionError if one of that
    name has appeared there meanwhile, or if what came is too small."""
    unfinished = root / UNFINISHED
    path = Path(download(repo_id=file.repository, filename=file.path, local_dir=unfinished))
    if not is_complete(file, path.stat().st_size):
        raise OptionError(f"{path} has {path.stat().st_size} bytes, and about {file.gb:g} GB are expected: not moved")
    target = root / file.folder / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    move_new(path, target)
    return target


def move_new(path: Path, target: Path) -> None:
    """Move a file on one disk without replacing what is there. Raises OptionError if a file has the name."""
    taken = OptionError(f"{target} exists by now and stays as it is; the download is {path}")
    try:
        os.link(path, target)
    except FileExistsError as fault:
        raise taken from fault
    except OSError:  # a file system without links
        if target.exists():
            raise taken from None
        path.rename(target)
        return
    path.unlink()


def _whole(file: ModelFile, path: Path | None) -> bool:
    return path is not None and is_complete(file, path.stat().st_size)


def _gb(files: Sequence[ModelFile]) -> str:
    return f"{sum(file.gb for file in files):.3g} GB"


def _line(file: ModelFile, path: Path | None, root: Path) -> str:
    if path is None:
        return f"  missing     {file.folder + '/' + file.name}  ({file.gb:g} GB)"
    state = "there" if _whole(file, path) else "not whole"
    return f"  {state:<11} {path.relative_to(root)}"


def _as_dict(file: ModelFile, path: Path | None) -> dict[str, object]:
    about = {"name": file.name, "folder": file.folder, "gb": file.gb, "address": file.address, "part": file.part}
    return {**about, "path": None if path is None else str(path), "whole": _whole(file, path)}
