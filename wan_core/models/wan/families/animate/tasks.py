"""The task of Wan2.2-Animate-14B, and its defaults. Source: Wan2.2/wan/configs/wan_animate_14B.py."""

from __future__ import annotations

from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.animate.config import ANIMATE_14B
from wan_core.models.wan.families.family import Task

TASKS = (
    Task(name="animate-14B", family="animate", release="Wan 2.2", in_channels=36, image="channels", image_dim=1280,
         driven_by="WanAnimateToVideo",
         vae=VAE_21, full_size=ANIMATE_14B, two_experts=False, boundary=0.0, shift=5.0, steps=20,
         guidance_high=1.0, guidance_low=1.0, width=1280, height=720, frames=77, fps=30),
)  # fmt: skip
