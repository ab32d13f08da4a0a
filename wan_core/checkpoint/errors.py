"""The error class of this package, and helpers for its messages."""

from __future__ import annotations

from collections.abc import Collection

from wan_core.config import UserError


class CheckpointError(UserError):
    """A model file is damaged, incomplete, of an unknown format, or not the part that was asked for.

    `fault` says what is wrong and what to do; `where` names the file. The message is `"{where}: {fault}"`. Code that
    sees only names and shapes (the key tables) raises it without `where`; `detect` adds it. Names of a file may contain
    anything: characters that are not printable are replaced, so that the message is one line.
    """

    def __init__(self, fault: str, *, where: str = "") -> None:
        message = f"{where}: {fault}" if where else fault
        if not message.isprintable():
            message = "".join(
                character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in message
            )
        super().__init__(message)
        self.fault = fault
        self.where = where


def counted(names: Collection[str], what: str) -> str:
    """`"1 tensor is missing (a)"`, `"7 tensors are missing (a, b, c, d, e and 2 more)"` for what = "missing"."""
    return f"{len(names)} {'tensor is' if len(names) == 1 else 'tensors are'} {what} ({listing(list(names))})"


def listing(names: list[str] | tuple[str, ...], limit: int = 5) -> str:
    """The first few of a list of names and how many more there are, for a message: `"a, b, c and 37 more"`."""
    shown = ", ".join(name if len(name) <= 120 else name[:117] + "..." for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
