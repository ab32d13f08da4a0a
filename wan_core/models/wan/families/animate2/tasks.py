"""The tasks of Wan-Animate-2 and their defaults: the weights as trained, distilled ones for few steps, the embedded
model.

Source: the defaults of its README and of LightX2V's configuration.
"""

from __future__ import annotations

from dataclasses import replace

from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.families.animate2.config import ANIMATE2_14B
from wan_core.models.wan.families.family import Task

BASE = Task(
    name="animate2-14B", family="animate2", release="Wan 2.2", in_channels=36, image="channels", image_dim=1280,
    driven_by="WanAnimate2ToVideo",
    vae=VAE_21, full_size=ANIMATE2_14B, two_experts=False, boundary=0.0, shift=5.0, steps=40,
    guidance_high=3.0, guidance_low=3.0, width=1280, height=720, frames=81, fps=24,
)  # fmt: skip
DISTILLED = replace(BASE, name="animate2-14B-distilled", distilled=True, steps=10, guidance_high=1.0, guidance_low=1.0)
# the embedded model, see docs/design.md
TINY = replace(
    BASE, name="animate2-tiny", release="embedded", image_dim=80, full_size=None, steps=20, guidance_high=1.0,
    guidance_low=1.0, width=96, height=96, frames=17, fps=8, negative_prompt="",
)  # fmt: skip
TASKS = (BASE, DISTILLED, TINY)
