"""The Wan 2.2 diffusion transformer: embed, run the blocks, project.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, L tokens, S text rows, H heads, D head dim,
F modulation rows per sample (1, or T when every latent frame has its own timestep).

Parameter names are the official ones, so official and ComfyUI checkpoints load as they are. Speed is applied from
outside through three seams: `SelfAttention.attend`, any linear by its qualified name, and `WanModel.runners`, the chain
around the loop over the blocks.
Source: Wan2.2/wan/modules/model.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.config import DiTConfig, PreparedForm
from wan_core.models.wan.layers import Block, Head, rope_table, timestep_embedding
from wan_core.models.wan.prepared_text import PreparedText
from wan_core.models.wan.runners import SINGLE_FORWARD, BlockInputs, ForwardInfo, RunnerChain
from wan_core.ops.attention.protocol import Attention, AttentionCall
from wan_core.ops.quant.linear import Linear

ROPES = 2  # rotation tables that are kept: clips of a long video have up to two lengths


class WanModel(nn.Module):
    """Velocity of noisy latents. Built from a `DiTConfig`; weights come from `wan_core.load_dit`.

    A family whose model takes more than text is a subclass. It overrides `prepare_text`, `embed`, `run_block` and
    `own_attention`, as far as it needs to. What drives a video is checked where it is read, by the `inputs` of the
    family.
    """

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Conv3d(config.in_channels, config.dim, config.patch_size, config.patch_size)
        self.text_embedding = nn.Sequential(
            Linear(config.text_dim, config.dim), nn.GELU(approximate="tanh"), Linear(config.dim, config.dim)
        )
        self.time_embedding = nn.Sequential(
            nn.Linear(config.freq_dim, config.dim), nn.SiLU(), nn.Linear(config.dim, config.dim)
        )
        self.time_projection = nn.Sequential(nn.SiLU(), nn.Linear(config.dim, 6 * config.dim))
        self.blocks = cast("list[Block]", nn.ModuleList(Block(config) for _ in range(config.num_layers)))
        self.stage: range | None = None  # the blocks that run here, where other ranks have the others
        self.prepared_form: PreparedForm | None = None  # that a memory plan has chosen
        self.head = Head(config)
        self.runners = RunnerChain()
        self._ropes: dict[tuple[object, ...], Tensor] = {}  # the one last asked for is last

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def layers(self) -> range:
        return self.stage or range(len(self.blocks))

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | Sequence[Tensor] | PreparedText,
        info: ForwardInfo = SINGLE_FORWARD,
        **inputs: Any,
    ) -> Tensor:
        """Predict the velocity.

        x: [B, C_in, T, Y, X], any float dtype; Y and X multiples of the patch (2).
        timestep: [B] in 0..1000, or [B, T] where every latent frame has its own (TI2V image conditioning). Never bf16.
        context: text rows [B, S, text_dim] or a list of [S, text_dim], or what `prepare_text` made of them (once
        per prompt, not per step).
        info: which forward of a run this is, for the runners.
        inputs: what `prepare_text` takes beside text, where it was not called before.
        Returns float32 [B, C_out, T, Y, X].
        """
        assert not (inputs and isinstance(context, PreparedText)), "give these inputs to `prepare_text`"
        if not isinstance(context, Tensor | PreparedText):
            context = torch.stack([F.pad(rows, (0, 0, 0, self.config.text_len - len(rows))) for rows in context])
        text = context if isinstance(context, PreparedText) else self.prepare_text(context, **inputs)
        grid = self.token_grid(x)
        time, modulation = self.embed_time(timestep)
        tokens = self.runners(self.block_inputs(x, modulation, text, info, grid), self.run_blocks)
        return self.unpatchify(self.head(self.video_tokens(tokens, grid), time), grid)

    def block_inputs(
        self, x: Tensor, modulation: Tensor, text: PreparedText, info: ForwardInfo, grid: tuple[int, int, int]
    ) -> BlockInputs:
        """What the blocks get. A family with tokens beside the video's puts them behind it, with the rows of the
        rotation table and of the modulation that are theirs."""
        rope = self.rope(grid, x.device)
        return BlockInputs(self.embed(x, grid, text), modulation, rope, text, info, grid)

    def video_tokens(self, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """The video's of the tokens [B, L, C] after all blocks."""
        return tokens

    def run_blocks(self, inputs: BlockInputs) -> Tensor:
        """The loop over the blocks, innermost in the chain of runners: tokens [B, L, C] after all of them."""
        tokens, weights, after_block = inputs.tokens, self.runners.weights, inputs.info.after_block
        if inputs.text.bias is not None:
            inputs = replace(inputs, bias=inputs.text.token_bias(inputs.grid, inputs.order, tokens.shape[1]))
        for layer in self.layers:
            weights.enter(layer)
            tokens = self.run_block(layer, tokens, inputs)
            weights.leave(layer, last=inputs.info.last)
            if after_block is not None:
                after_block()
        return tokens

    def run_block(self, layer: int, tokens: Tensor, inputs: BlockInputs, own: object | None = None) -> Tensor:
        """Tokens [B, L, C], which may be overwritten, after one block. Families that add something between blocks add
        it here. own: what a family's own attention reads."""
        call = AttentionCall(layer, inputs.sparse, inputs.lengths, own)
        kv = inputs.text.keys_values[layer]
        return self.blocks[layer](tokens, inputs.modulation, inputs.rope, kv, call, inputs.bias)

    def own_attention(self, attend: Attention) -> Attention:
        """The family's self-attention, of the backend `attend`, or that itself. Ranks exchange tokens around it."""
        return attend

    def embed(self, x: Tensor, grid: tuple[int, int, int], text: PreparedText) -> Tensor:
        """Latents [B, C_in, T, Y, X] -> tokens [B, L, C] for the blocks."""
        return self.embed_patches(x)

    def prepare_text(self, context: Tensor, image: Tensor | None = None) -> PreparedText:
        """Text rows [B, S, text_dim] -> keys and values of every block that runs here. image: CLIP features of the
        image, for models that take them."""
        embedded = self.embed_text(context, image)
        here = self.layers
        return PreparedText(tuple(self._keys_values(i, embedded) if i in here else () for i in range(len(self.blocks))))

    def embed_text(self, context: Tensor, image: Tensor | None) -> tuple[Tensor, ...]:
        """[B, S, text_dim] -> [B, text_len, C], what `CrossAttention.kv` takes. Zero-padded before the embedding, and
        the padding is attended to, as in the reference: the model was trained so. More rows are attended to as well, as
        in ComfyUI. Raises ValueError for rows of another width: texts come here from several sockets."""
        assert image is None, "this model takes no CLIP features of an image"
        rows, width = context.shape[1:]
        if width != self.config.text_dim:
            raise ValueError(
                f"text conditioning of {rows} rows x {width} given; this model takes rows of {self.config.text_dim}. "
                "Encode the prompt with the text encoder that belongs to it."
            )
        weight = self.patch_embedding.weight
        context = F.pad(context.to(weight.device, weight.dtype), (0, 0, 0, self.config.text_rows(rows) - rows))
        return (self.text_embedding(context),)

    def _keys_values(self, layer: int, embedded: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        weights = self.runners.weights
        weights.enter(layer, text=True)
        keys_values = self.blocks[layer].cross_attn.kv(*embedded)
        weights.leave(layer)
        return keys_values

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

    def embed_patches(self, x: Tensor) -> Tensor:
        """[B, C, T, Y, X] -> [B, L, dim].

        Cloned, because the product comes back as a view, and a compiler would compile the first block, which it enters,
        apart from the others.
        """
        return patch_product(x, self.patch_embedding).clone()

    def unpatchify(self, tokens: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """[B, L, pt * py * px * C] -> [B, C, T, Y, X]."""
        x = tokens.reshape(tokens.shape[0], *grid, *self.config.patch_size, self.config.out_channels)
        return x.permute(0, 7, 1, 4, 2, 5, 3, 6).flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def rope(self, grid: tuple[int, int, int], device: torch.device) -> Tensor:
        """The rotation table of `grid` (39 MB at 720p)."""
        return self.kept_table((grid, device), lambda: rope_table(grid, self.config.rope_axes, device))

    def kept_table(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        """The rotation table of `key`, made where it is none of the last `ROPES`."""
        table = self._ropes.pop(key, None)
        if table is None:
            while len(self._ropes) >= ROPES:
                del self._ropes[next(iter(self._ropes))]
            table = make()
        self._ropes[key] = table
        return table


def patch_product(x: Tensor, conv: nn.Conv3d) -> Tensor:
    """[B, C, T, Y, X] -> [B, L, dim]. A patch convolution does not overlap, so it is one matrix product."""
    return F.linear(patches_of(x.to(conv.weight.dtype), conv.kernel_size), conv.weight.flatten(1), conv.bias)


def patches_of(x: Tensor, sides: Sequence[int]) -> Tensor:
    """[B, C, T, Y, X] -> [B, L, C * pt * py * px]."""
    pt, py, px = sides
    patches = x.unflatten(4, (-1, px)).unflatten(3, (-1, py)).unflatten(2, (-1, pt))
    return patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)


def linear_fp32(x: Tensor, linear: nn.Module) -> Tensor:
    assert isinstance(linear, nn.Linear)
    return F.linear(x, linear.weight.float(), linear.bias.float())
