"""The wav2vec 2.0 encoder of speech: what goes into every layer, and what comes out of the last.

Legend: B batch, N samples, n frames (50 a second), C channels, W layers.

Parameter names are Hugging Face's, without `wav2vec2.`; the weight of the positional convolution is in one piece.
Source: transformers' modeling_wav2vec2.py (`do_stable_layer_norm`, `feat_extract_norm` "layer").
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    def states(self) -> tuple[int, int]:
        """How many states it gives, what goes into each layer and comes out of the last, and how wide they are."""
        return self.num_layers + 1, self.dim

    @property
    def least_samples(self) -> int:
        """Samples that become one frame."""
        count = 1
        for kernel, stride in zip(reversed(self.kernels), reversed(STRIDES), strict=True):
            count = (count - 1) * stride + kernel
        return count


XLSR_LARGE = SpeechConfig()


CONVOLUTIONS = 4  # tensors as large as the first convolution's output, that are there at the same time
WORKSPACE = 16 * 2**20  # of cuBLAS and cuDNN


class ConvLayer(nn.Module):
    """[B, C, N] -> [B, conv_dim, n]."""

    def __init__(self, channels: int, config: SpeechConfig, kernel: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(channels, config.conv_dim, kernel, stride)
        self.layer_norm = nn.LayerNorm(config.conv_dim, config.eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.layer_norm(self.conv(x).transpose(1, 2))).transpose(1, 2)


class FeatureExtractor(nn.Module):
    """Samples [B, N] -> [B, n, conv_dim]."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        channels = (1, *[config.conv_dim] * (len(config.kernels) - 1))
        layers = zip(channels, config.kernels, STRIDES, strict=True)
        self.conv_layers = nn.ModuleList(ConvLayer(c, config, kernel, stride) for c, kernel, stride in layers)

    def forward(self, samples: Tensor) -> Tensor:
        x = samples[:, None]
        for layer in self.conv_layers:
            x = layer(x)
        return x.transpose(1, 2)


class FeatureProjection(nn.Module):
    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.conv_dim, config.eps)
        self.projection = nn.Linear(config.conv_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(self.layer_norm(x))


class PositionalConv(nn.Module):
    """A grouped convolution over time that says where a frame is. Its kernel is even, so there is a frame too many."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.conv = nn.Conv1d(
            config.dim, config.dim, config.position_kernel, padding=config.position_kernel // 2, groups=GROUPS
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.conv(x.transpose(1, 2))[..., : x.shape[1]]).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(config.dim, config.dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.intermediate_dense = nn.Linear(config.dim, config.ffn_dim)
        self.output_dense = nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_dense(F.gelu(self.intermediate_dense(x)))


class EncoderLayer(nn.Module):
    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config)
        self.layer_norm = nn.LayerNorm(config.dim, config.eps)
        self.feed_forward = FeedForward(config)
        self.final_layer_norm = nn.LayerNorm(config.dim, config.eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.layer_norm(x))
        return x + self.feed_forward(self.final_layer_norm(x))


class Encoder(nn.Module):
    """[B, n, C] -> what goes into each layer, and the normalised output of the last."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.pos_conv_embed = PositionalConv(config)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.layer_norm = nn.LayerNorm(config.dim, config.eps)

    def forward(self, x: Tensor) -> list[Tensor]:
        x, states = x + self.pos_conv_embed(x), []
        for layer in self.layers:
            states.append(x)
            x = layer(x)
        return [*states, self.layer_norm(x)]


class SpeechEncoder(nn.Module):
    """Features of speech. Weights come from `wan_core.checkpoint.load.load_speech`; the reference computes in
    float32."""

    def __init__(self, config: SpeechConfig) -> None:
        super().__init__()
        self.config = config
        self.feature_extractor = FeatureExtractor(config)
        self.feature_projection = FeatureProjection(config)
        self.encoder = Encoder(config)

    def forward(self, samples: Tensor) -> Tensor:
        """samples [B, N], mono at 16,000 a second, of any loudness -> [B, W + 1, n, C]. Raises ValueError for fewer
        samples than make a frame."""
        least = self.config.least_samples
        if samples.ndim != 2 or samples.shape[1] < least:
            raise ValueError(f"sound of {list(samples.shape)} given: [batch, samples] of {least} and more are allowed")
        x = normalised(samples.float()).to(self.feature_projection.projection.weight)
        return torch.stack(self.encoder(self.feature_projection(self.feature_extractor(x))), 1)


def normalised(samples: Tensor) -> Tensor:
    """[B, N] with mean 0 and variance 1 in every row."""
    centred = samples - samples.mean(1, keepdim=True)
    return centred / (centred.square().mean(1, keepdim=True) + 1e-7).sqrt()


@lru_cache
def encoding_bytes(config: SpeechConfig, seconds: float) -> int:
    """The device's memory that encoding a sound takes, all in float32: weights, the samples and a copy with mean 0
    and variance 1, and the first convolution with its norm and activation, or the states of all layers and their
    stack."""
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in SpeechEncoder(config).parameters())
    samples, frames = seconds * SAMPLE_RATE, seconds * FRAMES_PER_SECOND
    first = CONVOLUTIONS * config.conv_dim * samples / STRIDES[0]
    states = frames * (2 * (config.num_layers + 1) * config.dim + 2 * config.ffn_dim)
    return int(4 * (weights + 2 * samples + max(first, states))) + WORKSPACE
