"""The tasks of Wan 2.1 and 2.2, and their defaults.

Source: Wan2.2/wan/configs/*.py; Wan2.1/generate.py, and its README.md for shift and guidance of 1.3B.
"""

from __future__ import annotations

from wan_core.models.vae.config import VAE_21, VAE_22
from wan_core.models.wan.config import I2V_14B, I2V_A14B, T2V_1_3B, T2V_A14B, TI2V_5B
from wan_core.models.wan.families.family import Task

TASKS = (
    Task(name="t2v-A14B", family="wan", release="Wan 2.2", in_channels=16, image="none",
         vae=VAE_21, full_size=T2V_A14B, two_experts=True, boundary=0.875, shift=12.0, steps=40,
         guidance_high=4.0, guidance_low=3.0, width=1280, height=720, frames=81, fps=16),
    Task(name="i2v-A14B", family="wan", release="Wan 2.2", in_channels=36, image="channels",
         vae=VAE_21, full_size=I2V_A14B, two_experts=True, boundary=0.9, shift=5.0, steps=40,
         guidance_high=3.5, guidance_low=3.5, width=1280, height=720, frames=81, fps=16),
    Task(name="ti2v-5B", family="wan", release="Wan 2.2", in_channels=48, image="first frame",
         vae=VAE_22, full_size=TI2V_5B, two_experts=False, boundary=0.0, shift=5.0, steps=50,
         guidance_high=5.0, guidance_low=5.0, width=1280, height=704, frames=121, fps=24),
    # Wan 2.1: one transformer for every step
    Task(name="t2v-14B", family="wan", release="Wan 2.1", in_channels=16, image="none",
         vae=VAE_21, full_size=T2V_A14B, two_experts=False, boundary=0.0, shift=5.0, steps=50,
         guidance_high=5.0, guidance_low=5.0, width=1280, height=720, frames=81, fps=16),
    Task(name="t2v-1.3B", family="wan", release="Wan 2.1", in_channels=16, image="none",
         vae=VAE_21, full_size=T2V_1_3B, two_experts=False, boundary=0.0, shift=8.0, steps=50,
         guidance_high=6.0, guidance_low=6.0, width=832, height=480, frames=81, fps=16),
    Task(name="i2v-14B-480P", family="wan", release="Wan 2.1", in_channels=36, image="channels", image_dim=1280,
         vae=VAE_21, full_size=I2V_14B, two_experts=False, boundary=0.0, shift=3.0, steps=40,
         guidance_high=5.0, guidance_low=5.0, width=832, height=480, frames=81, fps=16),
    Task(name="i2v-14B-720P", family="wan", release="Wan 2.1", in_channels=36, image="channels", image_dim=1280,
         vae=VAE_21, full_size=I2V_14B, two_experts=False, boundary=0.0, shift=5.0, steps=40,
         guidance_high=5.0, guidance_low=5.0, width=1280, height=720, frames=81, fps=16),
    # the embedded model, see docs/design.md
    Task(name="t2v-tiny", family="wan", release="embedded", in_channels=16, image="none",
         vae=VAE_21, full_size=None, two_experts=True, boundary=0.875, shift=5.0, steps=20,
         guidance_high=3.0, guidance_low=3.0, width=96, height=96, frames=17, fps=8, negative_prompt=""),
    Task(name="i2v-tiny", family="wan", release="embedded", in_channels=36, image="channels",
         vae=VAE_21, full_size=None, two_experts=True, boundary=0.9, shift=5.0, steps=20,
         guidance_high=3.0, guidance_low=3.0, width=96, height=96, frames=17, fps=8, negative_prompt=""),
)  # fmt: skip
