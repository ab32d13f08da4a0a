"""The family `vace`: videos made after a control video, masks and reference pictures, of Wan 2.1 and 2.2.

| file | what it holds |
|---|---|
| `data` | the numbers of an architecture, the tasks, the names of parameters |
| `model` | the transformer (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from wan_core.config import Request
from wan_core.config.checks import OptionError, UserError, check_picture_size
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.clips import Clip, ClipRules, whole_latents
from wan_core.models.wan.families.driven import ControlledFamily
from wan_core.models.wan.families.family import Choice, Clues, Hear, Inputs, Task
from wan_core.models.wan.families.plain import Shapes
from wan_core.models.wan.families.vace.data import (
    EXPERTS,
    NAMED_EXPERT,
    PATCHES,
    SINGLE,
    SMALL,
    STRENGTH,
    TASKS,
    VACE_1_3B,
    VaceConfig,
    diffusers_modules,
    diffusers_names,
    is_picture,
    official_names,
    parameter_names,
    vace_block_count,
    with_vace,
)

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.media.fit import Pixels
    from wan_core.models.vae.vae import VideoVAE
    from wan_core.models.wan.families.media import Media
    from wan_core.models.wan.model import WanModel


class VaceFamily(ControlledFamily):
    name = "vace"
    tasks = TASKS
    layouts = (("official", official_names), ("diffusers", diffusers_names))
    conditioning_keys = frozenset({"vace_frames", "vace_mask", STRENGTH})
    branch_keys = conditioning_keys
    strength_key = STRENGTH
    clips = ClipRules(overlaps=(5, 1, 9, 13), padded=whole_latents)
    takes = ("control_video", "mask", "outpaint", "reference", "image", "last_image")
    front = ("reference",)

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        return parameter_names(names, num_layers)

    def lora_modules(self, num_layers: int) -> dict[str, str]:
        return diffusers_modules(num_layers)

    def read_config(self, shapes: Shapes, metadata: Mapping[str, str]) -> VaceConfig:
        """The transformer that official `shapes` describe. Its VACE blocks are spread evenly over its blocks. Raises
        UserError."""
        wan, blocks = plain.read_config(shapes, metadata), vace_block_count(shapes)
        found = with_vace(wan, max(1, -(-wan.num_layers // max(1, blocks))), plain.shape_of(shapes, PATCHES[0], 5)[1])
        if found.vace_blocks != blocks:
            raise UserError(f"its {blocks} VACE blocks cannot be spread evenly over {wan.num_layers} blocks.")
        return found

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        """The task of an architecture. An expert of Wan 2.2 has the tensors of Wan 2.1 14B: a second file, or the name,
        tells."""
        if not clues.alone:
            return Choice(EXPERTS)
        if dit.dim == VACE_1_3B.dim:
            return Choice(SMALL)
        name = "" if clues.path is None else clues.path.name
        if NAMED_EXPERT.search(name):
            return Choice(EXPERTS, f"an expert of Wan 2.2 by its name {name}")
        return Choice(SINGLE, f"its name does not say Wan 2.2; if it is an expert of that, its task is {EXPERTS.name}")

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        from wan_core.models.wan.families.vace.model import VaceModel

        return VaceModel

    def prepared_bytes(self, config: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
        """Bytes of the text of both prompts in VACE blocks, of the control video, its chain and what that adds, for
        latents [B, C, T, Y, X]."""
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
        if request.outpaint is not None and (request.image or request.last_image):
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

    def load_media(
        self, request: Request, dit: DiTConfig, size: tuple[int, int], fps: int, clip: Clip, hear: Hear
    ) -> Media:
        from wan_core.models.wan.families.vace.inputs import mask_of

        media = super().load_media(request, dit, size, fps, clip, hear)
        return replace(media, pixels={**media.pixels, "mask": mask_of(request, size, fps, clip.end)})

    def read_conditioning(
        self, task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]
    ) -> Inputs:
        from wan_core.models.wan.families.vace.inputs import read_conditioning

        return read_conditioning(task, vae, extras, latent)

    def clip_inputs(
        self, task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
    ) -> Inputs:
        from wan_core.models.wan.families.vace.inputs import clip_inputs

        return clip_inputs(task, vae, seen, media, clip)


VACE = VaceFamily()
