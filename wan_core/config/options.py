"""Options of a generation: `LoadOptions` says where the models are and how to load them, `Request` what to make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wan_core.config.checks import OptionError, parse_size
from wan_core.config.skipping import SkipOptions
from wan_core.config.table import check, option, parse_slashes
from wan_core.config.windows import WindowOptions

# Quantised storage and matmuls of the transformer's linears; `wan_core.ops.quant.schemes` describes each.
QUANTIZED = ("fp8", "fp8-tensor", "fp8-block", "fp8-weights", "te-delayed", "te-current", "te-block", "int8")
PRECISIONS = ("checkpoint", "bf16", "fp32", *QUANTIZED)
VAE_PRECISIONS = ("auto", "bf16", "fp32")
COMPILES = ("off", "blocks")
RESIDENCIES = ("auto", "resident", "swap", "stream", "shard")
GUIDANCE_MODES = ("auto", "sequential", "batched")
LORA_MODES = ("auto", "merge", "attach")
MAX_OUTPAINT = 8192
LORA_EXPERTS = ("auto", "high", "low")
RANDOM_SEED = "random"


@dataclass(frozen=True, kw_only=True)
class NagOptions:
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
        digits=0.001,
    )
    tau: float = option(
        2.5,
        name="NAG tau",
        low=1,
        high=10,
        advice="2.5 is usual for Wan",
        tip="The result may be at most this many times as large as without. 2.5 is usual for Wan.",
        step=0.1,
        digits=0.001,
    )
    alpha: float = option(
        0.25,
        name="NAG alpha",
        low=0,
        high=1,
        advice="0.25 is usual for Wan, 0 has no effect",
        tip="Share of the guided result; the rest is what it was. 0.25 is usual for Wan; 0 has no effect.",
        step=0.01,
        digits=0.001,
    )

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def parse(cls, text: str) -> NagOptions:
        """`SCALE`, `SCALE/TAU` or `SCALE/TAU/ALPHA`. Raises OptionError."""
        return parse_slashes(cls, text, "NAG: scale, or scale/tau/alpha such as 11/2.5/0.25", read=float)


@dataclass(frozen=True, kw_only=True)
class ControlOptions:
    """How much a control video counts (VACE), 1 as trained, and from which share of the run to which. Raises
    OptionError."""

    scale: float = option(
        1.0,
        name="control scale",
        low=0,
        high=100,
        advice="1 is as trained, 0 has no effect",
        help="how much the control counts (VACE; default 1, as trained)",
    )
    start: float = option(
        0.0,
        name="control start",
        low=0,
        high=1,
        advice="a share of the run",
        help="from this share of the run on (default 0)",
        metavar="SHARE",
    )
    end: float = option(
        1.0,
        name="control end",
        low=0,
        high=1,
        advice="a share of the run",
        help="up to this share of the run (default 1)",
        metavar="SHARE",
    )

    def __post_init__(self) -> None:
        check(self)
        if not self.start < self.end:
            raise OptionError(f"control from {self.start:g} to {self.end:g} of the run given: the end comes later")


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """A LoRA file, its strength (-100 to 100, 1 as trained) and its expert. `expert`: "high", "low", or "auto": the
    expert that the file's metadata or name contains, both experts if neither contains one. Raises OptionError."""

    path: str
    strength: float = 1.0
    expert: str = option("auto", name="lora expert", choices=LORA_EXPERTS)

    def __post_init__(self) -> None:
        check(self)
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
    the folder of a whole release; the single paths override its files. task: None where it is recognised from the
    transformer. `precision` "checkpoint" keeps the dtype of the file. A quantised precision does not quantise the first
    and last `keep_blocks` blocks. lora_mode: see `wan_core.pipeline.loras`. Limits are in GiB.
    """

    model: str | None = option(
        None,
        help="tiny (the embedded model), random:TASK, the folder of a release, or ComfyUI's models folder (with "
        "--task where it holds several models); the name of a repository prints the command that downloads it",
        path=True,
    )
    task: str | None = option(None, help="override the recognised task: {tasks}")
    high: str | None = option(
        None, help="high-noise expert, or the only transformer: file, shard index or folder", path=True
    )
    low: str | None = option(None, help="low-noise expert", path=True)
    text_encoder: str | None = option(None, help="UMT5: file or folder", path=True)
    tokenizer: str | None = option(None, help="spiece.model, if the text encoder's file does not contain it", path=True)
    vae: str | None = option(None, help="VAE: file or folder", path=True)
    clip_vision: str | None = option(
        None, help="CLIP vision encoder: file or folder (Animate, Wan 2.1 image-to-video)", path=True
    )
    audio_encoder: str | None = option(None, help="wav2vec 2.0 encoder of the sound: file or folder (S2V)", path=True)
    device: str = option("auto", help="auto, cpu, cuda, cuda:N (default %(default)s)")
    precision: str = option(
        "checkpoint",
        choices=PRECISIONS,
        help="of transformer and text encoder; checkpoint: bf16 on a GPU, fp32 on a CPU. fp8-* and te-* store the "
        "transformer's matrices in FP8 (te: Transformer Engine), see docs/performance.md",
        tip="What the transformer computes in. 'checkpoint': bf16 on a GPU, fp32 on a CPU, and weights that the "
        "file packs (GGUF, NVFP4, MXFP8, INT8) stay packed in memory; fp16 is never used, because Wan's "
        "activations overflow in it. 'fp8' multiplies the blocks' matrices in FP8, faster and in half the memory, "
        "with a scale for every row ('-tensor', '-block': for those); it needs a GPU with FP8 units (Ada or newer, "
        "for '-block' Hopper). 'te-...' does so with the kernels of Transformer Engine, which must be installed. "
        "'fp8-weights' only stores FP8: half the memory on any GPU, no faster. 'int8' multiplies in INT8, rotated, "
        "from Turing on.",
    )
    keep_blocks: int = option(
        0,
        help="do not quantise the first and last N blocks",
        metavar="N",
        tip="How many of the first and of the last blocks an FP8 'precision' leaves as they are, for more exact "
        "results. 0: every block is quantised.",
        least=0,
        most=20,
        advanced=True,
        added=True,
    )
    vae_precision: str = option("auto", choices=VAE_PRECISIONS, help="of the VAE; auto: bf16 on a GPU, fp32 on a CPU")
    attention: str = option(
        "auto",
        help="backend, see `doctor`; fast: one that rounds to FP8 or INT8, where the card has one that is faster "
        "(default %(default)s)",
        tip="The attention kernel. 'auto' takes the fastest that runs here and changes no numbers; FP8 and int8 "
        "kernels ('cudnn-fp8', 'te-fp8', 'int8', 'sage') only by name, or by 'fast', which takes the card's first. "
        "One that cannot run is refused, never replaced silently.",
    )
    compile: str = option(
        "off",
        choices=COMPILES,
        help="compile one transformer block for all (default off)",
        tip="'blocks' compiles one transformer block, once for both experts: faster steps for some seconds at the "
        "first use. Another size, length, prompt or seed compiles nothing again. Needs Triton on a GPU, a C++ "
        "compiler on a CPU.",
        advanced=True,
        added=True,
    )
    residency: str = option(
        "auto",
        choices=RESIDENCIES,
        help="resident: all models on the device; swap: one at a time; stream: blocks streamed from host memory; "
        "shard: split over GPUs; auto: chosen by free memory (default)",
        tip="'auto': ComfyUI's memory manager decides what leaves the device; an expert that does not fit has its "
        "blocks streamed from host memory. 'resident': both experts stay on the device together. 'swap': "
        "everything else leaves before an expert is loaded. 'stream': blocks always stream. 'shard', with workers: "
        "every GPU holds a part of each expert.",
        advanced=True,
    )
    resident_blocks: int | None = option(
        None, help="blocks that stay on the device while the others stream (default: as many as fit)", metavar="N"
    )
    memory_limit: float | None = option(
        None, help="use at most this much device memory, to plan and run as on a smaller GPU", metavar="GIB"
    )
    host_memory_limit: float | None = option(
        None,
        help="use at most this much host memory for weights that wait there, and for what Animate-2 prepares; "
        "other weights stay in their mapped files (default: what is available)",
        metavar="GIB",
    )
    lora_mode: str = option(
        "auto",
        choices=LORA_MODES,
        help="merge LoRAs into the weights, or attach them as extra matmuls; auto: attach to weights that stay "
        "packed (GGUF), else merge",
        tip="How LoRAs are put on this model. 'merge': summed into the weights, which costs nothing while it runs; "
        "another strength reads the weights that change again. 'attach': two more products in every linear, some "
        "percent slower; another strength takes no time. 'auto': merge, and attach where weights stay packed "
        "(GGUF).",
        added=True,
    )
    loras: tuple[LoraOptions, ...] = ()

    def __post_init__(self) -> None:
        check(self)
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
class PlanNumbers:
    """The numbers of a schedule. Those that are None come from the preset, else from the task. Raises OptionError.

    steps: from noise to video. boundary: the high-noise expert runs where timestep >= boundary * 1000. solver: None is
    the preset's, or unipc. preset: settings for step-distilled weights, see `wan_core.sampling.presets`.
    """

    steps: int | None = option(None, help="", tip="How many steps from noise to video. {own}.", shown=0, least=0)
    shift: float | None = option(
        None,
        help="larger spends more steps on high noise",
        tip="Larger spends more of the steps on high noise. {own}.",
        shown=0.0,
        least=0,
        most=100,
        step=0.1,
        digits=0.001,
    )
    boundary: float | None = option(
        None,
        help="the high-noise expert runs where timestep >= boundary * 1000",
        tip="The high-noise expert runs the steps with at least this share of noise, the low-noise expert the "
        "rest. {own}.",
        shown=0.0,
        least=0,
        most=1,
        step=0.005,
        digits=0.0001,
        advanced=True,
    )
    guidance_high: float | None = option(
        None,
        help="",
        tip="How strongly the high-noise steps follow the prompt (CFG). 1 turns guidance off, which halves the "
        "time. {own}.",
        shown=0.0,
        least=0,
        most=100,
        step=0.1,
        digits=0.01,
    )
    guidance_low: float | None = option(
        None,
        help="",
        tip="The same for the low-noise steps. {own}.",
        shown=0.0,
        least=0,
        most=100,
        step=0.1,
        digits=0.01,
    )
    solver: str | None = option(
        None,
        help="default: the preset's, else unipc",
        tip="unipc is what Wan is released with; euler is what step-distilled models are trained for. heun runs "
        "two forwards a step; lcm adds new noise at each.",
        shown="unipc",
    )
    preset: str = option(
        "auto",
        help="settings for step-distilled weights, for options that are not given; auto: if a file's name or "
        "metadata says that it is distilled; -guided: with guidance for the high-noise expert (default "
        "%(default)s)",
        tip="Settings of step-distilled weights, for numbers left at 0: few Euler steps, no guidance, half of the "
        "steps for each expert ('-guided': guidance for the high-noise one). 'auto': where the name or metadata of "
        "a LoRA or model says that it is distilled. 'template': as ComfyUI's Wan 2.2 templates, 20 steps, or 4 "
        "with a distilled LoRA.",
        added=True,
    )


@dataclass(frozen=True, kw_only=True)
class Request(PlanNumbers):
    """One video to make. Fields that are None take the task's default; with an image the size follows its aspect ratio.

    Media are paths. Sizes in pixels, `fps` frames per second (1 to 240), `boundary` a share of the noise (0 to 1).
    denoise: None is 0.7 with `from_video`. outpaint: pixels on the left, top, right and bottom of `control_video` that
    are made. camera: motions, or the lines of a file of poses. clip_frames: a longer video is made in clips of so many
    frames, of which `overlap` are the last of the clip before; windows: each forward sees some frames of it. skip: None
    where every forward runs. Raises OptionError.
    """

    prompt: str
    negative_prompt: str | None = option(
        None, help="what the video should not show; an empty text is allowed (default: {negative})"
    )
    image: str | None = option(None, help="first frame (image-to-video, Fun, VACE)", once=True, path=True)
    last_image: str | None = option(None, help="last frame (image-to-video, Fun inpaint, VACE)", once=True, path=True)
    from_video: str | None = option(None, help="video to start from (video-to-video)", once=True, path=True)
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
    control: ControlOptions | None = None
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
    pose_prompt: str | None = option(None, help="what the driving video shows (Animate-2; default: the prompt)")
    pose_strength: float | None = option(
        None, low=0, high=10, help="how strongly the driving video counts (Animate-2; 1)"
    )
    reference_strength: float | None = option(
        None, low=0, high=10, help="how strongly the reference counts (Animate-2; 1)"
    )
    face_guidance: bool | None = option(
        None,
        help="guidance above 1 also leads away from a still face; without it, from the negative prompt alone "
        "(Animate; default: it does)",
    )
    clip_frames: int | None = option(
        None, help="make a longer video in clips of N frames (default: the family's)", metavar="N"
    )
    overlap: int | None = option(None, help="N of them are the last frames of the clip before", metavar="N")
    windows: WindowOptions | None = option(
        None,
        help="context windows: each forward sees LENGTH frames of a longer video, of which OVERLAP are also its "
        "neighbour's: 81/28; then options after colons: a schedule (standard_uniform, standard_static, "
        "looped_uniform, batched), how windows are fused (pyramid, relative, flat, overlap-linear), plain, retain, "
        "closed, nolead (docs/windows.md)",
        metavar="LENGTH[/OVERLAP]",
    )
    nag: NagOptions | None = option(
        None,
        help="let the negative prompt count in steps with guidance 1 (normalized attention guidance); 11/2.5/0.25 "
        "is usual",
        metavar="SCALE/TAU/ALPHA",
    )
    width: int | None = option(
        None, flag="size", help="WIDTHxHEIGHT in pixels (default: the task's, or the image's aspect)", parse=parse_size
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
