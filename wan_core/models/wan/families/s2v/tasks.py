"""The task of Wan2.2-S2V-14B, and its defaults. Source: Wan2.2/wan/configs/wan_s2v_14B.py."""

from __future__ import annotations

from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.family import Task
from wan_core.models.wan.families.s2v.config import S2V_14B

TASKS = (
    Task(name="s2v-14B", family="s2v", release="Wan 2.2", in_channels=16, image="none",
         driven_by="WanSoundImageToVideo",
         vae=VAE_21, full_size=S2V_14B, two_experts=False, boundary=0.0, shift=3.0, steps=40,
         guidance_high=4.5, guidance_low=4.5, width=832, height=480, frames=77, fps=16),
)  # fmt: skip
