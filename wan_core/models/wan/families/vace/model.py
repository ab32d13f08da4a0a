"""The transformer of VACE: text-to-video with blocks of its own, which see a control video.

A VACE block runs with every fifth block. The blocks form a chain: the first one starts from the control video and the
noisy video, each adds what it found to the tokens of the video. Several control videos each have a chain.

Legend: B batch, N control videos, L tokens, C channels, T/Y/X latent frames, rows, columns.
Source: VACE/vace/models/wan/modules/model.py; ComfyUI's VaceWanModel for several control videos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wan_core.models.wan.families.vace import VaceConfig
from wan_core.models.wan.layers import Block
from wan_core.models.wan.model import WanModel, patches_of
from wan_core.models.wan.prepared_text import PreparedText, own_inputs, own_rows
from wan_core.models.wan.runners import BlockInputs
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.quant.linear import Linear


@dataclass(frozen=True)
class Control:
    """The control videos of a batch.

    patches: [B or 1, N, L, channels of a patch]; fewer rows serve several branches of the same videos. None: nothing
    controls the video. scale: float32 [B or 1, N]. chains: of the forward that runs: tokens [B, L, C] of every chain,
    as its last block left them.
    """

    patches: Tensor | None
    scale: Tensor
    videos: int
    chains: list[Tensor] = field(default_factory=list)

    def rows(self, start: int, stop: int) -> Control:
        patches = None if self.patches is None else own_rows(self.patches, self.videos, start, stop)
        scale = own_rows(self.scale, self.videos, start, stop)
        return replace(self, patches=patches, scale=scale, videos=stop - start)


class VaceBlock(Block):
    """A block of a chain. The first one also has `before_proj`, for the control video."""

    def __init__(self, config: VaceConfig, first: bool) -> None:
        super().__init__(config)
        self.before_proj = Linear(config.dim, config.dim) if first else None
        self.after_proj = Linear(config.dim, config.dim)

    def forward(self, x: Tensor, *given: Any, start: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the block on the chain x [B, L, C] -> the chain, and what it adds to the video. start: tokens of
        the noisy video; x are then those of the control video, [B or fewer, L, C]."""
        if start is not None:
            assert self.before_proj is not None
            added = self.before_proj(x)
            rows = 1 if len(added) == 1 else len(start) // len(added)
            x = start + added.repeat(rows, 1, 1)
        x = super().forward(x, *given)
        return x, self.after_proj(x)


class VaceModel(WanModel):
    config: VaceConfig

    def __init__(self, config: VaceConfig) -> None:
        super().__init__(config)
        blocks = nn.ModuleList(VaceBlock(config, first=n == 0) for n in range(config.vace_blocks))
        self.vace_blocks = cast("list[VaceBlock]", blocks)
        self.vace_patch_embedding = nn.Conv3d(config.vace_channels, config.dim, config.patch_size, config.patch_size)

    def prepare_text(
        self,
        context: Tensor,
        image: Tensor | None = None,
        control: Tensor | None = None,
        control_scale: float | Sequence[float] | Tensor = 1.0,
    ) -> PreparedText:
        """Text rows [B, S, text_dim] -> keys and values of every block and then of every VACE block, and the control.

        control: [1 or B, 96, T, Y, X]: normalised latents of what stays and of what changes, and the mask; or several
        such videos, [1 or B, N, 96, T, Y, X]. None: the VACE blocks do not run. control_scale: how much each counts, a
        number for all, or one for each: [N] or [1 or B, N].
        """
        embedded = self.embed_text(context, image)
        keys_values = [self._keys_values(layer, embedded) for layer in range(len(self.blocks))]
        weights = self.runners.weights
        for n, block in enumerate(self.vace_blocks):
            weights.enter(n * self.config.vace_every, text=True)
            keys_values.append(block.cross_attn.kv(*embedded))
            weights.leave(n * self.config.vace_every)
        return PreparedText(tuple(keys_values), self.prepare_control(control, control_scale, len(context)))

    def prepare_control(self, control: Tensor | None, scale: float | Sequence[float] | Tensor, videos: int) -> Control:
        weight = self.vace_patch_embedding.weight
        scales = torch.as_tensor(scale, dtype=torch.float32, device=weight.device)
        scales = scales if scales.ndim == 2 else scales.reshape(1, -1)
        if control is None:
            return Control(None, scales, videos)
        control = control[:, None] if control.ndim == 5 else control
        each = patches_of(control.to(weight.device, weight.dtype).flatten(0, 1), self.config.patch_size)
        return Control(each.unflatten(0, control.shape[:2]), scales.expand(-1, control.shape[1]), videos)

    def run_blocks(self, inputs: BlockInputs) -> Tensor:
        own = replace(own_inputs(inputs.text, Control), chains=[])
        return super().run_blocks(replace(inputs, text=inputs.text._replace(own=own)))

    def run_block(self, layer: int, tokens: Tensor, inputs: BlockInputs, own: object | None = None) -> Tensor:
        control, factors = own_inputs(inputs.text, Control), inputs.info.control
        if control.patches is None or layer % self.config.vace_every or (factors and not any(factors)):
            return super().run_block(layer, tokens, inputs, own)
        start = tokens if layer == 0 else None
        if start is not None:
            control.chains[:] = self.embed_control(control.patches, inputs.order)
        number = layer // self.config.vace_every
        block = self.vace_blocks[number]
        # What was chosen for the block beside it.
        block.self_attn.attend, block.parts = self.blocks[layer].self_attn.attend, self.blocks[layer].parts
        kv, added = inputs.text.keys_values[len(self.blocks) + number], []
        factors = (1.0,) if factors is None else factors
        factors = factors * len(control.chains) if len(factors) == 1 else factors
        for n, chain in enumerate(control.chains):
            if not factors[n]:  # what it would add is zero
                continue
            call = AttentionCall(layer, inputs.sparse, inputs.lengths, own)
            chain, hint = block(chain, inputs.modulation, inputs.rope, kv, call, inputs.bias, start=start)
            control.chains[n] = chain
            scale = control.scale[0, n] if len(control.scale) == 1 else control.scale[:, n, None, None]
            added.append(hint.mul_(scale if factors[n] == 1 else scale * factors[n]))
        tokens = super().run_block(layer, tokens, inputs, own)  # last: it may overwrite what the chains start from
        for hint in added:
            tokens.add_(hint)
        return tokens

    def embed_control(self, patches: Tensor, order: Tensor | None) -> list[Tensor]:
        """Tokens [B or fewer, L, C] of each control video. order: which tokens of the video are wanted."""
        conv = self.vace_patch_embedding
        some = patches if order is None else patches[:, :, order]
        return [F.linear(one, conv.weight.flatten(1), conv.bias) for one in some.unbind(1)]
