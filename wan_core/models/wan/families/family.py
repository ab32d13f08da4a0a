"""What the engine needs to know of a kind of Wan model. Imports no torch.

All other code asks the family, or the task that was recognised, and never for a number of channels or a name. Methods
that need torch import it when they are called.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from wan_core.config import OptionError, Request
from wan_core.config.table import table
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig, PreparedForm
from wan_core.models.wan.families import plain
from wan_core.models.wan.families.clips import Clip, ClipRules, LongVideo, check_clips, cut_clips
from wan_core.models.wan.families.plain import KeyTable, Shapes, diffusers_names, official_names
from wan_core.models.wan.families.task import Choice, Clues, Task

if TYPE_CHECKING:
    from torch import Tensor

    from wan_core.models.vae.vae import VideoVAE
    from wan_core.models.wan.families.media import Media
    from wan_core.models.wan.model import WanModel

Inputs: TypeAlias = "dict[str, Any]"
Hear: TypeAlias = "Callable[[str], Tensor]"  # the states [W, n, C] that a speech encoder makes of a sound file

# Fields of a request: videos; all files that may drive a video; what drives it and is no file; settings beside them;
# what a video begins with, and frames of it that are known.
VIDEOS = ("pose_video", "face_video", "background", "mask")
MEDIA = ("reference", *VIDEOS, "control_video", "audio")
OTHERS = ("outpaint", "camera")
STRENGTHS = ("pose_strength", "reference_strength")
SETTINGS = ("pose_prompt", *STRENGTHS, "face_guidance")
BEGINS = ("image", "last_image", "keyframes", "from_video", "denoise")


class Assembled(NamedTuple):
    """A tensor that a layout stores in parts, or in another `shape`. make: what it is of their values; None: the parts
    are joined along the first axis."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    make: Callable[[list[Any]], Any] | None = None


class VideoSize(NamedTuple):
    """The size of a video, as its media or the request say."""

    width: int
    height: int
    frames: int
    fps: int


class InputReaders(NamedTuple):
    """The functions of a family that need torch and make its inputs, see the methods of `Family` of these names."""

    read_conditioning: Callable[[Task, VAEConfig, Mapping[str, Any], Mapping[str, Any]], Inputs]
    clip_inputs: Callable[[Task, VideoVAE, Mapping[str, Tensor], Mapping[str, Tensor], Clip], Inputs]


def option(field: str) -> str:
    """The option of the command line for a field of a request."""
    options = table(Request)
    declared = next((one for one in options.values() if field in one.fields), options[field])
    return "--" + declared.flag.replace("_", "-")


def given_fields(request: Request, fields: Iterable[str]) -> list[str]:
    """The fields among `fields` that a request sets."""
    return [field for field in fields if getattr(request, field) is not None]


class Family(ABC):
    """One kind of Wan model: a subclass in its folder, one object of it in the table of families. The defaults are
    those of a model whose files have the plain transformer alone, and that nothing drives.

    A family whose files hold all parameters of another's stands before it in the table, and its key tables answer only
    where its own parameters are.
    """

    name: str
    tasks: tuple[Task, ...]

    # Files: layouts on disk, each with its key table (names of a file -> official names, None for names of others);
    # names of tensors that are the same in every file and are not read; metadata that files are written with.
    layouts: tuple[tuple[str, KeyTable], ...] = (("official", official_names), ("diffusers", diffusers_names))
    constants: re.Pattern[str] | None = None
    metadata: Mapping[str, str] = MappingProxyType({})

    # Bytes of activations over 2 L C (L tokens, C channels) beyond those of text-to-video.
    more_per_token: float = 0.0

    prompts_over_time: bool = False  # whether frames may have prompts of their own: tokens are the video's alone
    layer_pipeline: bool = False  # whether blocks hand over tokens alone, so that ranks can share them by layers

    # Keys of ComfyUI's CONDITIONING that it understands (others are refused); those that the negative prompt may have
    # other values of; the one whose values, a number for each control video, may change with the texts of a prompt.
    conditioning_keys: frozenset[str]
    branch_keys: frozenset[str] = frozenset()
    strength_key: str = ""

    # A driving video that takes a forward of its own, once for all steps that read it. Keys of CONDITIONING that come
    # with it, the first of them the video itself: a CONDITIONING may have them for a part of the run. The model's
    # inputs that only a step gets which reads it. Of these, the text and the picture that the video may have: without
    # them it is passed once for each branch.
    driving_keys: tuple[str, ...] = ()
    driving_inputs: tuple[str, ...] = ()
    own_driving_inputs: frozenset[str] = frozenset()

    clips: ClipRules
    leads: bool = False  # whether latents are decoded before those of a clip, see `clip_lead`

    # Media of a request: whether they drive its videos; fields that must, and that may be given, and settings beside
    # them; pictures that are a latent frame before those of the video, and those that are a frame of tokens alone.
    driven: bool = False
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    front: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    # ------------------------------------------------------------------------------------------------------------ files

    def parameter_names(self, names: Collection[str], num_layers: int) -> list[str]:
        """Every official parameter name of a whole file of `num_layers` blocks, which holds `names`."""
        return plain.parameter_names(names, num_layers)

    def assembled(self, shapes: Shapes) -> Mapping[str, Assembled]:
        """What a file of these shapes stores in parts or other shapes, by the name that its key table has."""
        return {}

    def claims(self, metadata: Mapping[str, str]) -> bool:
        """Whether the metadata of a file says that it is the family's."""
        return False

    def lora_modules(self, num_layers: int) -> dict[str, str]:
        """Diffusers' module -> official module, in a transformer of `num_layers` blocks."""
        return plain.diffusers_modules(num_layers)

    def read_config(self, shapes: Shapes, metadata: Mapping[str, str]) -> DiTConfig:
        """The architecture that official shapes and the file's metadata describe. Raises UserError."""
        return plain.read_config(shapes, metadata)

    def choose(self, dit: DiTConfig, clues: Clues) -> Choice:
        """The task that a transformer was trained for; here the family's first, of one file. Raises OptionError."""
        if not clues.alone:
            raise OptionError(f"{self.tasks[0].name} is one transformer for all steps: leave the second file out")
        return Choice(self.tasks[0])

    # ------------------------------------------------------------------------------------------------------------ model

    @abstractmethod
    def model_class(self, config: DiTConfig) -> type[WanModel]:
        """The class of an architecture's module, which is built from it."""

    def why_not_sparse(self, task: Task) -> str:
        """Why a task cannot have sparse attention; "": it can."""
        return ""

    def picture_bytes(self, width: int, height: int, frames: int, given: Collection[str]) -> int:
        """Bytes of host memory at the peak of making the inputs of pictures in float32, latents apart. given: fields of
        the request that have pictures."""
        return 54 * width * height * frames if {"image", "last_image", "keyframes"} & {*given} else 0

    def prepared_bytes(self, dit: DiTConfig, latents: tuple[int, ...], itemsize: int) -> int:
        """Bytes of what is prepared beside text, for latents [B, C, T, Y, X]."""
        return 0

    def prepared_forms(self, dit: DiTConfig, latents: tuple[int, ...], itemsize: int) -> tuple[PreparedForm, ...]:
        """The ways in which `prepared_bytes` may be kept, the plainest first; none: there is one way."""
        return ()

    def driving_costs(self, dit: DiTConfig, latents: tuple[int, int, int]) -> tuple[float, float]:
        """The time of a forward over the driving video, and of one of the model that does not read it, relative to one
        that does, for latents of so many frames, rows and columns."""
        return 1.0, 1.0

    def uncontrolled_cost(self, dit: DiTConfig) -> float:
        """The time of a forward in which no control video counts, relative to one in which one does."""
        return 1.0

    # ---------------------------------------------------------------------------------------------------------- request

    def check_request(self, request: Request, task: Task) -> None:
        """Raise OptionError for media that a task does not take or that cannot be read, and where some are missing."""
        self.check_fields(request, task)
        if request.denoise is not None and request.from_video is None:
            raise OptionError(
                f"denoise {request.denoise:g} given without a video to start from: give --from-video as well"
            )
        if task.image == "channels" and not request.pictures:
            raise OptionError(f"{task.name} turns an image into a video: give --image (and optionally --last-image)")
        self.check_begins(task, given_fields(request, BEGINS))
        from wan_core.media.video import picture_size

        for path in request.pictures:
            picture_size(path)  # a picture that cannot be read is found now

    def check_fields(self, request: Request, task: Task) -> None:
        """Raise OptionError for media and settings that a task does not take."""
        known = (*self.needs, *self.takes, *self.settings)
        if unknown := [option(one) for one in given_fields(request, (*MEDIA, *OTHERS, *SETTINGS)) if one not in known]:
            raise OptionError(
                f"{task.name} does not take {', '.join(unknown)}: leave it out, or load a model that does"
            )

    def check_begins(self, task: Task, fields: list[str]) -> None:
        """Raise OptionError for what no video of a task begins with. fields: those of `BEGINS` that are given."""
        pictures = [option(field) for field in fields if field in ("image", "last_image", "keyframes")]
        if task.image == "none" and pictures:
            raise OptionError(f"{task.name} takes no image: leave {pictures[0]} out, or load an image-to-video model")
        if task.image != "channels" and pictures not in ([], ["--image"]):
            raise OptionError(f"{task.name} takes a first frame only: leave {pictures[-1]} out")

    def video_size(self, request: Request, task: Task, multiple: int) -> VideoSize | None:
        """What the video is where media say what the request leaves open: sides are multiples of so many pixels. None:
        no media do. Raises OptionError for media that cannot be read."""
        return None

    def pose_prompt(self, request: Request) -> str | None:
        """What the driving video is described by; None: the family reads no text for it."""
        return None

    def cut_video(
        self,
        task: Task,
        frames: int,
        clip_frames: int | None = None,
        overlap: int | None = None,
        *,
        from_noise: bool = True,
        svi: bool = False,
    ) -> LongVideo:
        """How a video of so many frames is made. clip_frames, overlap: None stands for the family's. from_noise: no
        last picture and no video is given. svi: in clips of SVI 2.0 Pro. Raises OptionError."""
        rules = self.clip_rules(task, svi)
        if not (rules.always or clip_frames is not None):
            if overlap is not None:
                raise OptionError("clips of no frames asked for: give --clip-frames as well")
            return LongVideo((Clip(0, 0, frames, 0),), rules.leading)
        usual = min(task.frames, frames) if rules.anchored else task.frames
        clip = usual if clip_frames is None else clip_frames
        carried = rules.overlaps[0] if overlap is None else overlap
        check_clips(rules, clip, carried, task.name)
        if frames < 1:
            raise OptionError(f"{frames} frames given; a video has at least 1")
        if not rules.always and ((task.image == "none" and not self.driven) or not from_noise):
            raise OptionError(
                f"--clip-frames {clip} given: the next clip begins with frames of the one before, which needs an "
                "image-to-video model, and no --last-image or --from-video"
            )
        clips = cut_clips(rules, frames, clip, carried)
        if rules.anchored and not from_noise and clips[-1].end != frames:
            raise OptionError(
                f"--last-image given for a video of {frames} frames in clips of {clip}: the last clip ends with it, so "
                f"the video has {clips[-1].first + carried} or {clips[-1].end} frames: set --frames"
            )
        return LongVideo(clips, rules.leading, rules.anchored)

    def clip_rules(self, task: Task, svi: bool = False) -> ClipRules:
        """How a long video is cut, as the family or SVI 2.0 Pro does. Raises OptionError for a task without SVI."""
        if svi:
            raise OptionError(f"--svi given for {task.name}: SVI 2.0 Pro is for image-to-video of Wan 2.2 A14B alone")
        return self.clips

    # ----------------------------------------------------------------------------------------------------------- inputs

    def load_media(
        self, request: Request, dit: DiTConfig, size: tuple[int, int], fps: int, clip: Clip, hear: Hear
    ) -> Media | None:
        """The media of a request up to the end of the last `clip`, fitted to `size` (width, height); None: no media
        drive the family. Raises OptionError."""
        return None

    def pictures_seen(
        self, task: Task, media: Mapping[str, Tensor], clip: Clip, known: Callable[[], Tensor | None]
    ) -> dict[str, Tensor]:
        """Pictures [1, 3, 1, H, W] that CLIP looks at for a clip, by the names that `clip_inputs` gives their features:
        what the clip begins with. known() reads the known first or last picture in its own size, as the reference
        (Wan2.1/wan/image2video.py) and ComfyUI do."""
        if task.image_dim is None:
            return {}
        picture = media["carried"][:, :, -1:] if clip.carried else known()
        return {} if picture is None else {"image": picture}

    def with_settings(self, request: Request, inputs: Inputs, pose_context: Tensor | None) -> Inputs:
        """The fields of `Conditioning` with settings of a request. pose_context: text rows of `pose_prompt`."""
        return inputs

    @abstractmethod
    def inputs(self) -> InputReaders:
        """The functions behind `read_conditioning` and `clip_inputs`, imported from the family's `inputs`."""

    def read_conditioning(
        self, task: Task, vae: VAEConfig, extras: Mapping[str, Any], latent: Mapping[str, Any]
    ) -> Inputs:
        """The fields of `Conditioning` that ComfyUI's CONDITIONING (`extras`) and LATENT give. Raises OptionError."""
        return self.inputs().read_conditioning(task, vae, extras, latent)

    def clip_inputs(
        self, task: Task, vae: VideoVAE, seen: Mapping[str, Tensor], media: Mapping[str, Tensor], clip: Clip
    ) -> Inputs:
        """The fields of `Conditioning` of one clip, or of a video that is made in one.

        media: pixels of the clip by field of the request, [1, 3, F, H, W] in -1..1 (F is 1 for pictures); `carried`,
        the last frames of the clip before, or as many frames before it as `clips.history` says; `audio`, features of
        its sound; `lead`, of `clip_lead`. seen: CLIP features of `pictures_seen`.
        """
        return self.inputs().clip_inputs(task, vae, seen, media, clip)

    def speech_states(self, dit: DiTConfig) -> tuple[int, int] | None:
        """How many states of a speech encoder a transformer takes, and how wide they are; None: it takes no sound."""
        return None

    def clip_lead(self, vae: VideoVAE, media: Mapping[str, Tensor], clip: Clip) -> Tensor:
        """Un-normalised latents to decode before a clip's; their frames are left out. For families with `leads`."""
        raise NotImplementedError
