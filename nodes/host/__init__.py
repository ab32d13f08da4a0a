"""ComfyUI as the nodes see it: devices, model folders, progress and interruption, and its memory manager.

The only folder that touches comfy.*, folder_paths and the server.
"""

from .devices import device, gpu_count, to_intermediate
from .folders import model_names, model_path, stamps, temporary_folder, unfinished_path
from .memory import Held, Remote, Weights, evict_all, load, log, room
from .progress import PREVIEW_SIDE, Progress, check_interruption, show

__all__ = [
    "PREVIEW_SIDE",
    "Held",
    "Progress",
    "Remote",
    "Weights",
    "check_interruption",
    "device",
    "evict_all",
    "gpu_count",
    "load",
    "log",
    "model_names",
    "model_path",
    "room",
    "show",
    "stamps",
    "temporary_folder",
    "to_intermediate",
    "unfinished_path",
]
