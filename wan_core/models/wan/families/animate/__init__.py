"""The family `animate`: Wan2.2-Animate-14B, a picture of a person moved by a pose video and a video of a face.

| file | what it holds |
|---|---|
| `model` | the transformer, what moves in pictures of a face, and attention to it (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |

This file imports no torch.

Source: Wan2.2/wan/configs/wan_animate_14B.py, wan/modules/animate; diffusers transformer_wan_animate.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wan_core.config import Request
from wan_core.config.checks import UserError
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import I2V_14B, DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.clips import ClipRules
from wan_core.models.wan.families.driven import DrivenFamily
from wan_core.models.wan.families.family import Assembled, InputReaders, Inputs
from wan_core.models.wan.families.plain import Shapes
from wan_core.models.wan.families.task import Task

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.models.wan.model import WanModel

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


ANIMATE_14B = AnimateConfig(**plain.fields_of(I2V_14B))


TASKS = (
    Task(name="animate-14B", family="animate", release="Wan 2.2", in_channels=36, image="channels", image_dim=1280,
         driven_by="WanAnimateToVideo",
         vae=VAE_21, full_size=ANIMATE_14B, two_experts=False, boundary=0.0, shift=5.0, steps=20,
         guidance_high=1.0, guidance_low=1.0, width=1280, height=720, frames=77, fps=30),
)  # fmt: skip


CONVS = "motion_encoder.enc.net_app.convs"
_OWN = re.compile(r"(motion_encoder|face_encoder|face_adapter|pose_patch_embedding)\..+")
_CONV = re.compile(r"motion_encoder\.enc\.net_app\.convs\.(\d{1,2})\..+")
CONSTANT = re.compile(rf"(.*\.)?{re.escape(CONVS)}\.\d+\.(conv2|skip)\.0\.kernel")  # a filter, the same in every file
_FUSER = (*plain.with_bias("linear1_kv", "linear1_q", "linear2"), "q_norm.weight", "k_norm.weight")
_TOP = (
    *plain.with_bias("pose_patch_embedding", *(f"face_encoder.{n}.conv" for n in ("conv1_local", "conv2", "conv3"))),
    *plain.with_bias("face_encoder.out_proj"),
    "face_encoder.padding_tokens",
    *plain.with_bias(*(f"motion_encoder.enc.fc.{n}" for n in range(5))),
    "motion_encoder.dec.direction.weight",
)
_STAGE = ("conv1.0.weight", "conv1.1.bias", "conv2.1.weight", "conv2.2.bias", "skip.1.weight")


def last_conv(names: Collection[str]) -> int:
    """The number of the motion encoder's last convolution."""
    return max((int(match[1]) for name in names if (match := _CONV.fullmatch(name))), default=8)


def official_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout, which is ComfyUI's too."""
    own = {name: name for name in names if _OWN.fullmatch(name) and not CONSTANT.fullmatch(name)}
    return plain.with_own(own, [name for name in names if not CONSTANT.fullmatch(name)])


def diffusers_names(names: Collection[str]) -> dict[str, str] | None:
    """Diffusers' `WanAnimateTransformer3DModel`, once `assembled` has put together what it splits."""
    last = max((int(match[1]) for name in names if (match := _RES_BLOCK.fullmatch(name))), default=-1) + 2
    own = {name: ours for name in names if (ours := _official(name, last))}
    return plain.with_own(own, names, plain.diffusers_names)


# ------------------------------------------------------------------------------------------------------------ Diffusers

_RES_BLOCK = re.compile(r"motion_encoder\.res_blocks\.(\d{1,2})\.(conv1|conv2|conv_skip)\.(weight|act_fn\.bias)")
_ADAPTER = re.compile(r"face_adapter\.(\d{1,3})\.(to_q|to_kv|to_out|norm_q|norm_k)\.(weight|bias)")
_STAGE_PARTS = {
    ("conv1", "weight"): "conv1.0.weight",
    ("conv1", "act_fn.bias"): "conv1.1.bias",
    ("conv2", "weight"): "conv2.1.weight",
    ("conv2", "act_fn.bias"): "conv2.2.bias",
    ("conv_skip", "weight"): "skip.1.weight",
}
_ADAPTER_PARTS = {
    "to_q": "linear1_q",
    "to_kv": "linear1_kv",
    "to_out": "linear2",
    "norm_q": "q_norm",
    "norm_k": "k_norm",
}
_LINES = (
    (re.compile(r"(pose_patch_embedding\.(?:weight|bias)|face_encoder\.(?:out_proj\.(?:weight|bias)|padding_tokens))"),
     r"\1"),
    (re.compile(r"face_encoder\.(conv1_local|conv2|conv3)\.(weight|bias)"), r"face_encoder.\1.conv.\2"),
    (re.compile(r"motion_encoder\.conv_in\.weight"), rf"{CONVS}.0.0.weight"),
    (re.compile(r"motion_encoder\.conv_in\.act_fn\.bias"), rf"{CONVS}.0.1.bias"),
    (re.compile(r"motion_encoder\.motion_network\.(\d)\.(weight|bias)"), r"motion_encoder.enc.fc.\1.\2"),
    (re.compile(r"motion_encoder\.motion_synthesis_weight"), "motion_encoder.dec.direction.weight"),
)  # fmt: skip


def _official(name: str, last: int) -> str | None:
    if match := _RES_BLOCK.fullmatch(name):
        part = _STAGE_PARTS.get((match[2], match[3]))
        return None if part is None else f"{CONVS}.{int(match[1]) + 1}.{part}"
    if match := _ADAPTER.fullmatch(name):
        return f"face_adapter.fuser_blocks.{match[1]}.{_ADAPTER_PARTS[match[2]]}.{match[3]}"
    if name == "motion_encoder.conv_out.weight":
        return f"{CONVS}.{last}.weight"
    return next((match.expand(ours) for theirs, ours in _LINES if (match := theirs.fullmatch(name))), None)


class AnimateFamily(DrivenFamily):
    name = "animate"
    tasks = TASKS
    layouts = (("official", official_names), ("diffusers", diffusers_names))
    constants = CONSTANT
    conditioning_keys = frozenset(
        {"concat_latent_image", "concat_mask", "clip_vision_output", "pose_video_latent", "face_video_pixels"}
    )
    branch_keys = frozenset({"face_video_pixels"})
    clips = ClipRules(overlaps=(1, 5), always=True, leading=1)
    takes = ("face_video", "background", "mask")
    together = ("background", "mask")
    settings = ("face_guidance",)

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        stages = last_conv(names)
        return [
            *plain.parameter_names([plain.IMAGE_PARAMETER], num_layers),
            *_TOP,
            f"{CONVS}.0.0.weight",
            f"{CONVS}.0.1.bias",
            *(f"{CONVS}.{n}.{name}" for n in range(1, stages) for name in _STAGE),
            f"{CONVS}.{stages}.weight",
            *(f"face_adapter.fuser_blocks.{n}.{name}" for n in range(-(-num_layers // FACE_EVERY)) for name in _FUSER),
        ]

    def assembled(self, shapes: Shapes) -> Mapping[str, Assembled]:
        """Diffusers splits keys and values of the face into two linears, and its biases of the motion encoder have one
        axis."""
        joined: dict[str, Assembled] = {}
        for name, shape in shapes.items():
            if match := re.fullmatch(r"((?:.*\.)?face_adapter\.\d{1,3}\.)to_k\.(weight|bias)", name):
                value = f"{match[1]}to_v.{match[2]}"
                if shapes.get(value) == shape:
                    joined[f"{match[1]}to_kv.{match[2]}"] = Assembled((name, value), (2 * shape[0], *shape[1:]))
            elif (
                re.fullmatch(r"(?:.*\.)?motion_encoder\.(conv_in|res_blocks\..+)\.act_fn\.bias", name)
                and len(shape) == 1
            ):
                joined[name] = Assembled((name,), (1, shape[0], 1, 1))
        return joined

    def read_config(self, shapes: Shapes, metadata: Mapping[str, str]) -> AnimateConfig:
        dim = plain.shape_of(shapes, "patch_embedding.weight", 5)[0]
        head_dim = plain.shape_of(shapes, "face_adapter.fuser_blocks.0.q_norm.weight", 1)[0]
        wan = plain.read_config(shapes, {"num_heads": str(max(1, dim // head_dim)), **metadata})
        stages = range(1, last_conv(shapes))
        outputs = (plain.shape_of(shapes, f"{CONVS}.{n}.conv2.1.weight", 4)[0] for n in stages)
        hidden = plain.shape_of(shapes, "face_encoder.conv2.conv.weight", 3)[0]
        local = plain.shape_of(shapes, "face_encoder.conv1_local.conv.weight", 3)[0]
        if local % hidden:
            raise UserError(f"its face encoder has {local} channels, which {hidden} do not divide.")
        features, directions = plain.shape_of(shapes, "motion_encoder.dec.direction.weight", 2)
        return AnimateConfig(
            **plain.fields_of(wan),
            pose_channels=plain.shape_of(shapes, "pose_patch_embedding.weight", 5)[1],
            motion_channels=(plain.shape_of(shapes, f"{CONVS}.0.0.weight", 4)[0], *outputs),
            motion_features=features,
            motion_directions=directions,
            face_hidden=hidden,
            face_tokens=local // hidden,
        )

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        from wan_core.models.wan.families.animate.model import AnimateModel

        return AnimateModel

    def whole_length(self, request: Request, task: Task) -> tuple[int, int]:
        """The pose video, at its own rate where none is asked for."""
        from wan_core.media.video import video_facts

        assert request.pose_video is not None
        facts = video_facts(request.pose_video)
        fps = min(240, max(1, round(facts.fps))) if request.fps is None else request.fps
        return fps, len(facts.frames_at(self.read_rate(request.pose_video, fps)))

    def read_rate(self, path: str, fps: int) -> float:
        """A regular video of nearly the video's rate is read frame by frame."""
        from wan_core.media.video import video_facts

        facts = video_facts(path)
        return facts.fps if facts.starts is None and round(facts.fps) == fps else fps

    def own_size(self, request: Request, task: Task, multiple: int) -> tuple[int, int]:
        from wan_core.media.video import video_facts

        assert request.pose_video is not None
        width, height = video_facts(request.pose_video)[:2]
        return max(multiple, width // multiple * multiple), max(multiple, height // multiple * multiple)

    def size_in(self, field: str, dit: DiTConfig, size: tuple[int, int]) -> tuple[int, int]:
        assert isinstance(dit, AnimateConfig)
        return (dit.face_size, dit.face_size) if field == "face_video" else size

    def picture_bytes(self, width: int, height: int, frames: int, given: Collection[str]) -> int:
        """Pictures of faces have a size of their own."""
        each = (94 if "background" in given else 62) * width * height
        return frames * (each + (16 * ANIMATE_14B.face_size**2 if "face_video" in given else 0))

    def with_settings(self, request: Request, inputs: Inputs, pose_context: Tensor | None) -> Inputs:
        """Without guidance by the face, both branches have it."""
        if request.face_guidance is not False:
            return inputs
        return {
            **inputs,
            "uncond_inputs": {name: one for name, one in inputs["uncond_inputs"].items() if name != "face"},
        }

    def inputs(self) -> InputReaders:
        from wan_core.models.wan.families.animate.inputs import clip_inputs, read_conditioning

        return InputReaders(read_conditioning, clip_inputs)


ANIMATE = AnimateFamily()
