"""The Wan 2.2 diffusion transformer: embed, run the blocks, project.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, L tokens, S text rows, H heads, D head dim,
F modulation rows per sample (1, or T when every latent frame has its own timestep).

Parameter names are the official ones, so official and ComfyUI checkpoints load as they are. Speed is applied from
outside through three seams: `SelfAttention.attend`, any `nn.Linear` by its qualified name, and `WanModel.run_blocks`.
Source: Wan2.2/wan/modules/model.py.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.layers import Block, Head, timestep_embedding
from wan_core.models.wan.rope import rope_table


class PreparedText(NamedTuple):
    """What a prompt is to one expert: cross-attention keys and values of every block, each [B, S, H, D], as
    `CrossAttention.kv` makes them."""

    keys_values: tuple[tuple[Tensor, ...], ...]

    def rows(self, start: int, stop: int) -> PreparedText:
        """Views of the prompts start..stop of the batch."""
        return PreparedText(tuple(tuple(t[start:stop] for t in kv) for kv in self.keys_values))


class WanModel(nn.Module):
    """Velocity of noisy latents. Built from a `DiTConfig`; weights come from `wan_core.load_dit`."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Conv3d(config.in_channels, config.dim, config.patch_size, config.patch_size)
        self.text_embedding = nn.Sequential(
            nn.Linear(config.text_dim, config.dim), nn.GELU(approximate="tanh"), nn.Linear(config.dim, config.dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(config.freq_dim, config.dim), nn.SiLU(), nn.Linear(config.dim, config.dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(config.dim, 6 * config.dim))
        self.blocks = cast("list[Block]", nn.ModuleList(Block(config) for _ in range(config.num_layers)))
        self.head = Head(config)
        self._rope: tuple[tuple[tuple[int, int, int], torch.device], Tensor] | None = None

    def forward(self, x: Tensor, timestep: Tensor, context: Tensor | PreparedText) -> Tensor:
        """Predict the velocity.

        x: [B, C_in, T, Y, X], any float dtype; Y and X multiples of the patch (2).
        timestep: [B] in 0..1000, or [B, T] where every latent frame has its own (TI2V image conditioning). Never bf16.
        context: text rows [B, S <= 512, text_dim], or what `prepare_text` made of them (once per prompt, not per step).
        Returns float32 [B, C_out, T, Y, X].
        """
        text = context if isinstance(context, PreparedText) else self.prepare_text(context)
        grid = self.token_grid(x)
        time, modulation = self.embed_time(timestep)
        tokens = self.run_blocks(self.embed_patches(x, grid), modulation, self.rope(grid, x.device), text)
        return self.unpatchify(self.head(tokens, time), grid)

    def run_blocks(self, tokens: Tensor, modulation: Tensor, rope: Tensor, text: PreparedText) -> Tensor:
        """A seam: sequence sharding, residual caches and streaming put a callable of their own in its place, on the
        instance, which calls the one that was there. `tokens` may be overwritten: who needs them later keeps a copy."""
        for block, kv in zip(self.blocks, text.keys_values, strict=True):
            tokens = block(tokens, modulation, rope, kv)
        return tokens

    def prepare_text(self, context: Tensor, image: Tensor | None = None) -> PreparedText:
        """Text rows [B, S, text_dim] -> keys and values of every block. image: CLIP features of the image, for models
        that take them."""
        embedded = self.embed_text(context, image)
        return PreparedText(tuple(block.cross_attn.kv(embedded) for block in self.blocks))

    def embed_text(self, context: Tensor, image: Tensor | None) -> Tensor:
        """[B, S, text_dim] -> [B, text_len, C]. Zero-padded before the embedding, and the padding is attended to, as in
        the reference: the model was trained so."""
        if image is not None:
            raise ValueError("CLIP features of an image given; this model takes none")
        rows, width = context.shape[1:]
        if width != self.config.text_dim or rows > self.config.text_len:
            raise ValueError(
                f"text conditioning of {rows} rows x {width} given; this model takes at most {self.config.text_len} "
                f"rows of {self.config.text_dim}. Encode the prompt with the text encoder that belongs to it."
            )
        weight = self.patch_embedding.weight
        context = F.pad(context.to(weight.device, weight.dtype), (0, 0, 0, self.config.text_len - rows))
        return self.text_embedding(context)

    def embed_time(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """timestep [B] or [B, T] -> float32 embedding [B, F, C] and modulation [B, F, 6, C].

        A row per sample, or per latent frame: never per token. float32 although the stored weights may be bf16: this
        feeds the modulation of every block, and there is one row of it.
        """
        if timestep.ndim == 1:
            timestep = timestep[:, None]
        first, _, second = self.time_embedding
        hidden = timestep_embedding(timestep, self.config.freq_dim)
        time = linear_fp32(F.silu(linear_fp32(hidden, first)), second)
        return time, linear_fp32(F.silu(time), self.time_projection[1]).unflatten(-1, (6, -1))

    def token_grid(self, x: Tensor) -> tuple[int, int, int]:
        """Token frames, rows, columns of latents x."""
        pt, py, px = self.config.patch_size
        channels, T, Y, X = x.shape[1:]
        if channels != self.config.in_channels or T % pt or Y % py or X % px:
            raise ValueError(
                f"latents of {channels} channels and {T} x {Y} x {X} given; this model takes {self.config.in_channels} "
                f"channels and sizes that are multiples of {pt} x {py} x {px}. Width and height in pixels must be "
                f"multiples of the VAE's stride times {px}."
            )
        return T // pt, Y // py, X // px

    def embed_patches(self, x: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """[B, C, T, Y, X] -> [B, L, dim]. The patch convolution does not overlap, so it is one matrix product.

        Cloned, because the product comes back as a view, and a compiler would compile the first block, which it enters,
        apart from the others.
        """
        (pt, py, px), (T, Y, X) = self.config.patch_size, grid
        weight = self.patch_embedding.weight
        patches = x.to(weight.dtype).unflatten(4, (X, px)).unflatten(3, (Y, py)).unflatten(2, (T, pt))
        patches = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)  # [B, L, C * pt * py * px]
        return F.linear(patches, weight.flatten(1), self.patch_embedding.bias).clone()

    def unpatchify(self, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """[B, L, pt * py * px * C] -> [B, C, T, Y, X]."""
        x = tokens.reshape(tokens.shape[0], *grid, *self.config.patch_size, self.config.out_channels)
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Token frames, rows, columns of the forward that is going on, or was last."""
        assert self._rope is not None, "before the first forward"
        return self._rope[0][0]

    def rope(self, grid: tuple[int, int, int], device: torch.device) -> Tensor:
        """The rotation table of `grid`, kept until another grid is asked for (39 MB at 720p)."""
        key = (grid, device)
        if self._rope is None or self._rope[0] != key:
            self._rope = (key, rope_table(grid, self.config.rope_axes, device))
        return self._rope[1]


def linear_fp32(x: Tensor, linear: nn.Module) -> Tensor:
    assert isinstance(linear, nn.Linear)
    return F.linear(x, linear.weight.float(), linear.bias.float())
