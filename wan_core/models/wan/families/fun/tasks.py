"""The tasks of Fun control and camera, of Wan 2.1 and 2.2, and their defaults. Source: VideoX-Fun/examples."""

from __future__ import annotations

from dataclasses import replace

from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.family import Task
from wan_core.models.wan.families.fun import config

CONTROL = Task(
    name="fun-control-A14B", family="fun-control", release="Wan 2.2", in_channels=52, image="channels",
    driven_by="Wan22FunControlToVideo",
    vae=VAE_21, full_size=config.CONTROL_A14B, two_experts=True, boundary=0.9, shift=5.0, steps=50,
    guidance_high=6.0, guidance_low=6.0, width=832, height=480, frames=81, fps=16,
)  # fmt: skip
CONTROL_21 = replace(
    CONTROL, name="fun-control-14B", release="Wan 2.1", in_channels=48, image_dim=1280, two_experts=False, boundary=0.0,
    driven_by="WanFunControlToVideo", full_size=config.CONTROL_14B,
)  # fmt: skip
CAMERA = replace(
    CONTROL, name="camera-A14B", family="camera", in_channels=36, driven_by="WanCameraImageToVideo",
    full_size=config.CAMERA_A14B,
)  # fmt: skip
CAMERA_21 = replace(
    CAMERA, name="camera-14B", release="Wan 2.1", in_channels=32, image_dim=1280, two_experts=False, boundary=0.0,
    full_size=config.CAMERA_14B,
)  # fmt: skip
CONTROL_TASKS = (
    CONTROL,
    CONTROL_21,
    replace(CONTROL_21, name="fun-control-1.3B", full_size=config.CONTROL_1_3B),
)
CAMERA_TASKS = (CAMERA, CAMERA_21, replace(CAMERA_21, name="camera-1.3B", full_size=config.CAMERA_1_3B))
