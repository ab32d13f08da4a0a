"""Files that one run leaves for another: on the disk before they have their name, and with a checksum of all bytes.

The checksum stands in the file itself as JSON, `"sha256": "64 digits"`, in the header of a safetensors file, in the
comment of a video, or as a field of a JSON file. It is that of the file with zeros in place of these digits.

    with written_sealed(path) as temporary:     # of `wan_core.config.outputs`
        ...                                     # writes `"sha256": UNSEALED` among other fields
    ...
    check_seal(path)                            # in another run
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import sys
from pathlib import Path
from stat import S_ISREG

from wan_core.config.checks import OptionError
from wan_core.config.limits import MAX_HEADER, MIB

SEAL, UNSEALED = "sha256", "0" * 64
_SEAL = re.compile(rb'"sha256": ?"([0-9a-f]{64})"')  # inside of a text of JSON each quote has a backslash before it
_WITHIN = MAX_HEADER + MIB  # bytes at the beginning of a file that may hold it
_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # of file systems that have no such thing


class DamagedFile(OptionError):
    """A file is not as it was written."""


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk, so that they are there after a power failure.
    Raises OSError where a file could not be written."""
    folder = path.is_dir()
    if folder and sys.platform == "win32":
        return  # a folder cannot be opened there
    try:
        number = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
        try:
            os.fsync(number)
        finally:
            os.close(number)
    except OSError as fault:
        if not folder and fault.errno not in _CANNOT_FLUSH:
            raise


def seal(path: Path) -> None:
    """Write the checksum of a file into it, where `UNSEALED` stands. Raises OSError."""
    at, _, digest = _checksum(path)
    assert at is not None, f"{path} has no place for a checksum"
    with path.open("r+b") as file:
        file.seek(at)
        file.write(digest)


def check_seal(path: Path) -> bool:
    """Whether a file has a checksum; files of other programs have none. Raises DamagedFile
    where it does not fit the file, or `path` is no file; OSError for one that cannot be read."""
    if not S_ISREG(path.stat().st_mode):
        raise DamagedFile(f"{path} is no file, but a folder, a pipe or a device")
    at, said, digest = _checksum(path)
    if at is not None and said != digest:
        raise DamagedFile(f"{path} does not fit its checksum: it is damaged, or was changed by another program")
    return at is not None


def _checksum(path: Path) -> tuple[int | None, bytes, bytes]:
    """Where in a file its checksum stands, what stands there, and what should."""
    with path.open("rb") as file:
        head = file.read(_WITHIN)
        found = _SEAL.search(head)
        if found is None:
            return None, b"", b""
        begin, end = found.span(1)
        digest = hashlib.sha256(head[:begin])
        digest.update(UNSEALED.encode() + head[end:])
        while piece := file.read(MIB):
            digest.update(piece)
    return begin, found[1], digest.hexdigest().encode()
