"""Progress, text on nodes, and interruption."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from comfy import model_management
from comfy.utils import ProgressBar
from comfy_api.feature_flags import supports_feature
from comfy_execution.progress import get_progress_state
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
        self.player: Player | None = None

    def update(
        self, done: int, total: int, message: str, pictures: Sequence[Image.Image] = (), frames_per_second: float = 0
    ) -> None:
        """pictures: frames of the preview, shown as a moving picture until the next ones come or `close`. Raises
        ComfyUI's interruption if the user asked for it."""
        if message:
            show(message)
        middle = ("JPEG", pictures[len(pictures) // 2], PREVIEW_SIDE) if pictures else None
        self.bar.update_absolute(done, total, middle)
        if self.player is None and len(pictures) > 1:
            self.player = Player.for_this_node(frames_per_second)
        if self.player is not None:
            self.player.frames = done, total, pictures

    def close(self) -> None:
        """The moving picture stops."""
        if self.player is not None:
            self.player.close()


class Player:
    """Shows the frames of a preview one after another on a node, from a thread of its own.

    ComfyUI's page shows one JPEG at a time. Not through the progress bar: that raises the user's interruption, and once
    only, which must reach the thread of the node."""

    def __init__(self, node: str, frames_per_second: float) -> None:
        self.node, self.pause = node, 1 / frames_per_second
        self.frames: tuple[int, int, Sequence[Image.Image]] = (0, 1, ())
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._play, name="WanCore preview", daemon=True)
        self.thread.start()

    @classmethod
    def for_this_node(cls, frames_per_second: float) -> Player | None:
        """For the node that is running; None where no page watches that could show it."""
        context, server = get_executing_context(), PromptServer.instance
        watched = supports_feature(server.sockets_metadata, server.client_id, "supports_preview_metadata")
        return cls(context.node_id, frames_per_second) if context is not None and watched else None

    def _play(self) -> None:
        shown = 0
        while not self.over.wait(self.pause):
            done, total, pictures = self.frames
            if pictures:
                picture = ("JPEG", pictures[shown % len(pictures)], PREVIEW_SIDE)
                get_progress_state().update_progress(self.node, done, total, picture)
                shown += 1

    def close(self) -> None:
        self.over.set()
        self.thread.join()


def running_node() -> str | None:
    """The node of the page that is running. A loop runs copies of its nodes, whose own ids the page does not know."""
    context = get_executing_context()
    return None if context is None else get_progress_state().dynprompt.get_display_node_id(context.node_id)


def show(text: str) -> None:
    """Text on the node that is running, in every page that is open."""
    node = running_node()
    if node is not None:
        PromptServer.instance.send_progress_text(text, node)


def reporter() -> Callable[[str], None]:
    """Logs a line of text and shows it on the node that is running now, whichever node runs when it is called."""
    node = running_node()

    def report(message: str) -> None:
        log.info(message)
        if node is not None:
            PromptServer.instance.send_progress_text(message, node)

    return report
