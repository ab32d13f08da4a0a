"""The family `wan`: text-to-video, image-to-video and both in one (TI2V), of Wan 2.1 and 2.2.

| file | what it holds |
|---|---|
| `model` | the transformer of 2.1 image-to-video, which attends to CLIP features too (torch) |
| `inputs` | what a known image, or ComfyUI's CONDITIONING, is to the transformer (torch) |

This file imports no torch.

Source: Wan2.2/wan/configs/*.py; Wan2.1/generate.py, and its README.md for shift and guidance of 1.3B.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wan_core.config import Request
from wan_core.config.checks import OptionError
from wan_core.config.file_names import NAMING, read_name
from wan_core.models.vae.config import VAE_21, VAE_22
from wan_core.models.wan.config import I2V_14B, I2V_A14B, T2V_1_3B, T2V_A14B, TI2V_5B, DiTConfig
from wan_core.models.wan.families.clips import ClipRules
from wan_core.models.wan.families.family import Family, InputReaders
from wan_core.models.wan.families.task import Choice, Clues, Task, fitting

if TYPE_CHECKING:
    from wan_core.models.wan.model import WanModel

TASKS = (
    Task(name="t2v-A14B", family="wan", release="Wan 2.2", in_channels=16, image="none",
         vae=VAE_21, full_size=T2V_A14B, two_experts=True, boundary=0.875, shift=12.0, steps=40,
         guidance_high=4.0, guidance_low=3.0, width=1280, height=720, frames=81, fps=16),
    Task(name="i2v-A14B", family="wan", release="Wan 2.2", in_channels=36, image="channels",
         vae=VAE_21, full_size=I2V_A14B, two_experts=True, boundary=0.9, shift=5.0, steps=40,
         guidance_high=3.5, guidance_low=3.5, width=1280, height=720, frames=81, fps=16),
    Task(name="ti2v-5B", family="wan", release="Wan 2.2", in_channels=48, image="first frame",
         vae=VAE_22, full_size=TI2V_5B, two_experts=False, boundary=0.0, shift=5.0, steps=50,
         guidance_high=5.0, guidance_low=5.0, width=1280, height=704, frames=121, fps=24),
    # Wan 2.1: one transformer for every step
    Task(name="t2v-14B", family="wan", release="Wan 2.1", in_channels=16, image="none",
         vae=VAE_21, full_size=T2V_A14B, two_experts=False, boundary=0.0, shift=5.0, steps=50,
         guidance_high=5.0, guidance_low=5.0, width=1280, height=720, frames=81, fps=16),
    Task(name="t2v-1.3B", family="wan", release="Wan 2.1", in_channels=16, image="none",
         vae=VAE_21, full_size=T2V_1_3B, two_experts=False, boundary=0.0, shift=8.0, steps=50,
         guidance_high=6.0, guidance_low=6.0, width=832, height=480, frames=81, fps=16),
    Task(name="i2v-14B-480P", family="wan", release="Wan 2.1", in_channels=36, image="channels", image_dim=1280,
         vae=VAE_21, full_size=I2V_14B, two_experts=False, boundary=0.0, shift=3.0, steps=40,
         guidance_high=5.0, guidance_low=5.0, width=832, height=480, frames=81, fps=16),
    Task(name="i2v-14B-720P", family="wan", release="Wan 2.1", in_channels=36, image="channels", image_dim=1280,
         vae=VAE_21, full_size=I2V_14B, two_experts=False, boundary=0.0, shift=5.0, steps=40,
         guidance_high=5.0, guidance_low=5.0, width=1280, height=720, frames=81, fps=16),
    # the embedded model, see docs/design.md
    Task(name="t2v-tiny", family="wan", release="embedded", in_channels=16, image="none",
         vae=VAE_21, full_size=None, two_experts=True, boundary=0.875, shift=5.0, steps=20,
         guidance_high=3.0, guidance_low=3.0, width=96, height=96, frames=17, fps=8, negative_prompt=""),
    Task(name="i2v-tiny", family="wan", release="embedded", in_channels=36, image="channels",
         vae=VAE_21, full_size=None, two_experts=True, boundary=0.9, shift=5.0, steps=20,
         guidance_high=3.0, guidance_low=3.0, width=96, height=96, frames=17, fps=8, negative_prompt=""),
)  # fmt: skip


def _by_size(tasks: list[Task], clues: Clues) -> Choice:
    for name in _names(clues):
        for task in tasks:
            size = task.name.rpartition("-")[2]
            if size.lower() in name.lower():
                return Choice(task, f"{size} by its name {name}")
    others = ", ".join(task.name for task in tasks[1:])
    return Choice(tasks[0], f"its name does not say for which size; with --task it is {others}")


def _by_release(tasks: list[Task], clues: Clues) -> Choice:
    """A second expert means 2.2. One file alone is what its name says; 2.2, as any expert, where it says nothing."""
    experts, single = (next(task for task in tasks if task.two_experts is two) for two in (True, False))
    if not clues.alone:
        return Choice(experts)
    for name in _names(clues):
        release = read_name(name).release
        if release is not None:
            why = f"Wan 2.1 by its name {name}; if it is not, its task is {experts.name}"
            return Choice(single, why) if release == "2.1" else Choice(experts)
    return Choice(experts, f"its name does not say which release; if it is Wan 2.1, its task is {single.name}")


def _names(clues: Clues) -> list[str]:
    """What may name the model, the most telling first: its metadata, its file, the folders around it."""
    said = [clues.metadata[key] for key in NAMING if key in clues.metadata]
    path = clues.path
    return said if path is None else [*said, path.name, *(folder.name for folder in list(path.absolute().parents)[:2])]


# SVI 2.0 Pro: Wan2GP and KJNodes hand one latent on. Its clips have no other frames in common, so 1 is none.
SVI_CLIPS = ClipRules(overlaps=(5, 9, 13), always=True, anchored=True)


class WanFamily(Family):
    name = "wan"
    tasks = TASKS
    prompts_over_time = True
    layer_pipeline = True
    conditioning_keys = frozenset({"concat_latent_image", "concat_mask", "clip_vision_output"})
    clips = ClipRules(overlaps=(1, 5, 9, 13))

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        """The released task of this architecture. Raises OptionError where there is none.

        Two things only a name tells: whether a text-to-video transformer of 14B is Wan 2.1 or an expert of 2.2, and for
        which size an image-to-video transformer of 2.1 was tuned.
        """
        found = fitting(self.tasks, dit)
        if len(found) == 1:
            return Choice(found[0])
        if dit.image_dim is not None:
            return _by_size(found, clues)
        return _by_release(found, clues)

    def check_fields(self, request: Request, task: Task) -> None:
        super().check_fields(request, task)
        pictured = request.image is not None or request.keyframes is not None  # keyframes are refused with the plan
        if request.svi and not pictured and task.image == "channels":
            raise OptionError("--svi given without a picture that its clips have as their anchor: give --image")

    def clip_rules(self, task: Task, svi: bool = False) -> ClipRules:
        anchored = svi and task.image == "channels" and task.two_experts
        return SVI_CLIPS if anchored else super().clip_rules(task, svi)

    def model_class(self, config: DiTConfig) -> type[WanModel]:
        if config.image_dim is None:
            from wan_core.models.wan.model import WanModel

            return WanModel
        from wan_core.models.wan.families.wan.model import ImageWanModel

        return ImageWanModel

    def inputs(self) -> InputReaders:
        from wan_core.models.wan.families.wan.inputs import clip_inputs, read_conditioning

        return InputReaders(read_conditioning, clip_inputs)


WAN = WanFamily()
