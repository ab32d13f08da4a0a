"""The family `animate2`: Wan-Animate-2, a picture of a person moved by a driving video, with the weights of Wan 2.1
image-to-video in shape.

| file | what it holds |
|---|---|
| `model` | the transformer: a pass over the driving video, then over the video that is made (torch) |
| `attention` | attention of a frame to all frames and to its driving frame, and what is kept between steps (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |

This file imports no torch.

The official file has a level more, `blocks.N.block.`, ComfyUI's has none and says what it is in its metadata, Diffusers
renames attention only. Source: README and LightX2V's configuration for defaults; ComfyUI's model_animate2.py and
diffusers transformer_wan_animate_2.py for names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from wan_core.config import Request
from wan_core.config.checks import UserError
from wan_core.config.file_names import read_name
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import I2V_14B, DiTConfig, PreparedForm
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.clips import ClipRules
from wan_core.models.wan.families.driven import DrivenFamily
from wan_core.models.wan.families.family import STRENGTHS, InputReaders, Inputs, given_fields
from wan_core.models.wan.families.plain import Shapes
from wan_core.models.wan.families.task import Choice, Clues, Task

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.media.fit import Box, Pixels
    from wan_core.models.wan.model import WanModel

DISTILLED_LOG_SCALE = -1.3  # of the distilled weights; 0 of the others
MORE_PER_TOKEN = 5.6  # of `Family`: attention in parts, and their sum in float32; measured on an H200 in FP8
PLACES = 2  # layers on the device, of keys and values in host memory


class Form(NamedTuple):
    """How keys and values of the driving video are kept."""

    on_host: bool = False
    fp8: bool = False

    def words(self) -> str:
        return f"{'FP8' if self.fp8 else 'as computed'}, {'in host memory' if self.on_host else 'on the device'}"


# What changes no number first.
FORMS = (Form(), Form(on_host=True), Form(fp8=True), Form(on_host=True, fp8=True))


@dataclass(frozen=True, kw_only=True)
class Animate2Config(DiTConfig):
    """unconditional_skips: the block that the forward without the prompt leaves out."""

    family: str = "animate2"
    unconditional_skips: int = 9
    merges_attention: ClassVar[bool] = True


ANIMATE2_14B = Animate2Config(**plain.fields_of(I2V_14B))


def pinned_bytes(nbytes: int) -> int:
    """Bytes that a tensor takes in torch's pinned memory, which comes in powers of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def padded_frames(frames: int, clip: int, overlap: int) -> int:
    """Frames of a video padded so that the last clip is not too short, if it is one. Source: `_padding_length` of
    LightX2V's Animate-2."""
    last_clip = (frames - overlap) % (clip - overlap)
    return frames + (28 - last_clip if last_clip < 28 else 4 - last_clip % 4)


BASE = Task(
    name="animate2-14B", family="animate2", release="Wan 2.2", in_channels=36, image="channels", image_dim=1280,
    driven_by="WanAnimate2ToVideo",
    vae=VAE_21, full_size=ANIMATE2_14B, two_experts=False, boundary=0.0, shift=5.0, steps=40,
    guidance_high=3.0, guidance_low=3.0, width=1280, height=720, frames=81, fps=24,
)  # fmt: skip
DISTILLED = replace(BASE, name="animate2-14B-distilled", distilled=True, steps=10, guidance_high=1.0, guidance_low=1.0)
# the embedded model, see docs/design.md
TINY = replace(
    BASE, name="animate2-tiny", release="embedded", image_dim=80, full_size=None, steps=20, guidance_high=1.0,
    guidance_low=1.0, width=96, height=96, frames=17, fps=8, negative_prompt="",
)  # fmt: skip
TASKS = (BASE, DISTILLED, TINY)


_WRAPPED = re.compile(r"(blocks\.\d{1,6}\.)block\.(.+)")
_ATTENTION = re.compile(
    r"(blocks\.\d{1,6}\.(?:self|cross)_attn\.)"
    r"(to_[qkv]|to_out\.0|add_[kv]_proj|norm_added_k)\.(weight|bias)"
)
_PARTS = {
    **{f"to_{part}": part for part in "qkv"},
    "to_out.0": "o",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "norm_added_k": "norm_k_img",
}


def official_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout: every block in a wrapper."""
    return _renamed({name: f"{match[1]}{match[2]}" for name in names if (match := _WRAPPED.fullmatch(name))}, names)


def diffusers_names(names: Collection[str]) -> dict[str, str] | None:
    """Diffusers' `WanAnimate2Transformer3DModel`, in which norms keep their official names."""
    inner = {name: match[1] + match[2] for name in names if (match := _WRAPPED.fullmatch(name))}
    own = {
        name: f"{match[1]}{_PARTS[match[2]]}.{match[3]}"
        for name in names
        if (match := _ATTENTION.fullmatch(inner.get(name, name)))
    }
    return _renamed({**inner, **own} if own else {}, names)


def comfyui_names(names: Collection[str]) -> dict[str, str] | None:
    """ComfyUI's layout, which is that of Wan 2.1 image-to-video: only metadata tells them apart."""
    return plain.official_names(names) if any(name.startswith("img_emb.") for name in names) else None


def _renamed(changed: dict[str, str], names: Collection[str]) -> dict[str, str] | None:
    """Names of a file -> official names, where `changed` has some; None where it has none."""
    if not changed:
        return None
    ours = {changed.get(name, name): name for name in names}
    official_names_of = plain.official_names(list(ours))
    return None if official_names_of is None else {ours[name]: official for name, official in official_names_of.items()}


METADATA = {"config": json.dumps({"transformer": {"model_type": "animate2"}})}  # as of ComfyUI's files


class Animate2Family(DrivenFamily):
    name = "animate2"
    tasks = TASKS
    layouts = (("official", official_names), ("diffusers", diffusers_names), ("comfyui", comfyui_names))
    metadata = METADATA
    more_per_token = MORE_PER_TOKEN
    driving_keys = ("pose_video_latent", "clip_vision_output_pose", "cross_attn_pose", "pose_strength")
    driving_inputs = ("pose", "pose_image", "pose_context", "pose_strength")
    own_driving_inputs = frozenset({"pose_image", "pose_context"})
    conditioning_keys = frozenset(
        {"concat_latent_image", "concat_mask", "clip_vision_output", "reference_strength", *driving_keys}
    )
    clips = ClipRules(overlaps=(1,), always=True, leading=1, padded=padded_frames)
    seen_fields = ("reference", "pose_video")
    settings = ("pose_prompt", *STRENGTHS)

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        return plain.parameter_names([plain.IMAGE_PARAMETER], num_layers)

    def claims(self, metadata: Mapping[str, str]) -> bool:
        return plain.transformer_settings(metadata).get("model_type") == "animate2"

    def read_config(self, shapes: Shapes, metadata: Mapping[str, str]) -> Animate2Config:
        wan = plain.read_config(shapes, metadata)
        if wan.in_channels != 2 * wan.out_channels + 4:
            raise UserError(
                f"a transformer of {wan.in_channels} input channels is none of Animate-2, which takes "
                f"{2 * wan.out_channels + 4}"
            )
        return Animate2Config(**plain.fields_of(wan))

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        """Tensors and metadata are the same for both tasks: the name tells."""
        super().choose(dit, clues)
        name = "" if clues.path is None else clues.path.name
        if read_name(name).distilled:
            return Choice(DISTILLED, f"distilled by its name {name}; if it is not, its task is {BASE.name}")
        return Choice(BASE, f"its name does not say that it is distilled; if it is, its task is {DISTILLED.name}")

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        from wan_core.models.wan.families.animate2.model import Animate2Model

        return Animate2Model

    def why_not_sparse(self, task: Task) -> str:
        if task.name != DISTILLED.name:
            return ""
        return (
            "distilled weights of Animate-2 scale the scores of one frame, and sparse kernels read blocks as they are: "
            "leave it off"
        )

    def picture_bytes(self, width: int, height: int, frames: int, given: Collection[str]) -> int:
        return 62 * width * height * frames

    def prepared_bytes(self, dit: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
        """Keys and values of the driving video in every block, for latents [B, C, T, Y, X], of which the first frame is
        the reference."""
        B, _, T, Y, X = latents
        return 2 * dit.num_layers * B * dit.tokens(T - 1, Y, X) * dit.dim * itemsize

    def prepared_forms(self, dit: DiTConfig, latents: tuple[int, ...], itemsize: int) -> tuple[PreparedForm, ...]:
        """Each of `FORMS` with its bytes on the device and in host memory."""
        tensors = 2 * dit.num_layers  # keys, and values
        tensor_bytes = self.prepared_bytes(dit, latents, itemsize) // tensors
        numbers = tensor_bytes // itemsize
        forms: list[PreparedForm] = []
        for form in FORMS:
            parts = (
                (numbers, 4 * numbers // dit.dim * dit.num_heads) if form.fp8 else (tensor_bytes,)
            )  # a scale for each head
            whole = tensors * sum(parts)
            place = f"keys and values of the driving video, {form.words()}"
            if form.on_host:
                pinned, places = tensors * sum(map(pinned_bytes, parts)), PLACES * 2 * sum(parts)
                forms.append(PreparedForm(form, place, places, pinned, whole, not form.fp8))
            else:
                forms.append(PreparedForm(form, place, whole, 0, 0, not form.fp8))
        return tuple(forms)

    def driving_costs(self, dit: DiTConfig, latents: tuple[int, int, int]) -> tuple[float, float]:
        """By FLOPs. The first latent frame is the reference."""
        T, Y, X = latents
        frame = dit.tokens(1, Y, X)
        linears = 2 * dit.dim * (6 * dit.dim + 2 * dit.ffn_dim)  # of a token

        def flops(frames: int, pairs: int) -> int:
            return frames * frame * linears + 4 * dit.dim * pairs * frame**2

        whole = flops(T, T * T + T - 1)  # of frames but the first, each also to its driving frame
        return flops(T - 1, (T - 1) ** 2) / whole, flops(T, T * T) / whole

    def pose_prompt(self, request: Request) -> str | None:
        return request.prompt if request.pose_prompt is None else request.pose_prompt

    def fit(self, pixels: Pixels, size: tuple[int, int]) -> Pixels:
        """With black bars; a picture that gets smaller is averaged, not interpolated."""
        from wan_core.media.fit import fit_with_bars

        return fit_with_bars(pixels, size, by_area=True)

    def shown(self, picture: tuple[int, int], size: tuple[int, int]) -> Box:
        """The bars beside the reference are cut off. Both sides are even, as H.264 needs them."""
        from wan_core.media.fit import Box, fitted_box

        left, top, width, height = fitted_box(picture, size)
        return Box(left, top, max(2, width // 2 * 2), max(2, height // 2 * 2))

    def with_settings(self, request: Request, inputs: Inputs, pose_context: Tensor | None) -> Inputs:
        """Strengths, and the text of the driving video."""
        own: Inputs = {name: getattr(request, name) for name in given_fields(request, STRENGTHS)}
        if pose_context is not None:
            own["pose_context"] = pose_context
        return {**inputs, "inputs": {**inputs["inputs"], **own}}

    def inputs(self) -> InputReaders:
        from wan_core.models.wan.families.animate2.inputs import clip_inputs, read_conditioning

        return InputReaders(read_conditioning, clip_inputs)


ANIMATE2 = Animate2Family()
