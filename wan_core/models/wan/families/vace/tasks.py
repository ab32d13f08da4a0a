"""The tasks of VACE: Wan 2.1 in two sizes, and both experts of Wan2.2-VACE-Fun-A14B.

Source: VACE/vace/vace_wan_inference.py; VideoX-Fun/examples/wan2.2_vace_fun.
"""

from __future__ import annotations

from dataclasses import replace

from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.family import Task
from wan_core.models.wan.families.vace.config import VACE_1_3B, VACE_14B

SINGLE = Task(
    name="vace-14B", family="vace", release="Wan 2.1", in_channels=16, image="none", driven_by="WanVaceToVideo",
    vae=VAE_21, full_size=VACE_14B, two_experts=False, boundary=0.0, shift=16.0, steps=50,
    guidance_high=5.0, guidance_low=5.0, width=1280, height=720, frames=81, fps=16,
)  # fmt: skip
SMALL = replace(SINGLE, name="vace-1.3B", full_size=VACE_1_3B, width=832, height=480)
EXPERTS = replace(SINGLE, name="vace-A14B", release="Wan 2.2", two_experts=True, boundary=0.875, shift=12.0)
TASKS = (SINGLE, SMALL, EXPERTS)
