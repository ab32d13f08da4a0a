"""The family `s2v`: Wan2.2-S2V-14B, a picture of a person who speaks or sings what an audio file says.

| file | what it holds |
|---|---|
| `model` | the transformer (torch) |
| `tokens` | tokens of the sound and of frames that came before, attention to the sound, all positions (torch) |
| `inputs` | what a sound, ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |

This file imports no torch.

Source: Wan2.2/wan/modules/s2v/model_s2v.py, wan/configs/wan_s2v_14B.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wan_core.config import Request
from wan_core.config.checks import OptionError, UserError
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import T2V_A14B, DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.clips import Clip, ClipRules, whole_latents
from wan_core.models.wan.families.driven import DrivenFamily
from wan_core.models.wan.families.family import Hear, InputReaders, VideoSize
from wan_core.models.wan.families.plain import Shapes
from wan_core.models.wan.families.task import Task

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.media.fit import Pixels
    from wan_core.models.vae.vae import VideoVAE
    from wan_core.models.wan.families.media import Media
    from wan_core.models.wan.model import WanModel

INJECT_AFTER = (0, 4, 8, 12, 16, 20, 24, 27, 30, 33, 36, 39)  # blocks after which the sound is attended to
AUDIO_FRAMES = 4  # of a latent frame
COMFYUI_POSITIONS = "wancore_comfyui_positions"  # in CONDITIONING: motion frames stand where ComfyUI has them
MOTION_FRAMES = (16, 2, 1)  # latent frames that are read by fours, by twos and alone, the oldest first
MOTION_PIXELS = 73  # video frames that become those
LONGER = 3  # of the first clip so many frames are left out: they show the picture, before it moves
LEAST_SIDE = 64  # pixels in the largest patch of motion frames; sizes of whole ones lose nothing


@dataclass(frozen=True, kw_only=True)
class S2VConfig(DiTConfig):
    """A transformer that also takes features of speech, a reference picture, frames that came before, and a pose.

    audio_layers, audio_dim: of the features. audio_tokens: of a latent frame; a token for padding is one more.
    injectors: how many of `INJECT_AFTER` it has.
    """

    family: str = "s2v"
    audio_layers: int = 25
    audio_dim: int = 1024
    audio_tokens: int = 4
    pose_channels: int = 16
    injectors: int = len(INJECT_AFTER)

    def tokens(self, frames: int, rows: int, columns: int) -> int:
        """The largest number of tokens of a forward: the video, a reference and motion frames."""
        _, py, px = self.patch_size
        extra = extra_tokens((frames, rows // py, columns // px), reference=True, motion=True)
        return super().tokens(frames, rows, columns) + extra


S2V_14B = S2VConfig(**plain.fields_of(T2V_A14B))


def extra_tokens(grid: tuple[int, int, int], *, reference: bool, motion: bool) -> int:
    """Tokens beside those of a video of `grid` (token frames, rows, columns)."""
    _, Y, X = grid
    packed = Y * X + (Y // 2) * (X // 2) + 4 * (Y // 4) * (X // 4)
    return reference * Y * X + motion * packed


def padded_frames(frames: int, clip: int, overlap: int) -> int:
    """Frames of whole clips, of which the first has `clip` and each other one `LONGER` more, where a video is longer
    than one. Source: `generate` of Wan2.2/wan/speech2video.py, which also pads the others."""
    if frames <= clip:
        return whole_latents(frames)
    return clip + -(-(frames - clip) // (clip + LONGER)) * (clip + LONGER)


TASKS = (
    Task(name="s2v-14B", family="s2v", release="Wan 2.2", in_channels=16, image="none",
         driven_by="WanSoundImageToVideo",
         vae=VAE_21, full_size=S2V_14B, two_experts=False, boundary=0.0, shift=3.0, steps=40,
         guidance_high=4.5, guidance_low=4.5, width=832, height=480, frames=77, fps=16),
)  # fmt: skip


_OWN = re.compile(r"(trainable_cond_mask|cond_encoder|casual_audio_encoder|audio_injector|frame_packer)\..+")
_INJECTOR = re.compile(r"audio_injector\.injector\.(\d{1,3})\..+")
ENCODER = "casual_audio_encoder.encoder"
_TOP = (
    "trainable_cond_mask.weight",
    *plain.with_bias("cond_encoder"),
    "casual_audio_encoder.weights",
    *plain.with_bias(*(f"{ENCODER}.{name}.conv" for name in ("conv1_local", "conv1_global", "conv2", "conv3"))),
    *plain.with_bias(f"{ENCODER}.final_linear"),
    f"{ENCODER}.padding_tokens",
    *plain.with_bias(*(f"frame_packer.{name}" for name in ("proj", "proj_2x", "proj_4x"))),
)
_PARTS = (*plain.with_bias(*"qkvo"), "norm_q.weight", "norm_k.weight")


def injectors(names: Collection[str]) -> int:
    """One more than the highest number of an injector."""
    return max((int(match[1]) + 1 for name in names if (match := _INJECTOR.fullmatch(name))), default=0)


def official_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout; None where nothing is the family's own."""
    own = {name: name for name in names if _OWN.fullmatch(name)}
    if not any(name.startswith("casual_audio_encoder.") for name in own):
        return None
    return plain.with_own(own, names)


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
        count = injectors(names)
        return [
            *plain.parameter_names([], num_layers),
            *_TOP,
            *(f"audio_injector.injector.{n}.{part}" for n in range(count) for part in _PARTS),
            *plain.with_bias(*(f"audio_injector.injector_adain_layers.{n}.linear" for n in range(count))),
        ]

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

    def picture_bytes(self, width: int, height: int, frames: int, given: Collection[str]) -> int:
        """The frames before the clip are encoded first, and stay while poses are."""
        stay, encoded = (24 * MOTION_PIXELS, 60 * MOTION_PIXELS) if "carried" in given else (0, 0)
        return width * height * max(encoded, stay + (64 * frames if "pose_video" in given else 0))

    def load_media(
        self, request: Request, dit: DiTConfig, size: tuple[int, int], fps: int, clip: Clip, hear: Hear
    ) -> Media:
        from wan_core.models.wan.families.s2v.inputs import features_until

        assert request.audio is not None
        media = super().load_media(request, dit, size, fps, clip, hear)
        features = features_until(hear(request.audio), clip)
        return replace(media, more={"audio": lambda clip: features[..., clip.first : clip.end]})

    def inputs(self) -> InputReaders:
        from wan_core.models.wan.families.s2v.inputs import clip_inputs, read_conditioning

        return InputReaders(read_conditioning, clip_inputs)

    def speech_states(self, dit: DiTConfig) -> tuple[int, int]:
        assert isinstance(dit, S2VConfig)
        return dit.audio_layers, dit.audio_dim

    def clip_lead(self, vae: VideoVAE, media: Mapping[str, Tensor], clip: Clip) -> Tensor:
        """The reference before the first clip, the motion frames before others."""
        return vae.encode(media["carried"] if clip.number else media["reference"])


S2V = S2VFamily()
