"""ComfyUI's model and output folders."""

from __future__ import annotations

import atexit
import functools
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

import folder_paths
from comfy_api.latest import InputImpl

from wan_core.config import OptionError
from wan_core.config.model_files import download_hint

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.\w+$")


def model_names(folder: str) -> list[str]:
    """What ComfyUI finds in a kind of model folder; the shards of a model appear as the folder that holds them."""
    names = [*folder_paths.get_filename_list(folder), *_gguf_names(folder)]
    return list(dict.fromkeys(_whole(name) for name in names))


def _gguf_names(folder: str) -> list[str]:
    """GGUF files, which ComfyUI does not list: packs that do so use lists of their own."""
    files: set[str] = set()
    for root in folder_paths.get_folder_paths(folder):
        names, _ = folder_paths.recursive_search(root, excluded_dir_names=[".git"])
        files.update(folder_paths.filter_files_extensions(names, [".gguf"]))
    return sorted(files)


def _whole(name: str) -> str:
    parent = Path(name).parent.as_posix()
    return f"{parent}/" if _SHARD.search(name) and parent != "." else name


def model_path(folder: str, name: object) -> Path:
    """The file or folder behind a name of `model_names`. Raises OptionError for every other name, before anything is
    opened: a workflow may come from a stranger, and ComfyUI does not check inputs that `validate_inputs` names, nor
    values that come through a link."""
    roots = folder_paths.get_folder_paths(folder)
    if isinstance(name, str) and _is_listed(folder, name):
        for root in roots:
            path = Path(root) / name
            if path.is_dir() if name.endswith("/") else path.is_file():
                return path
    raise OptionError(
        f"{repr(name)[:200]} is not a model in {' or '.join(roots)}: put the file there and refresh, or choose another"
        + download_hint(str(name)[:200])
    )


def _is_listed(folder: str, name: str) -> bool:
    """Whether it is one of `model_names`; folders are searched for GGUF files only where that can matter."""
    if name in map(_whole, folder_paths.get_filename_list(folder)):
        return True
    return name.lower().endswith((".gguf", "/")) and name in map(_whole, _gguf_names(folder))


def stamps(folder: str, *endings: str) -> list[tuple[str, int]]:
    """Files of a kind of model folder whose name ends so, with when they were written: for `fingerprint_inputs`. Links
    to folders are followed, as ComfyUI does."""
    files: set[Path] = set()
    for root in folder_paths.get_folder_paths(folder):
        names, _ = folder_paths.recursive_search(root, excluded_dir_names=[".git"])
        files.update(Path(root, name) for name in names if name.endswith(endings))
    return [(str(path), path.stat().st_mtime_ns) for path in sorted(files) if path.is_file()]


def unfinished_path(seed: int) -> Path:
    """Where latents lie that are finished and have not arrived yet: what a run leaves there was interrupted by force,
    and `wancore decode` makes a video of it. In a folder that is read-only nothing is kept, and the run
    says so."""
    folder = output_folder()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder / f"unfinished-{time.strftime('%Y%m%d-%H%M%S')}-{seed}.latents.safetensors"


def output_folder() -> Path:
    """This pack's folder among ComfyUI's outputs. Whoever writes there makes it."""
    return Path(folder_paths.get_output_directory()) / "WanCore"


@functools.cache
def lasting_folder() -> Path:
    """A folder that lasts as long as this process. ComfyUI's own for temporary files may be emptied between two runs,
    while its cache holds results that name files in it."""
    folder = TemporaryDirectory(prefix="wancore-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@contextmanager
def temporary_video() -> Iterator[Path]:
    """The name of a new MP4 in ComfyUI's folder for temporary files. It is deleted at the end."""
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"WanCore-{secrets.token_hex(8)}.mp4"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def video_of(path: Path) -> InputImpl.VideoFromFile:
    """The contents of a file on ComfyUI's VIDEO socket: its cache keeps them in memory for later prompts, whatever
    becomes of the file."""
    return InputImpl.VideoFromFile(BytesIO(path.read_bytes()))


def preview_file(names: Sequence[str]) -> Path | None:
    """The first file of models/vae_approx whose name begins with one of `names`, where previews by TAESD are asked for
    (--preview-method, or the setting of the page); None: others are, or there is none."""
    from comfy.cli_args import LatentPreviewMethod, args  # reads the command line when it is imported

    if args.preview_method != LatentPreviewMethod.TAESD:
        return None
    listed = folder_paths.get_filename_list("vae_approx")
    file_name = next((one for name in names for one in listed if Path(one).name.startswith(name)), None)
    path = None if file_name is None else folder_paths.get_full_path("vae_approx", file_name)
    return None if path is None else Path(path)
