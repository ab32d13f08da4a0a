"""ComfyUI as the nodes see it: devices, folders, progress and interruption, its memory manager, and its Wan models.

The only folder that touches comfy.*, folder_paths and the server.
"""

from .background import background, prepare_kernels, prepare_when_up
from .devices import device, to_intermediate, vae_device, vae_precision
from .folders import (
    lasting_folder,
    model_names,
    model_path,
    output_folder,
    preview_file,
    stamps,
    temporary_video,
    unfinished_path,
    video_of,
)
from .memory import Held, Weights, evict_all, load, log, read_ahead, release_pinned, room, spare_bytes
from .native import check_wan, checkpoint_of, compute_dtype
from .native_beside import why_comfyui, words_before
from .native_model import describe, sampler_sigmas, window_schedule
from .native_reserve import skip_layer_passes
from .native_run import accelerate, accelerated
from .native_vae import decode_native_to, make_interruptible, native_vae_config, with_still_frames
from .progress import PREVIEW_SIDE, Progress, check_interruption, reporter, show
from .remote import CLUSTER, Remote
