"""Folders for temporary files, of which nothing stays when their process has ended, however it ends.

What lies in them can quote a prompt or be a user's picture. A shell that waits for the end of this process deletes
them, also where that is killed: Ray ends its processes so, and all that they started themselves. What a machine left
that lost power, the next process on it deletes.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from wan_core.config.outputs import owned_path, remove_left_over
from wan_core.config.owners import is_left_over, owner_text

OWNER = "owner"  # a file in a folder whose name does not say which process made it
# Again where something was written meanwhile: ranks end a moment after their program.
DELETE = 'for second in 1 2 3 4 5 6 7 8 9; do rm -rf -- "$1" && break; sleep 1; done'
WAIT = f"exec 3<&0; (read -r line <&3; {DELETE}) >/dev/null 2>&1 &"
_pipes: list[int] = []  # open in this process alone, until it ends


def own_folder(name: str) -> Path:
    """A new folder that only this user can enter. Raises OSError."""
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=_root()))


@functools.cache
def _root() -> Path:
    """The folder of this process, with all of its temporary folders."""
    temporary = Path(tempfile.gettempdir())
    remove_left_over(temporary)
    for one in temporary.glob(f"wancore-*/{OWNER}"):
        with suppress(OSError):
            if is_left_over(one):
                shutil.rmtree(one.parent)
    root = owned_path(temporary / "wancore")
    root.mkdir(mode=0o700)
    _delete_at_end(root)
    return root


def make_named_folder(folder: Path) -> None:
    """Make `folder`, which several hosts call `wancore-...` alike, for this process. Raises OSError."""
    folder.mkdir(mode=0o700)
    (folder / OWNER).write_text(owner_text())
    _delete_at_end(folder)


def _delete_at_end(folder: Path) -> None:
    """Have a shell delete `folder` when this process has ended. It has no parent, terminal or group in common with this
    process, so that nothing ends both."""
    if sys.platform == "win32":
        return
    reading, writing = os.pipe()
    with suppress(OSError):  # there is no shell: the next process deletes it
        subprocess.run(["/bin/sh", "-c", WAIT, "sh", str(folder)], stdin=reading, cwd="/", start_new_session=True)
    os.close(reading)
    _pipes.append(writing)
