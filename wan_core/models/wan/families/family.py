"""What the engine needs to know of a kind of Wan model. Imports no torch.

A family is data and a few functions. All other code asks the family, or the task that was recognised, and never for a
number of channels. The functions that need torch import it when they are called.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.clips import ClipRules, MediaRules
from wan_core.models.wan.prepared_form import PreparedForm

if TYPE_CHECKING:
    from wan_core.models.wan.model import WanModel

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
KeyTable: TypeAlias = Callable[[Collection[str]], "dict[str, str] | None"]
Inputs: TypeAlias = "dict[str, Any]"


def function_of(module: str, name: str) -> Callable[..., Any]:
    """A function of a module that needs torch, imported when it is called. module: within `families`."""
    return lambda *given: getattr(import_module(f"wan_core.models.wan.families.{module}"), name)(*given)


def class_of(module: str, name: str) -> Callable[[DiTConfig], type[WanModel]]:
    """For `Family.model_class`: one class for all files of a family, imported when it is asked for."""
    return lambda config: getattr(import_module(f"wan_core.models.wan.families.{module}"), name)


# How a known image reaches the transformer.
ImageInput: TypeAlias = Literal[
    "none",
    "channels",  # a mask and the latents of the known frames, beside the noise: first frame, last frame or both
    "first frame",  # the first latent frame is the image's and stays so, at timestep 0
]


NEGATIVE_SOURCE = (
    "this project's own text; Wan's own, in Chinese, is sample_neg_prompt in wan/configs/shared_config.py of "
    "github.com/Wan-Video/Wan2.2"
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What checkpoints were trained and tuned for: their inputs and the defaults of everything a user may leave out.

    Guidance is named by expert, never a tuple: the official config lists (low, high), other tools [high, low].
    """

    name: str
    family: str
    release: str  # "Wan 2.2"
    in_channels: int
    image: ImageInput
    image_dim: int | None = None  # width of the CLIP features of the image that it takes; None: it takes none
    distilled: bool = False  # its defaults are those of step-distilled weights: no preset takes their place by itself
    driven_by: str = ""  # ComfyUI's node that gives the videos which drive it; "": no videos do
    vae: VAEConfig  # of the VAE whose latents it works on
    full_size: DiTConfig | None  # None: known from the files alone
    two_experts: bool
    boundary: float  # the high-noise expert runs where timestep >= boundary * 1000; 0: one model runs every step
    shift: float
    steps: int
    guidance_high: float
    guidance_low: float
    width: int
    height: int
    frames: int
    fps: int
    negative_prompt: str = (  # written for this project: see NEGATIVE_SOURCE
        "blurry, low quality, jpeg artefacts, overexposed, washed-out colours, still picture, subtitles, watermark, "
        "deformed hands, extra fingers, extra limbs, distorted face, cluttered background, walking backwards"
    )


class Clues(NamedTuple):
    """What besides shapes may tell which task a transformer is for."""

    path: Path | None = None  # of its file or folder
    metadata: Mapping[str, str] = {}
    alone: bool = True  # no second expert is given


class Choice(NamedTuple):
    """The task of a transformer. `why`: what decided, where its tensors do not; it is shown to the user."""

    task: Task
    why: str = ""


class Assembled(NamedTuple):
    """A tensor of a layout that the file stores in parts, which are joined along the first axis, or in another
    `shape`."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]


class Hearing(NamedTuple):
    """How a family hears a sound.

    states(dit): the states of a speech encoder that a transformer takes: how many, and how wide. features(states,
    clip): from those of a sound [W, n, C] to what video frames hear, [1, W, C, A], up to the end of a clip.
    """

    states: Callable[[Any], tuple[int, int]]
    features: Callable[..., Any]


class Driving(NamedTuple):
    """A driving video that takes a forward of its own, once for all steps that read it.

    keys: of `conditioning_keys`, those that come with it, the first of them the video itself; a CONDITIONING may have
    them for a part of the run. inputs: those of the model that only a step gets which reads it. own: of these, the text
    and the picture that the video may have; without them it is passed once for each branch. costs(dit, latents): the
    time of a forward over the video, and of one of the model that does not read it, relative to one that does, for
    latents of so many frames, rows and columns.
    """

    keys: tuple[str, ...]
    inputs: tuple[str, ...]
    own: frozenset[str]
    costs: Callable[[Any, tuple[int, int, int]], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of Wan model.

    layouts: (name, key table) of every layout on disk: names of a file -> official names, None for names of others. A
    family whose files hold all of another's keys stands before it in the table of families, and its key tables answer
    only where its own keys are.
    parameter_names: the official names that a whole file has, of those that were found in it and its number of blocks.
    constants: names of a file's tensors that are the same in every file, and are not read.
    assembled: from the shapes of a file, what a layout stores in parts or other shapes, by the name that its key table
    knows it by.
    metadata: what files say in their metadata, where their tensors may be another's. claims: whether a file's does.
    named: of a file name that says so, too. Where nothing else says it, the loader asks.
    lora_modules: Diffusers' module -> official module, of a transformer of so many blocks.
    config: the architecture that official shapes and the file's metadata describe. Raises ValueError.
    choose: the task of a transformer. Raises OptionError.
    model_class: the class of an architecture's module, which is built from it.
    image_inputs(task, vae, vision, first, last, frames): the fields of `Conditioning` that a known first and last frame
    give. Frames are [1, 3, 1, H, W] in -1..1; `vision` is called for the CLIP encoder, where the task needs one.
    conditioning_keys: of ComfyUI's CONDITIONING, what it understands; other keys are refused.
    read_conditioning(task, vae, extras, latent): the fields of `Conditioning` that these keys and a LATENT give.
    why_not_sparse: why a task cannot have sparse attention; "": it can.
    stages: whether steps may run at a smaller size: nothing that has a size reaches its models but latents, and the
    fields `concat` and `known` of `Conditioning`.
    context_windows: whether a forward may see some of the frames alone: nothing that has frames reaches its models but
    latents, and the fields `concat` and `known` of `Conditioning`.
    prepared_bytes(dit, latents, itemsize): of what is prepared beside text, for latents [B, C, T, Y, X].
    prepared_forms: of the same, the ways in which it may be kept, the plainest first; none: there is one way.
    more_per_token: bytes of activations over 2 L C (L tokens, C channels) beyond those of text-to-video.
    clips: how a long video is cut into clips; None: it is made in one.
    media: which videos and pictures drive it; None: none do.
    hears: how it hears a sound; None: it does not. driving: of a driving video that takes forwards of its own.
    clip_lead(vae, media, clip): un-normalised latents that are decoded before those of a clip, whose frames are left
    out; None: none are.
    clip_inputs(task, vae, seen, media, clip): the fields of `Conditioning` of one clip. media: pixels of the clip by
    field of the request, [1, 3, F, H, W] in -1..1 (F is 1 for pictures); `carried`, the last frames of the clip before,
    or as many frames before it as `clips.history` says; `audio`, features of its sound; `lead`, of `clip_lead`. seen:
    CLIP features by field, where the task needs them: of `media.seen`, or of what the clip begins with, `image`.
    branch_keys: of `conditioning_keys`, those that the negative prompt may have other values of. strength_key: the one
    whose values, a number for each control video, may change during a run with the texts of a prompt; "": none.
    """

    name: str
    tasks: tuple[Task, ...]
    layouts: tuple[tuple[str, KeyTable], ...]
    parameter_names: Callable[[Collection[str], int], list[str]]
    lora_modules: Callable[[int], dict[str, str]]
    config: Callable[[Shapes, Mapping[str, str]], DiTConfig]
    choose: Callable[[DiTConfig, Clues], Choice]
    model_class: Callable[[DiTConfig], type[WanModel]]
    image_inputs: Callable[..., Inputs]
    conditioning_keys: frozenset[str]
    read_conditioning: Callable[[Task, VAEConfig, Mapping[str, Any], Mapping[str, Any]], Inputs]
    branch_keys: frozenset[str] = frozenset()
    strength_key: str = ""
    why_not_sparse: Callable[[Task], str] = lambda _: ""
    stages: bool = False
    context_windows: bool = False
    prepared_bytes: Callable[[DiTConfig, tuple[int, ...], int], int] = lambda *_: 0
    prepared_forms: Callable[[DiTConfig, tuple[int, ...], int], tuple[PreparedForm, ...]] = lambda *_: ()
    more_per_token: float = 0.0
    constants: re.Pattern[str] | None = None
    assembled: Callable[[Shapes], Mapping[str, Assembled]] = lambda _: {}
    clips: ClipRules | None = None
    media: MediaRules | None = None
    hears: Hearing | None = None
    driving: Driving | None = None
    clip_lead: Callable[..., Any] | None = None
    clip_inputs: Callable[..., Inputs] | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    claims: Callable[[Mapping[str, str]], bool] = lambda _: False
    named: re.Pattern[str] | None = None
