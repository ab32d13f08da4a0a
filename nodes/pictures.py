"""Pictures and lines of text on nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui
from PIL import Image
from torch import Tensor


def shown(image: Tensor, words: str, cls: type[io.ComfyNode]) -> dict[str, Any]:
    """A picture and text on the node."""
    return {**ui.PreviewImage(image, cls=cls).as_dict(), **ui.PreviewText(words).as_dict()}


def as_image(picture: Image.Image) -> Tensor:
    """[1, H, W, 3] in 0..1."""
    return torch.from_numpy(np.asarray(picture).astype(np.float32) / 255)[None]
