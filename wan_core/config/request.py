"""What to make: `Request`, with the options of what it follows, prompts over time among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from wan_core.config.checks import OptionError, parse_size
from wan_core.config.plan_numbers import PlanNumbers
from wan_core.config.skipping import SkipOptions
from wan_core.config.table import Checked, check, option, parse_slashes, slashes

FORM = "write FRAME=TEXT, as 40='the dog runs away'"
LEAST = 4  # frames from one prompt to the next: latents have a frame for every four
GUIDANCE_MODES = ("auto", "sequential", "batched")
MAX_OUTPAINT = 8192
RANDOM_SEED = "random"


@dataclass(frozen=True, kw_only=True)
class NagOptions(Checked):
    """Normalized attention guidance: a negative prompt in steps without guidance. Raises OptionError.

    scale: how far cross-attention moves away from the negative prompt. tau: at most this many times the norm that it
    had. alpha: share of the result, the rest is what it was. Source: arXiv:2505.21179.
    """

    scale: float = option(
        11.0,
        name="NAG scale",
        low=1,
        high=100,
        advice="11 is usual for Wan, 1 has no effect",
        tip="How far attention moves away from the negative prompt. 11 is usual for Wan; 1 has no effect.",
        step=0.1,
    )
    tau: float = option(
        2.5,
        name="NAG tau",
        low=1,
        high=10,
        advice="2.5 is usual for Wan",
        tip="The result may be at most this many times as large as without. 2.5 is usual for Wan.",
        step=0.1,
    )
    alpha: float = option(
        0.25,
        name="NAG alpha",
        low=0,
        high=1,
        advice="0.25 is usual for Wan, 0 has no effect",
        tip="Share of the guided result; the rest is what it was. 0.25 is usual for Wan; 0 has no effect.",
        step=0.01,
    )

    @classmethod
    def parse(cls, text: str) -> NagOptions:
        """`SCALE`, `SCALE/TAU` or `SCALE/TAU/ALPHA`. Raises OptionError."""
        return parse_slashes(cls, text, "NAG: scale, or scale/tau/alpha such as 11/2.5/0.25")

    def words(self) -> str:
        """`11/2.5/0.25`, as `parse` reads it."""
        return slashes(self)


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """How much a control video counts (VACE), 1 as trained, and in which share of the run. Raises OptionError."""

    scale: float = option(
        1.0,
        name="control scale",
        low=0,
        high=100,
        advice="1 is as trained, 0 has no effect",
    )
    start: float = option(0.0, name="control start", low=0, high=1, advice="a share of the run")
    end: float = option(1.0, name="control end", low=0, high=1, advice="a share of the run")

    @classmethod
    def parse(cls, text: str) -> ControlOptions:
        """`SCALE` or `SCALE/START/END`. Raises OptionError."""
        return parse_slashes(cls, text, "control strength: scale, or scale/start/end such as 0.8/0/0.5")

    def __post_init__(self) -> None:
        check(self)
        if not self.start < self.end:
            raise OptionError(f"control from {self.start:g} to {self.end:g} of the run given: the end comes later")

    def words(self) -> str:
        """`0.8 from 0 to 0.5 of the run`."""
        return f"{self.scale:g} from {self.start:g} to {self.end:g} of the run"


@dataclass(frozen=True, kw_only=True)
class Keyframe:
    """A frame of the video, from 0, that is known: the picture in a file. Raises OptionError."""

    frame: int
    path: str

    def __post_init__(self) -> None:
        if self.frame < 0 or not self.path.strip():
            raise OptionError(f"keyframe {self.frame}={self.path} given; write FRAME=PICTURE, as 40=middle.png")

    @classmethod
    def parse(cls, text: str) -> Keyframe:
        """`FRAME=PICTURE`. Raises OptionError."""
        number, _, path = text.partition("=")
        if not number.isdecimal() or len(number) > 9:
            raise OptionError(f"keyframe {text[:60]!r} given; write FRAME=PICTURE, as 40=middle.png")
        return cls(frame=int(number), path=path)


@dataclass(frozen=True, kw_only=True)
class PromptAt:
    """A prompt that holds from a frame of the video on, from 0, up to that of the next. Raises OptionError."""

    frame: int
    text: str

    def __post_init__(self) -> None:
        if self.frame < 0 or not self.text.strip():
            raise OptionError(f"prompt {self.frame}={self.text[:40]!r} given; {FORM}")

    @classmethod
    def parse(cls, text: str) -> PromptAt:
        """`FRAME=TEXT`. Raises OptionError."""
        number, sign, words = text.partition("=")
        number = number.strip()
        if not sign or not number.isdecimal() or len(number) > 9:
            raise OptionError(f"prompt {text[:60]!r} given; {FORM}")
        return cls(frame=int(number), text=words.strip())


def check_prompts(starts: Sequence[int], frames: int | None = None) -> None:
    """Raise OptionError unless prompts that begin at these frames follow one another from frame 0 on, in a video of so
    many frames. None: its length is not known yet."""
    shown = ", ".join(map(str, starts))
    if starts and starts[0] != 0:
        raise OptionError(f"prompts at frames {shown} given; the first begins at frame 0, or earlier frames have none")
    for one, following in pairwise(starts):
        if following <= one:
            raise OptionError(f"prompts at frames {shown} given: write them in the order of their frames, each once")
        if following - one < LEAST:
            raise OptionError(
                f"prompts at frames {one} and {following} given; from one to the next are at least {LEAST} frames"
            )
    if starts and frames is not None and starts[-1] >= frames:
        raise OptionError(
            f"a prompt at frame {starts[-1]} given for a video of {frames} frames, which are 0 to {frames - 1}"
        )


def check_known(known: Sequence[int], frames: int) -> None:
    """Raise OptionError unless these are frames of a video of so many, each once."""
    for frame in known:
        if not 0 <= frame < frames:
            raise OptionError(f"keyframe {frame} given for a video of {frames} frames, which are 0 to {frames - 1}")
        if known.count(frame) > 1:
            raise OptionError(f"frame {frame} is known twice, by two keyframes, or the first or last image: give one")


def check_outpaint(pixels: tuple[int, ...]) -> None:
    """Raise OptionError unless these are pixels to the left, top, right and bottom."""
    if len(pixels) != 4 or not all(0 <= side <= MAX_OUTPAINT for side in pixels) or not any(pixels):
        raise OptionError(
            f"outpaint {'/'.join(map(str, pixels))} given; write pixels to the left, top, right and bottom, 0 to "
            f"{MAX_OUTPAINT} each, for example 120/0/120/0"
        )


def parse_outpaint(text: str) -> tuple[int, ...]:
    """`LEFT/TOP/RIGHT/BOTTOM` in pixels. Raises OptionError."""
    sides = text.split("/")
    if not all(side.isdecimal() and len(side) <= 5 for side in sides):
        raise OptionError(f"outpaint {text[:40]!r} given; write LEFT/TOP/RIGHT/BOTTOM in pixels, as 120/0/120/0")
    check_outpaint(pixels := tuple(map(int, sides)))
    return pixels


def parse_seed(text: str) -> int | str:
    """A number, or `RANDOM_SEED`, which is drawn for each run. Raises OptionError."""
    try:
        return text if text == RANDOM_SEED else int(text)
    except ValueError:
        raise OptionError(f"{text!r} is neither a whole number nor {RANDOM_SEED}") from None


@dataclass(frozen=True, kw_only=True)
class Request(PlanNumbers):
    """One video to make. Fields that are None take the task's default; with an image the size follows its aspect ratio.

    prompt: of all frames, beside `prompts_at` of some. Media are paths. keyframes: known frames beside the first and
    the last. Sizes in pixels, `fps` frames per second (1 to 240), `boundary` a share of the noise (0 to 1). denoise:
    None is 0.7 with `from_video`. outpaint: pixels on the left, top, right and bottom of `control_video` that are made.
    camera: motions, or the lines of a file of poses.
    clip_frames: a longer video is made in clips of so many frames, of which `overlap` are the last of the clip before;
    svi: these have an anchor picture and the latents of the clip before.
    skip: None where every forward runs. Raises OptionError.
    """

    prompt: str = option(text=True)
    prompts_at: tuple[PromptAt, ...] | None = option(
        None,
        flag="prompt-at",
        help="prompt from this frame on, counted from 0, up to that of the next: 0='a dog sleeps' and "
        "40='the dog runs away'; may be repeated, in the order of the frames, the first at 0. --prompt then says what "
        "holds for all of them (text-to-video, image-to-video, Fun)",
        metavar="FRAME=TEXT",
        parse=PromptAt.parse,
        several=True,
        text=True,
    )
    negative_prompt: str | None = option(
        None, help="what the video should not show; an empty text is allowed (default: {negative})", text=True
    )
    image: str | None = option(None, help="first frame (image-to-video, Fun, VACE)", once=True, path=True)
    last_image: str | None = option(None, help="last frame (image-to-video, Fun inpaint, VACE)", once=True, path=True)
    keyframes: tuple[Keyframe, ...] | None = option(
        None,
        flag="keyframe",
        help="picture of another frame, counted from 0; may be repeated (image-to-video, Fun inpaint, VACE). Multiples "
        "of 4 are best, as a last frame is one",
        metavar="FRAME=PICTURE",
        parse=Keyframe.parse,
        several=True,
    )
    from_video: str | None = option(
        None,
        help="video to start from (video-to-video), read at the frames per second of the new one",
        once=True,
        path=True,
    )
    denoise: float | None = option(
        None, help="strength of video-to-video, 0 to 1: how much of the noise it gets (default 0.7)"
    )
    audio: str | None = option(
        None,
        help="sound that the person of --reference speaks or sings, as long as the video (S2V): WAV, FLAC, MP3, "
        "M4A, OGG, or a video with sound",
        path=True,
    )
    control_video: str | None = option(
        None,
        help="video that is followed (depth, edges, poses: VACE, Fun control), or of which --mask or --outpaint "
        "says what is made anew (VACE)",
        path=True,
    )
    outpaint: tuple[int, int, int, int] | None = option(
        None,
        help="make so many pixels on each side of --control-video (VACE)",
        metavar="LEFT/TOP/RIGHT/BOTTOM",
        parse=parse_outpaint,
    )
    camera: str | None = option(
        None,
        help="path of the camera (Fun camera): motions such as zoom-in or pan-left:0.5+tilt-up with their speeds, "
        "or a file of poses, a line a frame as in RealEstate10K",
        metavar="MOTIONS|FILE",
    )
    control: ControlOptions | None = option(
        None,
        flag="control-strength",
        help="how much the control counts, and from which share of the run to which (VACE; default 1/0/1, as trained)",
        metavar="SCALE/START/END",
    )
    reference: str | None = option(
        None,
        help="picture of who moves as in the driving videos (Animate) or speaks (S2V), or of what is to be seen "
        "(VACE, Fun control); several are possible in ComfyUI only (WanCore VACE)",
        once=True,
        path=True,
    )
    pose_video: str | None = option(
        None, help="video that is followed: drawn poses (Animate, S2V), any video (Animate-2)", path=True
    )
    face_video: str | None = option(None, help="video of a face whose expression is followed (Animate)", path=True)
    background: str | None = option(None, help="video in which the reference replaces somebody (Animate)", path=True)
    mask: str | None = option(
        None,
        help="video that is white where that somebody is (Animate), or picture or video that is white where "
        "--control-video is made anew (VACE)",
        path=True,
    )
    pose_prompt: str | None = option(
        None, help="what the driving video shows (Animate-2; default: the prompt)", text=True
    )
    pose_strength: float | None = option(
        None,
        low=0,
        high=10,
        fields=("pose_strength", "reference_strength"),
        help="how strongly the driving video counts, and the reference (Animate-2; default 1/1)",
        metavar="POSE[/REFERENCE]",
    )
    reference_strength: float | None = option(None, low=0, high=10)
    face_guidance: bool | None = option(
        None,
        help="guidance above 1 also leads away from a still face; without it, from the negative prompt alone "
        "(Animate; default: it does)",
    )
    clip_frames: int | None = option(
        None,
        fields=("clip_frames", "overlap"),
        help="make a longer video in clips of N frames, of which OVERLAP are the last of the clip before (default: the "
        "family's)",
        metavar="N[/OVERLAP]",
    )
    overlap: int | None = None
    svi: bool | None = option(
        None,
        help="clips of SVI 2.0 Pro, with its LoRAs: each is made of --image as its anchor and of the last latents of "
        "the clip before, with a seed of its own (A14B image-to-video; default: --clip-frames 81/5)",
    )
    match_colours: float = option(
        0.0,
        low=0,
        high=1,
        advice="1 is all of it",
        help="make the colours of later clips those of the first, by so much: 0 to 1, against drift "
        "(default %(default)s)",
    )
    nag: NagOptions | None = option(
        None,
        help="let the negative prompt count in steps with guidance 1 (normalized attention guidance); 11/2.5/0.25 "
        "is usual",
        metavar="SCALE/TAU/ALPHA",
    )
    width: int | None = option(
        None,
        flag="size",
        fields=("width", "height"),
        help="WIDTHxHEIGHT in pixels (default: the task's, or the image's aspect)",
        parse=parse_size,
    )
    height: int | None = None
    frames: int | None = option(None, help="4n + 1")
    fps: int | None = option(None, low=1, high=240, help="")
    seed: int = option(
        0,
        help="0 to 2^64 - 1, or random: a new one, which is printed and in the report (default %(default)s)",
        parse=parse_seed,
    )
    guidance_mode: str = option(
        "auto",
        choices=GUIDANCE_MODES,
        help="run the two guidance branches one after the other (sequential) or as one batch",
        tip="Run the two branches of guidance as one forward ('batched') or apart. 'auto' decides by size. The "
        "result is the same but for rounding.",
        advanced=True,
    )
    skip: SkipOptions | None = None

    def __post_init__(self) -> None:
        check(self)
        if not 0 <= self.seed < 2**64:
            raise OptionError(f"seed {self.seed} given; allowed are 0 to 2^64 - 1")
        if (self.width is None) != (self.height is None):
            raise OptionError("only one of width and height given; give both, or neither for the task's own size")
        if self.outpaint is not None:
            check_outpaint(self.outpaint)
        check_prompts(self.prompt_starts)

    @property
    def prompt_starts(self) -> tuple[int, ...]:
        """The frames at which prompts of parts of the video begin."""
        return tuple(one.frame for one in self.prompts_at or ())

    @property
    def pictures(self) -> tuple[str, ...]:
        """The files of the frames that are known, in their order."""
        between = sorted(self.keyframes or (), key=lambda one: one.frame)
        paths = (self.image, *(one.path for one in between), self.last_image)
        return tuple(path for path in paths if path is not None)

    def known_frames(self, frames: int) -> tuple[int, ...]:
        """Which frames of a video of so many are known, where any beside the first and the last is."""
        between = [one.frame for one in self.keyframes or ()]
        first, last = [0] * (self.image is not None), [frames - 1] * (self.last_image is not None)
        return (*first, *sorted(between), *last) if between else ()
