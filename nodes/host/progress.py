"""Progress, text on nodes, and interruption."""

from __future__ import annotations

import logging
from collections.abc import Callable

from comfy import model_management
from comfy.utils import ProgressBar
from comfy_execution.utils import get_executing_context
from PIL import Image
from server import PromptServer

log = logging.getLogger("WanCore")
PREVIEW_SIDE = 512  # pixels of the longer side of a live preview, at most


def check_interruption() -> None:
    """Raises ComfyUI's interruption if the user asked for it."""
    model_management.throw_exception_if_processing_interrupted()


class Progress:
    """The progress bar, live preview and line of text of the node that is running."""

    def __init__(self, total: int) -> None:
        model_management.throw_exception_if_processing_interrupted()
        self.bar = ProgressBar(total)

    def update(self, done: int, total: int, words: str, picture: Image.Image | None = None) -> None:
        """Raises ComfyUI's interruption if the user asked for it."""
        if words:
            show(words)
        self.bar.update_absolute(done, total, None if picture is None else ("JPEG", picture, PREVIEW_SIDE))


def show(words: str) -> None:
    """Text on the node that is running, in every page that is open."""
    context = get_executing_context()
    if context is not None:
        PromptServer.instance.send_progress_text(words, context.node_id)


def reporter() -> Callable[[str], None]:
    """Logs a line of text and shows it on the node that is running now, whichever node runs when it is called."""
    context = get_executing_context()

    def report(words: str) -> None:
        log.info(words)
        if context is not None:
            PromptServer.instance.send_progress_text(words, context.node_id)

    return report
