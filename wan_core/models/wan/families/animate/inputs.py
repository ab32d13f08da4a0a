"""What ComfyUI's CONDITIONING is to the transformer of Animate.

Legend: B batch, T/Y/X latent frames, rows, columns, F face frames.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from wan_core.config.checks import OptionError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.statistics import normalise
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.family import Inputs, Task
from wan_core.models.wan.families.wan.inputs import join_image, read_features


def image_inputs(task: Task, vae: VideoVAE, first: Tensor | None, last: Tensor | None, frames: int) -> Inputs:
    raise OptionError(f"{task.name} takes a pose video and a face video: use ComfyUI's node WanAnimateToVideo")
