"""What ComfyUI's own Wan models are, in the engine's terms: architecture, task, file and noise levels."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from comfy.ldm.wan.model import WanModel
from comfy.model_patcher import ModelPatcher

from wan_core.config import OptionError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import choose_task
from wan_core.models.wan.families.family import Clues, Task

IMAGE_DIM = 1280  # of the CLIP features that an image-to-video model of Wan 2.1 takes
STATEFUL = ("CausalWanModel",)  # keep keys and values between forwards: no forward can be left out


@dataclass(frozen=True)
class NativeModel:
    """A native model as it would be sampled, with the patches that change its noise schedule."""

    variant: str  # its class: WanModel, VaceWanModel, ...
    config: DiTConfig
    task: Task | None  # None: a variant of which the engine has no task
    path: Path | None  # its file, where ComfyUI says it
    levels: tuple[float, ...]  # the noise levels of its training, rising; the shift is in them
    shift: float
    note: str = ""  # what decided the task, where the tensors do not

    @property
    def name(self) -> str:
        return self.variant if self.task is None else self.task.name

    @property
    def boundary(self) -> float:
        """Of two experts; 0 where one transformer runs every step."""
        return 0.0 if self.task is None else self.task.boundary


def describe(patcher: ModelPatcher) -> NativeModel:
    """Raises OptionError for what is no Wan model."""
    dit = patcher.model.diffusion_model
    if not isinstance(dit, WanModel):
        raise OptionError(
            f"the model is {type(dit).__name__}, and this works on ComfyUI's Wan models: connect one, or leave it out"
        )
    config = DiTConfig(
        in_channels=dit.in_dim,
        out_channels=dit.out_dim,
        dim=dit.dim,
        ffn_dim=dit.ffn_dim,
        num_heads=dit.num_heads,
        num_layers=dit.num_layers,
        text_dim=dit.text_dim,
        text_len=dit.text_len,
        freq_dim=dit.freq_dim,
        patch_size=tuple(dit.patch_size),
        eps=dit.eps,
        image_dim=None if dit.img_emb is None else IMAGE_DIM,
    )
    path, variant, task, note = file_of(patcher), type(dit).__name__, None, ""
    if variant == "WanModel" and dit.ref_conv is None:
        with suppress(OptionError):  # of a control model: its channels belong to no task of the engine
            task, note = choose_task(config, Clues(path=path))
    sampling = patcher.get_model_object("model_sampling")
    levels = tuple(sampling.sigmas.tolist())
    return NativeModel(variant, config, task, path, levels, float(sampling.shift), note)


def file_of(patcher: ModelPatcher) -> Path | None:
    """The file that a core loader read it from; older versions do not say."""
    made = getattr(patcher, "cached_patcher_init", None)
    named = made[1][0] if made is not None and made[1] else None
    return Path(named) if isinstance(named, str) else None
