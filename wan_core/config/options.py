"""Options of a generation: `LoadOptions` says where the models are and how to load them, `Request` what to make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wan_core.config.checks import OptionError, check_choice, check_range
from wan_core.config.skipping import SkipOptions
from wan_core.config.windows import WindowOptions

# Quantised storage and matmuls of the transformer's linears; `wan_core.ops.quant.schemes` describes each.
QUANTIZED = ("fp8", "fp8-tensor", "fp8-block", "fp8-weights", "te-delayed", "te-current", "te-block", "int8")
PRECISIONS = ("checkpoint", "bf16", "fp32", *QUANTIZED)
COMPILES = ("off", "blocks")
RESIDENCIES = ("auto", "resident", "swap", "stream", "shard")
GUIDANCE_MODES = ("auto", "sequential", "batched")
LORA_MODES = ("auto", "merge", "attach")
MAX_OUTPAINT = 8192
LORA_EXPERTS = ("auto", "high", "low")


@dataclass(frozen=True, kw_only=True)
class NagOptions:
    """Normalized attention guidance: a negative prompt in steps without guidance. Raises OptionError.

    scale: how far cross-attention moves away from the negative prompt. tau: at most this many times the norm that it
    had. alpha: share of the result, the rest is what it was. Source: arXiv:2505.21179.
    """

    scale: float = 11.0
    tau: float = 2.5
    alpha: float = 0.25

    def __post_init__(self) -> None:
        check_range("NAG scale", self.scale, 1, 100, "11 is usual for Wan, 1 has no effect")
        check_range("NAG tau", self.tau, 1, 10, "2.5 is usual for Wan")
        check_range("NAG alpha", self.alpha, 0, 1, "0.25 is usual for Wan, 0 has no effect")

    @classmethod
    def parse(cls, text: str) -> NagOptions:
        """`SCALE`, `SCALE/TAU` or `SCALE/TAU/ALPHA`. Raises OptionError."""
        try:
            numbers = [float(number) for number in text.split("/")]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 3:
            raise OptionError(f"NAG {text!r} given; write scale, or scale/tau/alpha such as 11/2.5/0.25")
        return cls(**dict(zip(("scale", "tau", "alpha"), numbers, strict=False)))


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """How much a control video counts (VACE), 1 as trained, and from which share of the run to which. Raises
    OptionError."""

    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        check_range("control scale", self.scale, 0, 100, "1 is as trained, 0 has no effect")
        check_range("control start", self.start, 0, 1, "a share of the run")
        check_range("control end", self.end, 0, 1, "a share of the run")
        if not self.start < self.end:
            raise OptionError(f"control from {self.start:g} to {self.end:g} of the run given: the end comes later")


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """A LoRA file, its strength (-100 to 100, 1 as trained) and its expert. `expert`: "high", "low", or "auto": the
    expert that the file's metadata or name contains, both experts if neither contains one. Raises OptionError."""

    path: str
    strength: float = 1.0
    expert: str = "auto"

    def __post_init__(self) -> None:
        check_choice("lora expert", self.expert, LORA_EXPERTS)
        if not self.path.strip():
            raise OptionError("an empty name given for a LoRA: give its file, or leave the option out")
        if not -100 <= self.strength <= 100:
            raise OptionError(f"strength {self.strength} given for {self.path}; allowed are -100 to 100, 1 as trained")

    @classmethod
    def parse(cls, text: str, expert: str = "auto") -> LoraOptions:
        """`FILE` or `FILE:STRENGTH`. Raises OptionError."""
        path, colon, number = text.rpartition(":")
        if colon and path and not Path(text).exists():
            try:
                return cls(path=path, strength=float(number), expert=expert)
            except OptionError:
                raise
            except ValueError:
                pass  # a colon in a path, as in C:\\loras
        return cls(path=text, expert=expert)


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Where the models are and how they are loaded. Raises OptionError.

    `model` is "tiny" (the embedded model), "random:TASK" (random weights of that task's full size, for benchmarks) or
    the folder of a whole release; the single paths override its files. `precision` "checkpoint" keeps the dtype of
    the file. A quantised precision does not quantise the first and last `keep_blocks` blocks.
    """

    model: str | None = None
    task: str | None = None  # None: recognised from the transformer
    high: str | None = None
    low: str | None = None
    text_encoder: str | None = None
    tokenizer: str | None = None
    vae: str | None = None
    clip_vision: str | None = None  # of image-to-video models that need one (Wan 2.1)
    audio_encoder: str | None = None  # wav2vec 2.0, of models that hear (S2V)
    device: str = "auto"
    precision: str = "checkpoint"
    keep_blocks: int = 0
    vae_precision: str = "auto"
    attention: str = "auto"
    compile: str = "off"
    residency: str = "auto"
    loras: tuple[LoraOptions, ...] = ()
    lora_mode: str = "auto"  # see `wan_core.pipeline.loras`
    resident_blocks: int | None = None  # blocks that stay on the device while the others stream; None: as many as fit
    memory_limit: float | None = None  # GiB of device memory to use, to plan and run as on a smaller GPU
    host_memory_limit: float | None = None  # GiB of host memory for weights that wait there, and what is prepared

    def __post_init__(self) -> None:
        check_choice("lora mode", self.lora_mode, LORA_MODES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("vae precision", self.vae_precision, ("auto", "bf16", "fp32"))
        check_choice("compile", self.compile, COMPILES)
        check_choice("residency", self.residency, RESIDENCIES)
        if self.host_memory_limit is not None and not self.host_memory_limit > 0:
            raise OptionError(f"host memory limit {self.host_memory_limit:g} GiB given; allowed are numbers above 0")
        if self.resident_blocks is not None and self.residency not in ("auto", "stream"):
            raise OptionError(
                f"{self.resident_blocks} resident blocks given with residency {self.residency!r}; resident blocks need "
                "streaming: use residency stream"
            )
        if self.model is None and not (self.high or self.low):
            raise OptionError(
                "no model given: use --model tiny, --model FOLDER of a release, or --high FILE and --low FILE"
            )


def check_outpaint(pixels: tuple[int, ...]) -> None:
    """Raise OptionError unless these are pixels to the left, top, right and bottom."""
    if len(pixels) != 4 or not all(0 <= side <= MAX_OUTPAINT for side in pixels) or not any(pixels):
        raise OptionError(
            f"outpaint {'/'.join(map(str, pixels))} given; write pixels to the left, top, right and bottom, 0 to "
            f"{MAX_OUTPAINT} each, for example 120/0/120/0"
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One video to make. Fields that are None take the task's default; with an image the size follows its aspect ratio.

    Sizes in pixels, `fps` frames per second (1 to 240), `boundary` a share of the noise (0 to 1). Raises OptionError.
    """

    prompt: str
    negative_prompt: str | None = None
    image: str | None = None  # path of the first frame
    last_image: str | None = None  # path of the last frame
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: int | None = None
    steps: int | None = None
    shift: float | None = None
    boundary: float | None = None
    guidance_high: float | None = None
    guidance_low: float | None = None
    guidance_mode: str = "auto"
    solver: str | None = None  # None: the preset's, or unipc
    preset: str = "auto"  # settings for step-distilled weights, see `wan_core.sampling.presets`
    seed: int = 0
    skip: SkipOptions | None = None  # step caching, guidance schedule, sparse attention; None: every forward runs
    from_video: str | None = None  # path of the video that video-to-video starts from
    denoise: float | None = None  # strength of video-to-video, 0..1; None: 0.7 with a video
    reference: str | None = None  # path of a picture: who moves as in the driving videos
    pose_video: str | None = None  # path of the video that is followed
    face_video: str | None = None  # path of a video of a face whose expression is followed
    background: str | None = None  # path of a video in which the reference replaces somebody
    mask: str | None = None  # path of a video that is white where that somebody is
    pose_prompt: str | None = None  # describes the driving video; None: the prompt does
    pose_strength: float | None = None  # factor on what is read of the driving video; None: 1
    reference_strength: float | None = None  # the same of the reference
    face_guidance: bool | None = None  # whether guidance leads away from a still face as well; None: yes
    control_video: str | None = None  # path of a video that is followed, or of which a part is made anew
    outpaint: tuple[int, int, int, int] | None = None  # so many pixels left, top, right and bottom of that are made
    camera: str | None = None  # motions of a camera, or the lines of a file of poses
    control: ControlOptions | None = None  # how much the control video counts
    audio: str | None = None  # path of the sound of a video whose model hears it
    clip_frames: int | None = None  # a longer video is made in clips of so many frames
    overlap: int | None = None  # so many of them are the last of the clip before
    nag: NagOptions | None = None  # the negative prompt in steps without guidance
    windows: WindowOptions | None = None  # each forward sees so many frames of a longer video

    def __post_init__(self) -> None:
        check_choice("guidance mode", self.guidance_mode, GUIDANCE_MODES)
        if not 0 <= self.seed < 2**64:
            raise OptionError(f"seed {self.seed} given; allowed are 0 to 2^64 - 1")
        if (self.width is None) != (self.height is None):
            raise OptionError("only one of width and height given; give both, or neither for the task's own size")
        for name in ("pose_strength", "reference_strength"):
            strength = getattr(self, name)
            if strength is not None and not 0 <= strength <= 10:
                raise OptionError(f"{name.replace('_', ' ')} {strength:g} given; allowed are 0 to 10")
        if self.fps is not None and not 1 <= self.fps <= 240:
            raise OptionError(f"fps {self.fps} given; allowed are 1 to 240")
        if self.outpaint is not None:
            check_outpaint(self.outpaint)
