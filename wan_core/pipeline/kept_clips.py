"""Latents of the finished clips of a long video, kept in a folder until the video is complete, so that a run that was
interrupted goes on after its last finished clip.

A file's name has the start of a key: a hash of everything that decides the video. So a run finds its own clips only,
and never writes over another's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from wan_core.checkpoint import CheckpointError
from wan_core.checkpoint.latents import load_latents, try_to_save_latents
from wan_core.config.outputs import model_files, numbered
from wan_core.models.wan.families.clips import Clip

ENDING = ".latents.safetensors"


def key_of(settings: Mapping[str, Any], models: Iterable[Path], media: Iterable[Path]) -> str:
    """The key of a run, a hash of its settings, of its model files (name, size, time of change), and the contents of
    its media."""
    found = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in models:
        for file in sorted(model_files(path)):
            status = file.stat()
            found.update(f"\n{file.name} {status.st_size} {status.st_mtime_ns}".encode())
    for path in media:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                found.update(piece)
        found.update(b"\n")
    return found.hexdigest()


def remove_kept(clips: Iterable[Path]) -> None:
    """Once the video is complete. Files of other runs, and the folder with them, stay."""
    for path in clips:
        with suppress(OSError):  # gone, or read-only by now; the folder is not empty
            path.unlink(missing_ok=True)
            path.parent.rmdir()


@dataclass
class KeptClips:
    """used: files of this run. notes: what a user should know."""

    folder: Path
    key: str
    used: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, clip: Clip, shape: tuple[int, ...]) -> Tensor | None:
        """The latents of a clip that an earlier run of the same video finished."""
        for path in numbered(self._path(clip)):
            if not path.exists():
                return None
            try:
                latents, _, settings = load_latents(path)
            except (CheckpointError, OSError) as fault:
                self.notes.append(f"the kept clip {path} cannot be used and is made again ({fault})")
                continue
            if (settings.get("key"), settings.get("clip"), tuple(latents.shape)) == (self.key, clip.number, shape):
                self.used.append(path)
                return latents
            self.notes.append(f"the kept clip {path} is of another video, and is left as it is")
        return None

    def keep(self, clip: Clip, latents: Tensor, fps: int) -> None:
        """Where that is not possible, a note says so."""
        with suppress(OSError):  # what is wrong with the folder, writing into it says
            self.folder.mkdir(exist_ok=True)
        path = next(path for path in numbered(self._path(clip)) if not path.exists())
        failed = try_to_save_latents(path, latents, fps, {"key": self.key, "clip": clip.number})
        if failed is None:
            self.used.append(path)
        else:
            self.notes.append(failed)

    def others(self) -> int:
        """How many clips of other runs are in the folder."""
        return sum(self.key[:12] not in path.name for path in self.folder.glob(f"clip-*{ENDING}"))

    def _path(self, clip: Clip) -> Path:
        return self.folder / f"clip-{clip.number + 1:03}-{self.key[:12]}{ENDING}"
