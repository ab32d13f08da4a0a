"""What a user wants: where the models are and how they are held, and the video to make."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wan_core.config.checks import OptionError, check_choice
from wan_core.config.skipping import SkipOptions

# How the transformer's linears are held and multiplied where not plainly: `wan_core.ops.quant.schemes` says what each
# is.
QUANTIZED = ("fp8", "fp8-tensor", "fp8-block", "fp8-weights", "te-delayed", "te-current", "te-block")
PRECISIONS = ("checkpoint", "bf16", "fp32", *QUANTIZED)
COMPILES = ("off", "blocks")
RESIDENCIES = ("auto", "resident", "swap", "stream", "shard")
GUIDANCE_MODES = ("auto", "sequential", "batched")
LORA_MODES = ("auto", "merge", "attach")
LORA_EXPERTS = ("auto", "high", "low")


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """A LoRA file and how strongly it counts. `expert`: "high" or "low"; "auto" is the one that the file's metadata or
    name speaks of, both where it speaks of none."""

    path: str
    strength: float = 1.0
    expert: str = "auto"

    def __post_init__(self) -> None:
        check_choice("lora expert", self.expert, LORA_EXPERTS)
        if not -100 <= self.strength <= 100:
            raise OptionError(f"strength {self.strength} given for {self.path}; allowed are -100 to 100, 1 is its own")

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
    """Where the models are and how they are held.

    `model` is "tiny" (the embedded model), "random:TASK" (random weights of that task's full size, for measuring) or
    the folder of a whole release; the single paths override its parts. `precision` "checkpoint" keeps the dtype of
    the file; a quantised one leaves the first and last `keep_blocks` blocks as they are.
    """

    model: str | None = None
    task: str | None = None  # None: recognised from the transformer
    high: str | None = None
    low: str | None = None
    text_encoder: str | None = None
    tokenizer: str | None = None
    vae: str | None = None
    clip_vision: str | None = None  # of image-to-video models that need one (Wan 2.1)
    device: str = "auto"
    precision: str = "checkpoint"
    keep_blocks: int = 0
    vae_precision: str = "auto"
    attention: str = "auto"
    compile: str = "off"
    residency: str = "auto"
    loras: tuple[LoraOptions, ...] = ()
    lora_mode: str = "auto"  # see `wan_core.pipeline.loras`
    resident_blocks: int | None = None  # of a transformer that streams; None: as many as fit
    memory_limit: float | None = None  # GiB of device memory, to run as on a smaller card

    def __post_init__(self) -> None:
        # From a worker or a file they come as plain dicts.
        loras = (LoraOptions(**one) if isinstance(one, dict) else one for one in self.loras)
        object.__setattr__(self, "loras", tuple(loras))
        check_choice("lora mode", self.lora_mode, LORA_MODES)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("vae precision", self.vae_precision, ("auto", "bf16", "fp32"))
        check_choice("compile", self.compile, COMPILES)
        check_choice("residency", self.residency, RESIDENCIES)
        if self.resident_blocks is not None and self.residency not in ("auto", "stream"):
            raise OptionError(
                f"{self.resident_blocks} resident blocks given with residency {self.residency!r}; a number of blocks "
                "stays where the others stream: use residency stream"
            )
        if self.model is None and not (self.high or self.low):
            raise OptionError(
                "no model given: use --model tiny, --model FOLDER of a release, or --high FILE and --low FILE"
            )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One video to make. What is None comes from the task, and with an image the size may follow its aspect."""

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
    preset: str = "auto"  # of step-distilled weights, see `wan_core.sampling.presets`
    seed: int = 0
    skip: SkipOptions | None = None  # which forwards need not run; None: every one runs

    def __post_init__(self) -> None:
        check_choice("guidance mode", self.guidance_mode, GUIDANCE_MODES)
        if not 0 <= self.seed < 2**64:
            raise OptionError(f"seed {self.seed} given; allowed are 0 to 2^64 - 1")
        if (self.width is None) != (self.height is None):
            raise OptionError("only one of width and height given; give both, or neither for the task's own size")
        if self.fps is not None and not 1 <= self.fps <= 240:
            raise OptionError(f"fps {self.fps} given; allowed are 1 to 240")
