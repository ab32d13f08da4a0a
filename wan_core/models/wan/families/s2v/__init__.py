"""The family `s2v`: Wan2.2-S2V-14B, a picture of a person who speaks or sings what an audio file says.

| file | what it holds |
|---|---|
| `data` | the numbers of an architecture, the task, the names of parameters |
| `model` | the transformer (torch) |
| `tokens` | tokens of the sound and of frames that came before, attention to the sound, all positions (torch) |
| `inputs` | what a sound, ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wan_core.config import Request
from wan_core.config.checks import OptionError, UserError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.clips import Clip, ClipRules
from wan_core.models.wan.families.driven import DrivenFamily
from wan_core.models.wan.families.family import Choice, Clues, Hear, Inputs, Task, VideoSize
from wan_core.models.wan.families.plain import Shapes
from wan_core.models.wan.families.s2v.data import (
    COMFYUI_POSITIONS,
    ENCODER,
    INJECT_AFTER,
    LEAST_SIDE,
    LONGER,
    MOTION_PIXELS,
    TASKS,
    S2VConfig,
    injectors,
    official_names,
    padded_frames,
    parameter_names,
)

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.media.fit import Pixels
    from wan_core.models.vae.vae import VideoVAE
    from wan_core.models.wan.families.media import Media
    from wan_core.models.wan.model import WanModel

LEAST_SECONDS = 0.1  # of a sound


class S2VFamily(DrivenFamily):
    name = "s2v"
    tasks = TASKS
    layouts = (("official", official_names),)
    conditioning_keys = frozenset(
        {"audio_embed", "reference_latents", "reference_motion", "control_video", COMFYUI_POSITIONS}
    )
    branch_keys = frozenset({"audio_embed", "reference_latents"})
    clips = ClipRules(overlaps=(0,), always=True, longer=LONGER, history=MOTION_PIXELS, padded=padded_frames)
    leads = True
    needs = ("reference", "audio")
    takes = ("pose_video",)
    length_of = "audio"
    size_step = LEAST_SIDE
    seen_fields = ()

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        return parameter_names(names, num_layers)

    def read_config(self, shapes: Shapes, metadata: Mapping[str, str]) -> S2VConfig:
        wan = plain.read_config(shapes, metadata)
        count = injectors(shapes)
        if not 0 < count <= len(INJECT_AFTER) or INJECT_AFTER[count - 1] >= wan.num_layers:
            places = ", ".join(map(str, INJECT_AFTER))
            raise UserError(
                f"its {count} audio injectors do not fit {wan.num_layers} blocks: they belong behind blocks {places}"
            )
        local, width, _ = plain.shape_of(shapes, f"{ENCODER}.conv1_local.conv.weight", 3)
        one = plain.shape_of(shapes, f"{ENCODER}.conv1_global.conv.weight", 3)[0]
        if local % one:
            raise UserError(f"its audio encoder has {local} channels, which {one} do not divide.")
        return S2VConfig(
            **plain.fields_of(wan),
            audio_layers=plain.shape_of(shapes, "casual_audio_encoder.weights", 4)[1],
            audio_dim=width,
            audio_tokens=local // one,
            pose_channels=plain.shape_of(shapes, "cond_encoder.weight", 5)[1],
            injectors=count,
        )

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        if not clues.alone:
            raise OptionError("S2V is one transformer for all steps: leave the second file out")
        return Choice(TASKS[0])

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        from wan_core.models.wan.families.s2v.model import S2VModel

        return S2VModel

    def prepared_bytes(self, dit: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
        """Keys, values, shift and scale of every injector, the rows of modulation in float32, twice in a block, and the
        hidden layer of a feed-forward that does not run in halves."""
        assert isinstance(dit, S2VConfig)
        B, _, T, Y, X = latents
        tokens, video = dit.tokens(T, Y, X), DiTConfig.tokens(dit, T, Y, X)
        injected = dit.injectors * 2 * T * dit.dim * ((dit.audio_tokens + 1) * itemsize + 4)
        rows = tokens // math.gcd(video, tokens)
        return B * (2 * injected + 2 * rows * 6 * dit.dim * 4 + tokens * dit.ffn_dim * itemsize // 2)

    def video_size(self, request: Request, task: Task, multiple: int) -> VideoSize:
        size = super().video_size(request, task, multiple)
        if min(size.width, size.height) < LEAST_SIDE:
            raise OptionError(
                f"{size.width}x{size.height} given; {task.name} needs {LEAST_SIDE} pixels and more in each direction"
            )
        return size

    def whole_length(self, request: Request, task: Task) -> tuple[int, int]:
        """The video has all of its sound."""
        from wan_core.media.sound import read_sound

        assert request.audio is not None
        sound = read_sound(request.audio)
        if request.fps not in (None, task.fps):
            raise OptionError(f"{request.fps} frames per second given; {task.name} makes {task.fps}: leave --fps out")
        if sound.seconds < LEAST_SECONDS:
            raise OptionError(
                f"{request.audio} has {sound.seconds:.3f} seconds of sound, and {LEAST_SECONDS} are needed"
            )
        return task.fps, -(-sound.samples.shape[1] * task.fps // sound.rate)

    def fit(self, pixels: Pixels, size: tuple[int, int]) -> Pixels:
        """Pictures cover the size, and what sticks out is cut off."""
        from wan_core.media.fit import fit_covering

        return fit_covering(pixels, size)

    def frames_of(self, clip: Clip, length: int) -> list[int]:
        """After the last drawn pose there are none."""
        return list(range(clip.first, min(clip.end, length)))

    def load_media(
        self, request: Request, dit: DiTConfig, size: tuple[int, int], fps: int, clip: Clip, hear: Hear
    ) -> Media:
        from wan_core.models.wan.families.s2v.inputs import features_until

        assert request.audio is not None
        media = super().load_media(request, dit, size, fps, clip, hear)
        features = features_until(hear(request.audio), clip)
        return replace(media, more={"audio": lambda clip: features[..., clip.first : clip.end]})

    def read_conditioning(
        self, task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]
    ) -> Inputs:
        from wan_core.models.wan.families.s2v.inputs import read_conditioning

        return read_conditioning(task, vae, extras, latent)

    def clip_inputs(
        self, task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
    ) -> Inputs:
        from wan_core.models.wan.families.s2v.inputs import clip_inputs

        return clip_inputs(task, vae, seen, media, clip)

    def speech_states(self, dit: DiTConfig) -> tuple[int, int]:
        assert isinstance(dit, S2VConfig)
        return dit.audio_layers, dit.audio_dim

    def clip_lead(self, vae: VideoVAE, media: Mapping[str, Tensor], clip: Clip) -> Tensor:
        """The reference before the first clip, the motion frames before others."""
        return vae.encode(media["carried"] if clip.number else media["reference"])


S2V = S2VFamily()
