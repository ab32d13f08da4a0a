"""The transformer of Animate-2: Wan 2.1 image-to-video, whose frames also attend to those of a driving video.

The same weights run over the driving video first, at timestep 1 and beside the video's columns. The keys and values of
every block are kept; they do not depend on the step.

Legend: B batch, L tokens, M tokens of the driving video, T/Y/X latent frames, rows, columns, S text rows, N image
tokens, H heads, D head dim.
Source: ComfyUI's model_animate2.py, diffusers' transformer_wan_animate_2.py, LightX2V's infer/animate2.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wan_core.models.wan.families.animate2 import ANIMATE2, FORMS, Animate2Config
from wan_core.models.wan.families.animate2.attention import (
    DeviceLayers,
    Driven,
    DrivenAttention,
    HostLayers,
    Recording,
    choose_form,
)
from wan_core.models.wan.families.wan.model import ImageWanModel
from wan_core.models.wan.layers import rope_table
from wan_core.models.wan.prepared_text import PreparedText
from wan_core.models.wan.runners import SINGLE_FORWARD, BlockInputs, Place
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.attention.sdpa import SDPA

log = logging.getLogger(__name__)
DRIVING_TIMESTEP = 1.0


@dataclass(frozen=True)
class Driving:
    """What drives the videos of a batch.

    layers: keys and values [B or 1, M, H, D] of every block; None: nothing drives them. unconditional: of each video;
    one value stands for all. stays: the same on the device, bool [B, 1, 1], where videos differ: copied there once, and
    not by every block.
    """

    layers: DeviceLayers | HostLayers | None = None
    log_scale: float = 0.0
    reference_strength: float = 1.0
    unconditional: tuple[bool, ...] = (False,)
    videos: int = 1
    stays: Tensor | None = None

    def rows(self, start: int, stop: int) -> Driving:
        """Fewer driving videos than videos serve several branches."""
        layers = self.layers
        if layers is not None and layers.videos == self.videos:
            layers = layers.rows(start, stop)
        few = self.unconditional if len(self.unconditional) == 1 else self.unconditional[start:stop]
        stays = None if self.stays is None else self.stays[start:stop]
        return replace(self, layers=layers, unconditional=few, videos=stop - start, stays=stays)

    def at(self, layer: int, frame: int) -> Driven:
        """What attention of a layer reads."""
        keys, values = (None, None) if self.layers is None else self.layers.at(layer)
        return Driven(frame, keys, values, self.log_scale, self.reference_strength)


class Recorded(Recording):
    """A `Recording` as the blocks' own inputs."""

    def rows(self, start: int, stop: int) -> Recorded:
        return self


class Animate2Model(ImageWanModel):
    """An `ImageWanModel` that takes a driving video, `pose`, beside the CLIP features `image`."""

    config: Animate2Config

    def __init__(self, config: Animate2Config) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.self_attn.attend = self.own_attention(SDPA)

    def own_attention(self, attend: Attention) -> Attention:
        return attend if isinstance(attend, DrivenAttention) else DrivenAttention(attend)

    def prepare_text(
        self,
        context: Tensor,
        image: Tensor | None = None,
        pose: Tensor | None = None,
        pose_image: Tensor | None = None,
        pose_context: Tensor | None = None,
        log_scale: float = 0.0,
        unconditional: bool | Sequence[bool] = False,
        pose_strength: float = 1.0,
        reference_strength: float = 1.0,
    ) -> PreparedText:
        """Text rows [B, S, text_dim] -> keys and values of every block, and those of the driving video.

        image: CLIP features [B, N, image_dim] of the reference picture. pose: [1 or B, 36, T - 1, Y, X], latents of the
        driving video, ones, the same latents; None: nothing drives the video. pose_image: CLIP features of its first
        frame (default: `image`). pose_context: text rows for it (default: `context`). log_scale: added to the scores of
        the keys of the first frame after the reference: 0, or -1.3 for distilled weights. unconditional: the forward of
        these videos, or of each of them, is the one without the prompt. pose_strength, reference_strength: factors on
        the values of the driving video and of the reference. Raises ValueError.
        """
        prepared, videos = super().prepare_text(context, image), len(context)
        without = (unconditional,) if isinstance(unconditional, bool) else tuple(unconditional)
        stays = None
        if len(without) > 1:
            stays = torch.tensor(without, device=self.patch_embedding.weight.device)[:, None, None]
        layers, passes = None, 0
        if pose is not None:
            assert image is not None  # or `embed_text` would have raised
            text = context if pose_context is None else pose_context
            seen = image if pose_image is None else pose_image
            pose, text, seen = same_rows(videos, pose, text, seen)
            own = pose_context is not None or pose_image is not None
            text = super().prepare_text(text, seen) if own else prepared
            layers, passes = self.drive(pose, text, pose_strength), len(pose)
        driving = Driving(layers, log_scale, reference_strength, without, videos, stays)
        return prepared._replace(own=driving, passes=passes)

    def drive(self, pose: Tensor, text: PreparedText, strength: float) -> DeviceLayers | HostLayers:
        """The pass over driving videos [B, 36, T, Y, X]: keys and values [B, M, H, D] of every block, values times
        `strength`."""
        weight = self.patch_embedding.weight
        pose = pose.to(weight.device)
        grid = self.token_grid(pose)
        _, modulation = self.embed_time(torch.full((len(pose),), DRIVING_TIMESTEP, device=weight.device))
        # One frame later, because the video begins with the reference, and to the right of the video.
        rope = rope_table(grid, self.config.rope_axes, weight.device, start=(1, 0, grid[2]))
        tokens = self.embed_patches(pose)
        latents = (len(pose), 0, pose.shape[2] + 1, *pose.shape[3:])
        forms = ANIMATE2.prepared_forms(self.config, latents, tokens.element_size())
        beside = tokens.shape[0] * (tokens.shape[1] + grid[1] * grid[2])
        form = choose_form(forms, self.prepared_form, beside, tokens.shape[2], weight.device)
        if form != FORMS[0]:
            tell = log.warning if form.fp8 else log.info
            size = forms[0].device / 2**30
            tell("keys and values of the driving video (%.1f GiB) are kept %s", size, form.words())
        recorded = Recorded(form=form, factor=strength)
        inputs = BlockInputs(tokens, modulation, rope, text._replace(own=recorded), SINGLE_FORWARD, grid)
        self.runners(inputs, self.run_blocks, {Place.SCALES, Place.SHARDS})
        layers = [recorded.layers[layer] for layer in range(len(self.blocks))]
        return HostLayers(layers, weight.device) if form.on_host else DeviceLayers(layers)

    def run_block(self, layer: int, tokens: Tensor, inputs: BlockInputs, own: object | None = None) -> Tensor:
        driving = inputs.text.own
        if isinstance(driving, Recorded):
            return super().run_block(layer, tokens, inputs, driving)
        assert isinstance(driving, Driving)
        skipped = driving.unconditional if layer == self.config.unconditional_skips else (False,)
        if all(skipped):
            return tokens
        own = driving.at(layer, inputs.grid[1] * inputs.grid[2])
        if not any(skipped):
            return super().run_block(layer, tokens, inputs, own)
        assert driving.stays is not None
        before = tokens.clone()
        return torch.where(driving.stays, before, super().run_block(layer, tokens, inputs, own))


def same_rows(videos: int, *tensors: Tensor) -> list[Tensor]:
    """Driving videos, and the text and CLIP features that belong to them, with a row each for the largest number of
    them. Branches of the same videos follow one another. Raises ValueError."""
    rows = max(map(len, tensors))
    if videos % rows or any(rows % len(x) for x in tensors):
        raise ValueError(
            f"driving videos, text and CLIP features for {', '.join(str(len(x)) for x in tensors)} videos given, and "
            f"{videos} videos: give one of each, or one for every video"
        )
    return [x.repeat(rows // len(x), *[1] * (x.ndim - 1)) for x in tensors]
