"""What an Animate transformer is beside a Wan 2.1 image-to-video transformer, as plain numbers. Imports no torch.

Source: Wan2.2/wan/modules/animate/model_animate.py, face_blocks.py, motion_encoder.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.models.wan.config import I2V_14B, DiTConfig

FACE_EVERY = 5  # the face is attended to after blocks 0, 5, 10, ...


@dataclass(frozen=True, kw_only=True)
class AnimateConfig(DiTConfig):
    """A transformer that also takes pose latents and the pixels of a face.

    motion_channels: of the motion encoder, at each of its sizes, the full one first.
    """

    family: str = "animate"
    pose_channels: int = 16
    motion_channels: tuple[int, ...] = (32, 64, 128, 256, 512, 512, 512, 512)
    motion_features: int = 512
    motion_directions: int = 20
    face_hidden: int = 1024
    face_tokens: int = 4  # of a latent frame; a token for padding is the fifth

    @property
    def face_size(self) -> int:
        """Pixels of a side of the face pictures: each stage of the motion encoder halves them, down to 4."""
        return 4 << (len(self.motion_channels) - 1)

    @property
    def face_adapters(self) -> int:
        return -(-self.num_layers // FACE_EVERY)


ANIMATE_14B = AnimateConfig(
    **{
        field: getattr(I2V_14B, field)
        for field in ("in_channels", "out_channels", "dim", "ffn_dim", "num_heads", "num_layers", "image_dim")
    }
)
