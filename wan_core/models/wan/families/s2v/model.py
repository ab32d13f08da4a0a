"""The transformer of Wan2.2-S2V-14B: Wan 2.1 text-to-video, whose frames speak.

Beside the video's tokens it has those of a reference picture and of the frames before the clip, which are modulated as
timestep 0 is. A pose video is added to the video's tokens; the sound is attended to after some of the blocks.

Legend: B batch, L tokens, T/Y/X latent frames, rows, columns, C channels, F modulation rows, A audio frames.
Source: Wan2.2/wan/modules/s2v/model_s2v.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from wan_core.models.wan.families.s2v import INJECT_AFTER, S2VConfig
from wan_core.models.wan.families.s2v.tokens import (
    AudioEncoder,
    AudioInjector,
    FramePacker,
    Injected,
    check_audio,
    position_table,
)
from wan_core.models.wan.model import WanModel, patch_product
from wan_core.models.wan.prepared_text import PreparedText, for_all, own_inputs, own_rows
from wan_core.models.wan.runners import BlockInputs, ForwardInfo

Grid = tuple[int, int, int]


class Sound(NamedTuple):
    """What drives the videos of a batch. Fewer of each serve several branches of the same videos, one serves all.

    audio: for every injector; None: nothing is heard. reference, motion, pose: latents. still: the modulation of
    timestep 0, float32 [1, 1, 6, C]. comfyui: motion frames have the positions that ComfyUI gives them.
    """

    audio: Sequence[Injected] | None
    reference: Tensor | None
    motion: Tensor | None
    pose: Tensor | None
    still: Tensor
    comfyui: bool
    videos: int

    def rows(self, start: int, stop: int) -> Sound:
        some = partial(own_rows, videos=self.videos, start=start, stop=stop)
        audio = None if self.audio is None else [Injected(*map(some, one)) for one in self.audio]
        reference, motion, pose = (None if x is None else some(x) for x in (self.reference, self.motion, self.pose))
        return Sound(audio, reference, motion, pose, self.still, self.comfyui, stop - start)


class S2VModel(WanModel):
    """A `WanModel` that takes features of speech, a `reference`, `motion` frames and a `pose` video."""

    config: S2VConfig

    def __init__(self, config: S2VConfig) -> None:
        super().__init__(config)
        self.trainable_cond_mask = nn.Embedding(3, config.dim)  # of the video, the reference, motion
        self.cond_encoder = nn.Conv3d(config.pose_channels, config.dim, config.patch_size, config.patch_size)
        self.casual_audio_encoder = AudioEncoder(config)  # the official name
        self.audio_injector = AudioInjector(config)
        self.frame_packer = FramePacker(config)

    def prepare_text(
        self,
        context: Tensor,
        image: Tensor | None = None,
        audio: Tensor | None = None,
        reference: Tensor | None = None,
        motion: Tensor | None = None,
        pose: Tensor | None = None,
        comfyui_positions: bool = False,
    ) -> PreparedText:
        """Text rows [B, S, text_dim] -> keys and values of every block, and what drives the video.

        audio: features [1 or B, 25, 1024, 4 T] of the clip's frames; None: nothing is heard. reference: normalised
        latents [1 or B, 16, 1, Y, X]; None: no reference. motion: of the frames before the clip, [1 or B, 16, Tm, Y,
        X]; None: no motion tokens. pose: [1 or B, 16, T, Y, X]; None: zeros. comfyui_positions: of motion frames, as
        ComfyUI has them. image: CLIP features, which this model does not take. Raises ValueError.
        """
        prepared, injected = super().prepare_text(context, image), None
        weight = self.patch_embedding.weight
        if audio is not None:
            check_audio(audio, self.config)
            injected = self.audio_injector.prepare(*self.casual_audio_encoder(audio.to(weight.device)))
        _, still = self.embed_time(torch.zeros(1, device=weight.device))
        own = Sound(injected, reference, motion, pose, still, bool(comfyui_positions), len(context))
        return prepared._replace(own=own)

    def block_inputs(
        self, x: Tensor, modulation: Tensor, text: PreparedText, info: ForwardInfo, grid: Grid
    ) -> BlockInputs:
        sound = own_inputs(text, Sound)
        tokens = self.embed(x, grid, text)
        motion = sound.motion is not None
        rope = self.positions(grid, x.device, sound.reference is not None, motion, motion and sound.comfyui)
        video, length = math.prod(grid), tokens.shape[1]
        return BlockInputs(tokens, groups(modulation, sound.still, video, length), rope, text, info, grid)

    def embed(self, x: Tensor, grid: Grid, text: PreparedText) -> Tensor:
        """Latents [B, 16, T, Y, X] -> tokens [B, L, C] of the video, the reference and the motion frames."""
        sound = own_inputs(text, Sound)
        tokens, mask = self.embed_patches(x), self.trainable_cond_mask.weight
        pose, bias = sound.pose, self.cond_encoder.bias
        assert bias is not None
        posed = bias if pose is None else patch_product(pose.to(tokens.device), self.cond_encoder)
        tokens += posed if pose is None else for_all(posed, len(tokens), "a pose")
        parts = [tokens.add_(mask[0])]
        if sound.reference is not None:
            still = patch_product(sound.reference.to(tokens.device), self.patch_embedding)
            parts.append(for_all(still + mask[1], len(tokens), "a reference", copies=True))
        if sound.motion is not None:
            motion = self.frame_packer(sound.motion.to(tokens.device))
            parts.append(for_all(motion + mask[2], len(tokens), "motion frames", copies=True))
        return torch.cat(parts, 1)

    def positions(self, grid: Grid, device: torch.device, reference: bool, motion: bool, comfyui: bool) -> Tensor:
        """The rotation table of a sequence."""
        make = partial(position_table, grid, self.config.rope_axes, device)
        key = (grid, device, reference, motion, comfyui)
        return self.kept_table(key, lambda: make(reference=reference, motion=motion, comfyui=comfyui))

    def video_tokens(self, tokens: Tensor, grid: Grid) -> Tensor:
        return tokens[:, : math.prod(grid)]

    def run_block(self, layer: int, tokens: Tensor, inputs: BlockInputs, own: object | None = None) -> Tensor:
        tokens = super().run_block(layer, tokens, inputs, own)
        audio = own_inputs(inputs.text, Sound).audio
        if audio is None or layer not in INJECT_AFTER[: self.config.injectors]:
            return tokens
        order = torch.arange(tokens.shape[1], device=tokens.device) if inputs.order is None else inputs.order
        number = INJECT_AFTER.index(layer)
        injected = Injected(*(for_all(x, len(tokens), "audio") for x in audio[number]))
        return self.audio_injector.add(number, tokens, injected, order // (inputs.grid[1] * inputs.grid[2]))


def groups(modulation: Tensor, still: Tensor, video: int, length: int) -> Tensor:
    """Modulation rows [B, F, 6, C] of a sequence in which the first `video` tokens have `modulation` [B, 1, 6, C] and
    the others `still`. Every row is for as many tokens: the largest number that divides both groups."""
    if video == length:
        return modulation
    unit = math.gcd(video, length)
    rows = modulation.expand(-1, video // unit, -1, -1)
    return torch.cat([rows, still.expand(len(modulation), (length - video) // unit, -1, -1)], 1)
