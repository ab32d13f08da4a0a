"""Who makes a video: this process or worker processes. Whoever asks for one talks to an `Engine` and need not know."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from wan_core.checkpoint.staged import Reading
from wan_core.config import LoadOptions, Request
from wan_core.pipeline.pipeline import Pipeline, Result, WriteVideo
from wan_core.pipeline.run import SILENT, Watch
from wan_core.pipeline.sources import for_request


class Engine(Protocol):
    """Loads what it needs, keeps it while it fits the next request, and has everything end with `close`."""

    def generate(
        self,
        options: LoadOptions,
        request: Request,
        watch: Watch = SILENT,
        *,
        keep_latents: Path | None = None,
        keep_clips: Path | None = None,
        write: WriteVideo | None = None,
    ) -> Result:
        """Load the models and generate a video, see `Pipeline.load` and `Pipeline.generate`."""
        ...

    def close(self) -> None: ...


class LocalEngine:
    """This process."""

    def __init__(self) -> None:
        self.loaded: tuple[object, Pipeline] | None = None  # what the models were loaded by, and they

    def load(self, options: LoadOptions, request: Request, watch: Watch = SILENT) -> Pipeline:
        """The models for `request`: those of the request before where they fit."""
        spec = for_request(options, request), bool(request.pictures)
        if self.loaded is None or self.loaded[0] != spec:
            self.loaded = None  # gone before the next is loaded
            self.loaded = spec, Pipeline.load(options, request=request, watch=watch, how=Reading(on_bytes=watch.read))
            watch.loaded()
        return self.loaded[1]

    def generate(
        self,
        options: LoadOptions,
        request: Request,
        watch: Watch = SILENT,
        *,
        keep_latents: Path | None = None,
        keep_clips: Path | None = None,
        write: WriteVideo | None = None,
    ) -> Result:
        pipe = self.load(options, request, watch)
        return pipe.generate(request, watch, keep_latents=keep_latents, keep_clips=keep_clips, write=write)

    def close(self) -> None:
        self.loaded = None
