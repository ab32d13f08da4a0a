"""The family `vace`: videos made after a control video, masks and reference pictures, of Wan 2.1 and 2.2.

| file | what it holds |
|---|---|
| `model` | the transformer (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |

This file imports no torch.

Source: VACE/vace/models/wan/modules/model.py, vace/vace_wan_inference.py; diffusers transformer_wan_vace.py;
VideoX-Fun/examples/wan2.2_vace_fun.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from wan_core.config import Request
from wan_core.config.checks import OptionError, UserError, check_picture_size
from wan_core.config.file_names import read_name
from wan_core.models.vae.config import VAE_21
from wan_core.models.wan.config import T2V_1_3B, T2V_A14B, DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.clips import Clip, ClipRules, whole_latents
from wan_core.models.wan.families.driven import ControlledFamily
from wan_core.models.wan.families.family import Hear, InputReaders
from wan_core.models.wan.families.plain import Shapes
from wan_core.models.wan.families.task import Choice, Clues, Task

if TYPE_CHECKING:
    from wan_core.media.fit import Pixels
    from wan_core.models.wan.families.media import Media
    from wan_core.models.wan.model import WanModel

STRENGTH = "vace_strength"  # in CONDITIONING: of each control video, a list


def is_picture(path: str) -> bool:
    """Whether the mask in a file is a picture, not a video."""
    return Path(path).suffix.lower() in (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")


@dataclass(frozen=True, kw_only=True)
class VaceConfig(DiTConfig):
    """A transformer that also takes a control video.

    vace_every: a VACE block runs with blocks 0, `vace_every`, 2 * `vace_every`, ... vace_channels: of the control
    video.
    """

    family: str = "vace"
    vace_every: int = 5
    vace_channels: int = 96

    @property
    def vace_blocks(self) -> int:
        return -(-self.num_layers // self.vace_every)

    def modules_of(self, layer: int) -> tuple[str, ...]:
        own = () if layer % self.vace_every else (f"vace_blocks.{layer // self.vace_every}",)
        return (*super().modules_of(layer), *own)


def with_vace(config: DiTConfig, every: int, channels: int = VaceConfig.vace_channels) -> VaceConfig:
    """The VACE transformer that is made of a text-to-video transformer."""
    return VaceConfig(**plain.fields_of(config), vace_every=every, vace_channels=channels)


VACE_14B = with_vace(T2V_A14B, 5)
VACE_1_3B = with_vace(T2V_1_3B, 2)


SINGLE = Task(
    name="vace-14B", family="vace", release="Wan 2.1", in_channels=16, image="none", driven_by="WanVaceToVideo",
    vae=VAE_21, full_size=VACE_14B, two_experts=False, boundary=0.0, shift=16.0, steps=50,
    guidance_high=5.0, guidance_low=5.0, width=1280, height=720, frames=81, fps=16,
)  # fmt: skip
SMALL = replace(SINGLE, name="vace-1.3B", full_size=VACE_1_3B, width=832, height=480)
EXPERTS = replace(SINGLE, name="vace-A14B", release="Wan 2.2", two_experts=True, boundary=0.875, shift=12.0)
TASKS = (SINGLE, SMALL, EXPERTS)


PATCHES = plain.with_bias("vace_patch_embedding")
_PROJECTION = re.compile(r"(vace_blocks\.(?:0|[1-9]\d{0,5})\.)(\w+)\.(weight|bias)")
_OFFICIAL = {"before_proj": "before_proj", "after_proj": "after_proj"}
_DIFFUSERS = {"proj_in": "before_proj", "proj_out": "after_proj"}


def vace_block_count(names: Collection[str]) -> int:
    """One more than the highest number of a VACE block among official names."""
    numbers = (plain.IN_BLOCK.fullmatch(name.removeprefix("vace_")) for name in names if name.startswith("vace_"))
    return max((int(match[1]) + 1 for match in numbers if match), default=0)


def official_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout, which is ComfyUI's too."""
    return _names(names, plain.official_names, _OFFICIAL)


def diffusers_names(names: Collection[str]) -> dict[str, str] | None:
    return _names(names, plain.diffusers_names, _DIFFUSERS)


def _names(names: Collection[str], table: plain.KeyTable, projections: dict[str, str]) -> dict[str, str] | None:
    """Names of text-to-video by `table`, and those of VACE blocks by it, too."""
    own = {name: name for name in names if name in PATCHES}
    for name in names:
        if (match := _PROJECTION.fullmatch(name)) and match[2] in projections:
            own[name] = f"{match[1]}{projections[match[2]]}.{match[3]}"
    blocks = [name.removeprefix("vace_") for name in names if name.startswith("vace_") and name not in own]
    if not own and not blocks:
        return None
    inner = table(blocks) or {}
    main = table([name for name in names if not name.startswith("vace_")])
    return None if main is None else {**main, **own, **{f"vace_{n}": f"vace_{ours}" for n, ours in inner.items()}}


class VaceFamily(ControlledFamily):
    name = "vace"
    tasks = TASKS
    layouts = (("official", official_names), ("diffusers", diffusers_names))
    conditioning_keys = frozenset({"vace_frames", "vace_mask", STRENGTH})
    branch_keys = conditioning_keys
    strength_key = STRENGTH
    clips = ClipRules(overlaps=(5, 1, 9, 13), padded=whole_latents)
    takes = ("control_video", "mask", "outpaint", "reference", "image", "last_image", "keyframes")
    front = ("reference",)

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        """With as many VACE blocks as `names` has."""
        main = plain.parameter_names([], num_layers)
        block = [name.removeprefix("blocks.0.") for name in main if name.startswith("blocks.0.")]
        projections = plain.with_bias(*_OFFICIAL)
        numbers = range(min(vace_block_count(names), num_layers))
        return [
            *main,
            *PATCHES,
            *(
                f"vace_blocks.{n}.{name}"
                for n in numbers
                for name in (*block, *(projections if n == 0 else projections[2:]))
            ),
        ]

    def lora_modules(self, num_layers: int) -> dict[str, str]:
        """Diffusers module -> official module: those of text-to-video, and of VACE blocks."""
        main = plain.diffusers_modules(num_layers)
        blocks = {f"vace_{theirs}": f"vace_{ours}" for theirs, ours in main.items() if theirs.startswith("blocks.")}
        projections = {
            f"vace_blocks.{n}.{theirs}": f"vace_blocks.{n}.{ours}"
            for n in range(num_layers)
            for theirs, ours in _DIFFUSERS.items()
        }
        return {**main, **blocks, **projections, "vace_patch_embedding": "vace_patch_embedding"}

    def read_config(self, shapes: Shapes, metadata: Mapping[str, str]) -> VaceConfig:
        """The transformer of official `shapes`, its VACE blocks spread evenly over its blocks. Raises UserError."""
        wan, blocks = plain.read_config(shapes, metadata), vace_block_count(shapes)
        vace = with_vace(wan, max(1, -(-wan.num_layers // max(1, blocks))), plain.shape_of(shapes, PATCHES[0], 5)[1])
        if vace.vace_blocks != blocks:
            raise UserError(f"its {blocks} VACE blocks cannot be spread evenly over {wan.num_layers} blocks.")
        return vace

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        """The task of an architecture. Experts of 2.2 have the tensors of 2.1 14B: a second file, or a name, tells."""
        if not clues.alone:
            return Choice(EXPERTS)
        if dit.dim == VACE_1_3B.dim:
            return Choice(SMALL)
        name = "" if clues.path is None else clues.path.name
        if read_name(name).release == "2.2":
            return Choice(EXPERTS, f"an expert of Wan 2.2 by its name {name}; if it is not, its task is {SINGLE.name}")
        return Choice(SINGLE, f"its name does not say Wan 2.2; if it is an expert of that, its task is {EXPERTS.name}")

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        from wan_core.models.wan.families.vace.model import VaceModel

        return VaceModel

    def prepared_bytes(self, config: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
        """Bytes of both prompts' text in VACE blocks, the control video and its chain, for latents [B, C, T, Y, X]."""
        assert isinstance(config, VaceConfig)
        B, _, T, Y, X = latents
        text = 2 * 2 * config.vace_blocks * config.context_len * config.dim
        return (text + config.vace_channels * T * Y * X + 2 * B * config.tokens(T, Y, X) * config.dim) * itemsize

    def uncontrolled_cost(self, dit: DiTConfig) -> float:
        assert isinstance(dit, VaceConfig)
        return dit.num_layers / (dit.num_layers + dit.vace_blocks)

    def check_files(self, request: Request) -> None:
        from wan_core.media.video import picture_size, video_facts

        for field in ("mask", "outpaint"):
            if getattr(request, field) is not None and request.control_video is None:
                raise OptionError(f"--{field} says what of a video is made anew: give --control-video as well")
        if request.outpaint is not None and request.pictures:
            raise OptionError(
                "--outpaint and --image given: frames that are known are not as large as the padded video"
            )
        if request.outpaint is not None and (size := self.aspect_of(request)) is not None:
            check_picture_size(*size, "--control-video with what --outpaint adds")
        if request.mask is not None:
            picture_size(request.mask) if is_picture(request.mask) else video_facts(request.mask)
        super().check_files(request)

    def aspect_of(self, request: Request) -> tuple[int, int] | None:
        size = super().aspect_of(request)
        if size is None or request.control_video is None:
            return size
        left, top, right, bottom = request.outpaint or (0, 0, 0, 0)
        return size[0] + left + right, size[1] + top + bottom

    def fit_control(self, request: Request, size: tuple[int, int], frame: Pixels) -> Pixels:
        from wan_core.models.wan.families.vace.inputs import GREY, padded

        return super().fit_control(request, size, padded(frame, request.outpaint, GREY))

    def picture_bytes(self, width: int, height: int, frames: int, given: Collection[str]) -> int:
        """The mask is made without any pictures, too."""
        return (92 if "control_video" in given else 80) * width * height * frames

    def load_media(
        self, request: Request, dit: DiTConfig, size: tuple[int, int], fps: int, clip: Clip, hear: Hear
    ) -> Media:
        from wan_core.models.wan.families.vace.inputs import mask_of

        media = super().load_media(request, dit, size, fps, clip, hear)
        return replace(media, pixels={**media.pixels, "mask": mask_of(request, size, fps, clip.end)})

    def inputs(self) -> InputReaders:
        from wan_core.models.wan.families.vace.inputs import clip_inputs, read_conditioning

        return InputReaders(read_conditioning, clip_inputs)


VACE = VaceFamily()
