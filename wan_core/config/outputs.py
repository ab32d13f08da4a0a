"""Files that a run writes: never one of its inputs, never each other, and whole or not there, also without power.

    with Outputs({"--image": image}, overwrite=False) as outputs:
        video = outputs.add("--out", Path("x.mp4"))  # x-1.mp4 if x.mp4 exists, or if another run is about to write it
        ...                                          # every other check
        outputs.say_renamed()
        ...                                          # hours of work
        with written_beside(video) as temporary:
            ...                                      # `temporary` becomes `video` at the end

`Outputs` checks what a user named before any work. It claims each name by a small hidden file beside it, so that two
runs never write to one name. Names of temporary files, and the text of claims, say which process made them. The next
write into a folder removes what processes that have ended left there.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from wan_core.config.checks import OptionError
from wan_core.config.durable import flush, seal
from wan_core.config.owners import has_ended, is_left_over, owner_text

PART = re.compile(r"\..*\.([0-9a-f]{8}-\d+-[0-9a-f]{8})-[0-9a-f]{4}\.part", re.DOTALL)
CLAIM = re.compile(r"\..*\.[0-9a-f]{8}\.claim", re.DOTALL)
PICTURE = re.compile(r"\d{5,}\.png")
LONG_ENDINGS = (".latents.safetensors", ".magcache.json")  # kept whole when a name gets a number
DEVICES = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
MODEL_FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".gguf", ".model", ".index.json")


class Outputs:
    """The files of one run. Outside of `with`, nothing is claimed any more."""

    def __init__(
        self,
        inputs: Mapping[str, str | Path | None],
        *,
        overwrite: bool = False,
        tell: Callable[[str], None] = lambda words: None,
    ) -> None:
        """inputs: option -> file or folder that the run reads. overwrite: replace files that exist, else write beside
        them under a new number. tell: called by `say_renamed` with a sentence for each name that is not the one
        that was asked for."""
        self.inputs = {option: Path(path) for option, path in inputs.items() if path is not None}
        self.overwrite, self.tell = overwrite, tell
        self.asked: dict[str, Path] = {}
        self.renamed: dict[Path, Path] = {}  # what was asked for -> where it goes; not yet said
        self.claims: list[Path] = []

    def __enter__(self) -> Outputs:
        return self

    def say_renamed(self) -> None:
        """Say which names are not those that were asked for: once, when the run is known to be valid."""
        for path, found in self.renamed.items():
            self.tell(f"{path} exists or is being written: writing {found} (--overwrite replaces what exists)")
        self.renamed.clear()

    def __exit__(self, fault: type[BaseException] | None, *_: object) -> None:
        if fault is None:
            self.say_renamed()
        while self.claims:
            with suppress(OSError):  # the folder may be gone or read-only by now; a claim left there is harmless
                self.claims.pop().unlink()

    def add(
        self,
        option: str,
        path: Path,
        *,
        overwrite: bool | None = None,
        quiet: bool = False,
        pictures: bool = False,
        sealed: bool = False,
    ) -> Path:
        """Where to write what `option` asks for: `path`, or the same with a number where that exists.

        overwrite: None as for all. quiet: say nothing of another number. pictures: `path` is a folder of numbered
        pictures. sealed: a file for `written_sealed`. Raises OptionError if `path` is an input or
        another output, or cannot be written.
        """
        self._check_apart(option, path)
        self.asked[option] = path
        if is_special(path) and sealed:
            raise OptionError(f"{option} {path} is a device or a pipe: give the name of a file")
        if is_special(path):  # /dev/stdout
            return path
        overwrite = self.overwrite if overwrite is None else overwrite
        if not pictures:
            _check_no_folder(path)
        elif overwrite:
            check_replaced_folder(path)
        if overwrite and path.exists() and not os.access(path, os.W_OK):
            raise OptionError(f"cannot write {path}: the file there is read-only. Choose another name.")
        found = self._claimed(path, overwrite)
        if found != path and not quiet:
            self.renamed[path] = found
        return found

    def still_free(self, path: Path) -> Path:
        """Where to write what `add` gave as `path`: there, or under a number where a file came to that name since."""
        if self.overwrite or is_special(path) or not os.path.lexists(path):
            return path
        found = self.renamed[path] = self._claimed(path, False)
        return found

    def _claimed(self, path: Path, overwrite: bool) -> Path:
        try:
            remove_left_over(path.absolute().parent)
            for name in [path] if overwrite else numbered(path):
                if not overwrite and os.path.lexists(name):
                    continue
                claim = make_claim(name)
                if claim is not None:
                    self.claims.append(claim)
                    return name
        except OSError as fault:
            raise _no_place(path, fault) from fault
        raise OptionError(f"cannot write {path}: another run is writing it. Choose another name.")

    def _check_apart(self, option: str, path: Path) -> None:
        for other, taken in self.asked.items():
            if folded(path) == folded(taken) or _same_file(path, taken):
                raise OptionError(f"{other} and {option} both write {path}: choose another name for one of them")
        for other, read in self.inputs.items():
            for file in model_files(read):
                if _same_file(path, file):
                    raise OptionError(
                        f"{option} would replace {file}, which {other} reads: choose another name for {option}"
                    )


def check_place(path: Path) -> None:
    """Raise OptionError if no file could be made where `path` is: before hours of work, not after."""
    _check_no_folder(path)
    probe = owned_path(path)
    try:
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as fault:
        raise _no_place(path, fault) from fault


def _check_no_folder(path: Path) -> None:
    if path.is_dir():
        raise OptionError(f"cannot write {path}: a folder has that name. Choose another name.")


def _no_place(path: Path, fault: OSError) -> OptionError:
    return OptionError(
        f"cannot write {path} into the folder {path.parent} ({fault.strerror}). Create the folder, or choose another."
    )


def model_files(path: Path) -> Iterable[Path]:
    """The files that are read where a user names `path`: itself, the models in a folder, the shards of an index."""
    if path.is_dir():
        return (Path(folder, name) for folder, _, names in os.walk(path) for name in names if _is_model(name))
    if path.name.endswith(".index.json"):
        return [path.with_name(name) for name in os.listdir(path.parent) if _is_model(name)]
    return [path]


def _is_model(name: str) -> bool:
    return name.lower().endswith(MODEL_FILES)


def _same_file(one: Path, other: Path) -> bool:
    """Whether both exist and are one file, under whatever names: links, or another case where that is the same."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def folded(path: Path) -> str:
    """Equal for names that will be one file. Names that differ in case alone are one on many systems."""
    return unicodedata.normalize("NFC", os.path.realpath(path)).casefold()


def is_special(path: Path) -> bool:
    """Whether it is a device, a pipe or a socket: these are written as they are, and nothing is put beside them."""
    if path.absolute().parent in DEVICES:
        return True  # /dev/stdout may be a file
    return path.exists() and not path.is_file() and not path.is_dir()


def numbered(path: Path) -> Iterator[Path]:
    yield path
    ending = next((ending for ending in LONG_ENDINGS if path.name.endswith(ending)), path.suffix)
    stem = path.name.removesuffix(ending) if ending else path.name
    for number in count(1):
        yield path.with_name(f"{stem}-{number}{ending}")


# ---------------------------------------------------------------------------------------------------------- one file


@contextmanager
def written_beside(path: str | os.PathLike[str], *, tidy: bool = True) -> Iterator[Path]:
    """A temporary file in the folder of `path`, which gets that name at the end, when all of it is on the disk. After
    an exception it is deleted, and an older file of that name is unchanged. tidy: first remove what processes that have
    ended left in the folder, which takes milliseconds where thousands of files are. Raises OSError."""
    path = Path(path)
    if is_special(path):
        yield path
        return
    if tidy:
        remove_left_over(path.absolute().parent)
    temporary = owned_path(path)
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
        flush(path.absolute().parent)
    finally:
        with suppress(OSError):  # gone by its new name, or the folder is read-only: nothing was made
            temporary.unlink()


@contextmanager
def written_sealed(path: Path) -> Iterator[Path]:
    """Like `written_beside`, for a file that another run reads: it gets a checksum in the place that was written for it
    (`durable`). Raises OSError, also where a pipe or a device has the name."""
    if is_special(path):
        raise OSError(errno.EINVAL, "a pipe or a device has that name")
    with written_beside(path) as temporary:
        yield temporary
        seal(temporary)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A temporary folder for numbered pictures that replaces `path` at the end, like `written_beside`. Raises
    OptionError where another folder is there, and OSError."""
    check_replaced_folder(path)
    remove_left_over(path.absolute().parent)
    temporary, old = owned_path(path), owned_path(path)
    try:
        temporary.mkdir()
        yield temporary
        for place in (*temporary.iterdir(), temporary):
            flush(place)
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        flush(path.absolute().parent)
    finally:
        if old.exists() and not path.exists():  # broken off between the two
            os.replace(old, path)
        shutil.rmtree(temporary, ignore_errors=True)  # gone by its new name
        shutil.rmtree(old, ignore_errors=True)


def check_replaced_folder(path: Path) -> None:
    """Raise OptionError if `path` is there and is not a folder of numbered pictures."""
    if path.exists() and not (path.is_dir() and all(PICTURE.fullmatch(name) for name in os.listdir(path))):
        raise OptionError(
            f"cannot replace {path}: it is not a folder of pictures such as 00001.png. Choose another name."
        )


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write a file of text, beside and then renamed. Raises OSError."""
    return write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes, *, tidy: bool = True) -> Path:
    with written_beside(path, tidy=tidy) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def keep_old(path: Path) -> Path | None:
    """A copy of `path` as NAME.bak, or with a number where that exists. None: nothing is there. Raises OSError."""
    if not path.exists():
        return None
    kept = next(name for name in numbered(path.with_name(f"{path.name}.bak")) if not os.path.lexists(name))
    with written_beside(kept) as temporary:
        shutil.copy2(path, temporary)
    return kept


# ------------------------------------------------------------------------------------- files of processes that ended


def remove_left_over(folder: Path) -> None:
    """Remove temporary files and claims in `folder` whose processes have ended. Raises OSError if it cannot be read."""
    for name in os.listdir(folder):
        part = PART.fullmatch(name) if name.startswith(".") else None  # a folder may hold thousands of videos
        if not part and not (name.startswith(".") and CLAIM.fullmatch(name)):
            continue
        path = folder / name
        with suppress(OSError):  # another process removes it too, or may not read or remove it
            if (has_ended(part[1]) if part else is_left_over(path)) and not path.is_symlink():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def claim_of(path: Path) -> Path:
    name = hashlib.sha256(os.fsencode(unicodedata.normalize("NFC", path.name).casefold())).hexdigest()[:8]
    return path.absolute().with_name(f".{_short(path.name)}.{name}.claim")


def make_claim(path: Path) -> Path | None:
    """Make the file that claims `path`; None where a process that runs has it. Raises OSError."""
    claim = claim_of(path)
    try:
        with claim.open("x") as file:
            file.write(owner_text())
    except FileExistsError:
        return None  # `remove_left_over` has looked at it
    except OSError:
        with suppress(OSError):
            claim.unlink()
        raise
    return claim


def owned_path(path: Path) -> Path:
    """A hidden name beside `path` that says which process made it: `remove_left_over` finds it."""
    return path.with_name(f".{_short(path.stem)}.{owner_text()}-{secrets.token_hex(2)}.part")


def _short(name: str) -> str:
    """At most 80 bytes of it: file systems allow 255 for the whole."""
    return os.fsencode(name)[:80].decode("utf-8", "ignore")
