"""Names that programs on one or several hosts share out: the one that claims a name makes the file, others leave it.

A claim is the small hidden file of `outputs.py`. Here its holder renews it every few seconds. Other hosts cannot see
whether that process runs; they remove a claim that was not renewed for a minute. No clocks of hosts are compared: each
program looks at what changes while it looks.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from wan_core.config.outputs import claim_of, make_claim, remove_left_over

RENEW_SECONDS = 5.0
SILENT_SECONDS = 60.0
RENEWED = "renewed while it is held\n"  # the text of such claims: one of another command is never removed for its age


class SharedClaims:
    """The claims of one program. Any thread may use it; outside of `with`, nothing is claimed."""

    def __init__(self) -> None:
        self.held: dict[Path, Path] = {}  # name -> its claim
        self.seen: dict[Path, tuple[int, float]] = {}  # claim of another program -> its time stamp, when first seen
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> SharedClaims:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for path in list(self.held):
            self.release(path)

    def take(self, path: Path) -> bool:
        """Claim `path`; False while another program has it. Raises OSError."""
        remove_left_over(path.absolute().parent)
        claim = make_claim(path, RENEWED)
        if claim is None:
            self._remove_silent(claim_of(path))
            return False
        self.held[path] = claim
        return True

    def release(self, path: Path) -> None:
        with suppress(OSError):  # the folder may be gone or read-only by now
            self.held.pop(path).unlink()

    def _renew(self) -> None:
        while not self._end.wait(RENEW_SECONDS):
            for claim in list(self.held.values()):
                with suppress(OSError):  # released meanwhile
                    os.utime(claim)

    def _remove_silent(self, claim: Path) -> None:
        """Remove a claim that was not renewed for `SILENT_SECONDS` of this program's time."""
        with suppress(OSError):  # released meanwhile
            stamp = claim.stat().st_mtime_ns
            if not claim.read_text(errors="replace").endswith(RENEWED):
                return
            first, since = self.seen.get(claim, (None, 0.0))
            if first != stamp:
                self.seen[claim] = stamp, time.monotonic()
            elif time.monotonic() - since > SILENT_SECONDS and claim.stat().st_mtime_ns == stamp:
                claim.unlink()
