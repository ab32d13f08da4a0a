"""What a VACE transformer is beside a text-to-video transformer, as plain numbers. Imports no torch.

Source: VACE/vace/models/wan/modules/model.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from wan_core.models.wan.config import T2V_1_3B, T2V_A14B, DiTConfig

STRENGTH = "vace_strength"  # in CONDITIONING: of each control video, a list


@dataclass(frozen=True, kw_only=True)
class VaceConfig(DiTConfig):
    """A transformer that also takes a control video.

    vace_every: a VACE block runs with blocks 0, `vace_every`, 2 * `vace_every`, ... vace_channels: of the control
    video.
    """

    family: str = "vace"
    vace_every: int = 5
    vace_channels: int = 96

    @property
    def vace_blocks(self) -> int:
        return -(-self.num_layers // self.vace_every)

    def modules_of(self, layer: int) -> tuple[str, ...]:
        own = () if layer % self.vace_every else (f"vace_blocks.{layer // self.vace_every}",)
        return (*super().modules_of(layer), *own)


def with_vace(config: DiTConfig, every: int, channels: int = VaceConfig.vace_channels) -> VaceConfig:
    """The VACE transformer that is made of a text-to-video transformer."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(DiTConfig)}
    return VaceConfig(**{**fields, "family": "vace"}, vace_every=every, vace_channels=channels)


def prepared_bytes(config: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
    """Of the text of both prompts in VACE blocks, the control video, its chain and what that adds, for latents
    [B, C, T, Y, X]."""
    assert isinstance(config, VaceConfig)
    B, _, T, Y, X = latents
    text = 2 * 2 * config.vace_blocks * config.context_len * config.dim
    return (text + config.vace_channels * T * Y * X + 2 * B * config.tokens(T, Y, X) * config.dim) * itemsize


VACE_14B = with_vace(T2V_A14B, 5)
VACE_1_3B = with_vace(T2V_1_3B, 2)
