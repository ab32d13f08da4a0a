"""ComfyUI as the nodes see it: devices, folders, progress and interruption, its memory manager, and its Wan models.

The only folder that touches comfy.*, folder_paths and the server.
"""

from .devices import device, gpu_count, to_intermediate
from .folders import model_names, model_path, stamps, unfinished_path
from .memory import Held, Remote, Weights, evict_all, load, log, room
from .native import accelerate, check_wan, checkpoint_of, compute_dtype
from .progress import PREVIEW_SIDE, Progress, check_interruption, reporter, show

__all__ = [
    "PREVIEW_SIDE",
    "Held",
    "Progress",
    "Remote",
    "Weights",
    "accelerate",
    "check_interruption",
    "check_wan",
    "checkpoint_of",
    "compute_dtype",
    "device",
    "evict_all",
    "gpu_count",
    "load",
    "log",
    "model_names",
    "model_path",
    "reporter",
    "room",
    "show",
    "stamps",
    "to_intermediate",
    "unfinished_path",
]
