"""What a wav2vec 2.0 speech encoder is, as plain numbers. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM = 64  # shapes do not say it
SAMPLE_RATE = 16000
STRIDES = (5, 2, 2, 2, 2, 2, 2)  # of the convolutions: 320 samples for a frame
FRAMES_PER_SECOND = SAMPLE_RATE // 320
GROUPS = 16  # of the positional convolution


@dataclass(frozen=True, kw_only=True)
class SpeechConfig:
    """A wav2vec 2.0 encoder whose convolutions and layers have norms in front, as the large multilingual ones have.

    Source: transformers' configuration of wav2vec2-large-xlsr-53-english, which Wan2.2-S2V uses.
    """

    dim: int = 1024
    ffn_dim: int = 4096
    num_layers: int = 24
    conv_dim: int = 512
    kernels: tuple[int, ...] = (10, 3, 3, 3, 3, 2, 2)
    position_kernel: int = 128
    eps: float = 1e-5

    @property
    def num_heads(self) -> int:
        return self.dim // HEAD_DIM

    @property
    def least_samples(self) -> int:
        """Samples that become one frame."""
        count = 1
        for kernel, stride in zip(reversed(self.kernels), reversed(STRIDES), strict=True):
            count = (count - 1) * stride + kernel
        return count


XLSR_LARGE = SpeechConfig()
