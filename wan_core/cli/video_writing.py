"""Writing the video of a run: in the format that its name says, while it is decoded."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan_core.cli.progress import ProgressLine
from wan_core.config import OptionError
from wan_core.config.outputs import Outputs, is_special

if TYPE_CHECKING:
    from wan_core.media.sound import Sound


def video_output(outputs: Outputs, path: Path) -> Path:
    """Where the video that --out names is written. Raises OptionError."""
    from wan_core.media.video_formats import FRAME_NAME, is_folder

    if path.name in ("", "..") or is_special(path):
        raise OptionError(f"--out {path} is no name for a video: give one that ends in .mp4, .webm or .gif")
    return outputs.add("--out", path, pictures=FRAME_NAME.format(1) if is_folder(path) else None)


def sound_of(audio: str | None) -> Sound | None:
    """The sound to write into the video file, read from the `audio` of a request. Raises OptionError."""
    if audio is None:
        return None
    from wan_core.media.sound import read_sound

    return read_sound(audio)


class VideoWriting:
    """Writes the video to `path` while it is decoded, or else into the folder for temporary files: it took too long to
    be lost. audio: path of its sound, which is read before anything is made. fault: why `path` could not be
    written."""

    def __init__(self, path: Path, progress: ProgressLine, audio: str | None = None) -> None:
        self.path, self.progress, self.sound = path, progress, sound_of(audio)
        self.fault: str | None = None

    def write(self, frames: Iterator[Any], /, *, fps: int, settings: Mapping[str, Any]) -> None:
        """For `Pipeline.generate`."""
        from wan_core.media.video_formats import write_video
        from wan_core.pipeline.pipeline import metadata

        counted = self.progress.frames(frames, settings["frames"])
        try:
            write_video(self.path, counted, fps=fps, sound=self.sound, metadata=metadata(settings))
        except (OSError, OptionError) as fault:  # the disk is full, or the folder is gone
            self.fault = f"the video could not be written to {self.path}: {getattr(fault, 'strerror', None) or fault}"
            print(self.fault, file=sys.stderr)

    def elsewhere(self, result: Any) -> Path:
        """Where it is instead. Raises OSError where it fits nowhere."""
        from wan_core.media.video_formats import write_video
        from wan_core.pipeline.pipeline import metadata

        settings = metadata(result.report.settings)
        try:
            with result.report.phase("write"), Outputs({}) as outputs:
                elsewhere = video_output(outputs, Path(tempfile.gettempdir(), self.path.name))
                return write_video(elsewhere, result.frames, fps=result.fps, sound=self.sound, metadata=settings)
        except (OSError, OptionError) as fault:
            second = getattr(fault, "strerror", None) or fault
            raise OSError(f"{self.fault}; nor to {tempfile.gettempdir()}: {second}") from fault
