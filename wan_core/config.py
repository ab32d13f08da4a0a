"""Architectures, tasks and user options: plain numbers in frozen dataclasses.

Two kinds live here. *Architectures* (`DiTConfig`, `TextConfig`, `VAEConfig`) say what a checkpoint is; they are read
from its shapes (`wan_core.checkpoint.detect`), never typed by a user. *Options* (`SampleOptions`, ...) say what a
user wants; they are checked once, when built, and a bad value raises `OptionError` with what was given, what is
allowed and what to do.

Nothing in this file knows torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

# --------------------------------------------------------------------------------------------------------------- errors


class UserError(ValueError):
    """What went wrong is the input, and the message says so to people. The base of every error of this kind."""


class OptionError(UserError):
    """A user's option is out of range: the message says what was given, what is allowed and what to do."""


# -------------------------------------------------------------------------------------------------------- architectures


@dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """The Wan 2.2 diffusion transformer. Everything but `num_heads` can be read from the shapes of a checkpoint.

    Source: Wan2.2/wan/modules/model.py and wan/configs/*.py.
    """

    in_channels: int  # 16 T2V, 36 I2V (16 noise | 4 mask | 16 image), 48 TI2V-5B
    out_channels: int
    dim: int
    ffn_dim: int
    num_heads: int  # dim // 128 unless the file's metadata says otherwise
    num_layers: int
    text_dim: int = 4096
    text_len: int = 512
    freq_dim: int = 256
    patch_size: tuple[int, int, int] = (1, 2, 2)
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or (self.dim // self.num_heads) % 2:
            raise OptionError(f"dim {self.dim} does not split into {self.num_heads} heads of an even size")

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads

    def tokens(self, frames: int, rows: int, columns: int) -> int:
        """Tokens of one video with so many latent frames, rows and columns."""
        pt, py, px = self.patch_size
        return (frames // pt) * (rows // py) * (columns // px)

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """How many of a head's channels encode time, rows and columns: (44, 42, 42) at head dim 128."""
        d = self.head_dim
        return d - 4 * (d // 6), 2 * (d // 6), 2 * (d // 6)


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """UMT5 encoder. Each layer has its own relative position table. Source: Wan2.2/wan/modules/t5.py."""

    vocab_size: int = 256384
    dim: int = 4096
    dim_attn: int = 4096
    dim_ffn: int = 10240
    num_heads: int = 64
    num_layers: int = 24
    num_buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class VAEConfig:
    """The causal video VAE, 2.1 and 2.2 in one description. Source: Wan2.2/wan/modules/vae2_1.py and vae2_2.py.

    `patch` 2 and `residual` True make it the 2.2 variant: pixels are folded 2x2 into channels, and every stage has an
    averaging shortcut around it. `latents_mean`/`latents_std` normalise latents for the transformer; `encode` and
    `decode` deal in *un-normalised* latents.
    """

    z_dim: int
    encoder_dim: int
    decoder_dim: int
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temporal_downsample: tuple[bool, ...] = (False, True, True)
    patch: int = 1
    residual: bool = False
    latents_mean: tuple[float, ...]
    latents_std: tuple[float, ...]

    @property
    def spatial_stride(self) -> int:
        """Pixels per latent row or column: 8 (2.1) or 16 (2.2)."""
        return self.patch * 2 ** (len(self.dim_mult) - 1)

    @property
    def temporal_stride(self) -> int:
        """Frames per latent frame after the first, 4."""
        return 2 ** sum(self.temporal_downsample)


# fmt: off
WAN21_MEAN = (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
              0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921)
WAN21_STD = (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
             3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160)
WAN22_MEAN = (-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
              0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
              -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
              -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667)
WAN22_STD = (0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
             0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
             0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
             0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744)
# fmt: on

T2V_A14B = DiTConfig(in_channels=16, out_channels=16, dim=5120, ffn_dim=13824, num_heads=40, num_layers=40)
I2V_A14B = replace(T2V_A14B, in_channels=36)
TI2V_5B = DiTConfig(in_channels=48, out_channels=48, dim=3072, ffn_dim=14336, num_heads=24, num_layers=30)
UMT5_XXL = TextConfig()
VAE_21 = VAEConfig(z_dim=16, encoder_dim=96, decoder_dim=96, latents_mean=WAN21_MEAN, latents_std=WAN21_STD)
VAE_22 = VAEConfig(
    z_dim=48, encoder_dim=160, decoder_dim=256, patch=2, residual=True, latents_mean=WAN22_MEAN, latents_std=WAN22_STD
)

# ---------------------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a family of checkpoints was trained and tuned for: the defaults of everything a user may leave out.

    Guidance is named by expert, never a tuple: the official config lists (low, high), other tools [high, low].
    Source: Wan2.2/wan/configs/*.py.
    """

    name: str
    in_channels: int
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
    negative_prompt: str = (
        "blurry, low quality, jpeg artefacts, overexposed, washed-out colours, still picture, subtitles, watermark, "
        "deformed hands, extra fingers, extra limbs, distorted face, cluttered background, walking backwards"
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="t2v-A14B", in_channels=16, two_experts=True, boundary=0.875, shift=12.0, steps=40,
             guidance_high=4.0, guidance_low=3.0, width=1280, height=720, frames=81, fps=16),
        Task(name="i2v-A14B", in_channels=36, two_experts=True, boundary=0.9, shift=5.0, steps=40,
             guidance_high=3.5, guidance_low=3.5, width=1280, height=720, frames=81, fps=16),
        Task(name="ti2v-5B", in_channels=48, two_experts=False, boundary=0.0, shift=5.0, steps=50,
             guidance_high=5.0, guidance_low=5.0, width=1280, height=704, frames=121, fps=24),
        # the embedded model, see docs/design.md
        Task(name="t2v-tiny", in_channels=16, two_experts=True, boundary=0.875, shift=5.0, steps=20,
             guidance_high=3.0, guidance_low=3.0, width=96, height=96, frames=17, fps=8, negative_prompt=""),
        Task(name="i2v-tiny", in_channels=36, two_experts=True, boundary=0.9, shift=5.0, steps=20,
             guidance_high=3.0, guidance_low=3.0, width=96, height=96, frames=17, fps=8, negative_prompt=""),
    )
}  # fmt: skip


def find_task(name: str) -> Task:
    """The task called `name`, any case. Raises OptionError listing the known ones."""
    for known, task in TASKS.items():
        if known.lower() == name.lower():
            return task
    raise OptionError(f"task {name!r} is not known; use one of: {', '.join(TASKS)}")


# -------------------------------------------------------------------------------------------------------------- options

# How the transformer's linears are held and multiplied where not plainly: `wan_core.quant.schemes` says what each is.
QUANTIZED = ("fp8", "fp8-tensor", "fp8-block", "fp8-weights", "te-delayed", "te-current", "te-block")
PRECISIONS = ("checkpoint", "bf16", "fp32", *QUANTIZED)
COMPILES = ("off", "blocks")
RESIDENCIES = ("auto", "resident", "swap", "stream")
GUIDANCE_MODES = ("auto", "sequential", "batched")
LORA_MODES = ("auto", "merge", "attach")
LORA_EXPERTS = ("auto", "high", "low")


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise OptionError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise OptionError(f"{name} {value!r} is not known; use one of: {', '.join(allowed)}")


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
    device: str = "auto"
    precision: str = "checkpoint"
    keep_blocks: int = 0
    vae_precision: str = "auto"
    attention: str = "auto"
    compile: str = "off"
    residency: str = "auto"
    loras: tuple[LoraOptions, ...] = ()
    lora_mode: str = "auto"  # see `wan_core.lora`
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
    preset: str = "auto"  # of step-distilled weights, see `wan_core.presets`
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


def check_folder(path: Path | None) -> None:
    """Raise OptionError now if a file could not be written there: before hours of work, not after."""
    if path is None:
        return
    parent = path.absolute().parent
    taken = path.is_dir() or (path.exists() and not os.access(path, os.W_OK))
    if taken or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OptionError(f"cannot write {path}: its folder must exist and be writable, and the name must be a file's")


def check_size(width: int, height: int, frames: int, *, multiple: int, temporal: int = 4) -> None:
    """Raise OptionError unless width and height are multiples of `multiple` pixels and frames is temporal * n + 1."""
    if width < multiple or height < multiple or width % multiple or height % multiple:
        near = [max(multiple, round(v / multiple) * multiple) for v in (width, height)]
        raise OptionError(
            f"size {width}x{height} given; width and height must be multiples of {multiple}. "
            f"The nearest is {near[0]}x{near[1]}."
        )
    if frames < 1 or (frames - 1) % temporal:
        near_frames = max(0, round((frames - 1) / temporal)) * temporal + 1
        raise OptionError(
            f"{frames} frames given; the count must be {temporal}n + 1 (1, {temporal + 1}, ..., 81). "
            f"The nearest is {near_frames}."
        )


# ------------------------------------------------------------------------------------------------ forwards left out

MAGCACHE_RULES = ("joint", "published")


@dataclass(frozen=True, kw_only=True)
class MagCacheOptions:
    """Reuse the residual of the transformer's blocks while its magnitude is known to change little.

    Published as E012K2R20: threshold 0.12, at most 2 skips in a row, 20 % retained. `wan_core.cache.magcache` has the
    rules, the presets and their source.
    """

    threshold: float  # accumulated error of magnitude up to which a step is skipped
    max_skips: int  # in a row
    retention: float  # share of every phase, from its first step on, that always computes
    rule: str = "joint"  # "joint": both guidance branches decide together; "published": each for itself
    order: int = 0  # of the forecast a skipped step uses; 0 reuses the last residual as it is

    def __post_init__(self) -> None:
        check_choice("magcache rule", self.rule, MAGCACHE_RULES)
        _check_range("magcache threshold", self.threshold, 0, 10, "published ones are 0.02 to 0.24")
        _check_range("magcache skips in a row", self.max_skips, 0, 50, "published ones are 2 to 4")
        _check_range("magcache retention", self.retention, 0, 1, "a share of the steps, published ones are 0.1 to 0.4")
        _check_range("forecast order", self.order, 0, 2, "0 reuses, 1 and 2 extrapolate")


@dataclass(frozen=True, kw_only=True)
class TaylorSeerOptions:
    """Compute every `interval`-th step and forecast the residual of the blocks in between from past ones."""

    interval: int
    order: int = 1
    retention: float = 0.2  # as for MagCache

    def __post_init__(self) -> None:
        _check_range("taylorseer interval", self.interval, 1, 50, "1 computes every step")
        _check_range("forecast order", self.order, 0, 2, "0 reuses, 1 and 2 extrapolate")
        _check_range("taylorseer retention", self.retention, 0, 1, "a share of the steps")


@dataclass(frozen=True, kw_only=True)
class AdaptiveOptions:
    """Decide while running, from how fast the velocity was seen to change: not known before, so not in the plan."""

    threshold: float  # estimated relative change of the velocity that may add up before a step computes again
    max_skips: int = 3
    retention: float = 0.2  # as for MagCache

    def __post_init__(self) -> None:
        _check_range("adaptive threshold", self.threshold, 0, 10, "0.05 is careful, 0.2 is fast")
        _check_range("adaptive skips in a row", self.max_skips, 0, 50, "2 to 4 are usual")
        _check_range("adaptive retention", self.retention, 0, 1, "a share of the steps")


@dataclass(frozen=True, kw_only=True)
class GuidanceOptions:
    """Steps that do without the unconditional branch.

    Outside of sigma `low` to `high` there is no guidance. Inside, the difference of the branches is computed every
    `every`-th step of a phase and reused in between.
    """

    low: float = 0.0
    high: float = 1.0
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise OptionError(
                f"guidance from sigma {self.low} to {self.high} given; both are shares of the noise from 0 to 1, the "
                "lower one first: 0.2-0.9"
            )
        _check_range("guidance every", self.every, 1, 50, "1 runs the unconditional branch at every guided step")


SPARSE_KERNELS = ("auto", "cudnn-fp8", "cudnn", "flex", "math")
SPARSE_SCORES = ("mean", "spread")


@dataclass(frozen=True, kw_only=True)
class SparseOptions:
    """Self-attention that reads a part of the keys: `wan_core.sparsity` has the presets and the schedule,
    `wan_core.attention.sparse` the arithmetic."""

    sparsity: float  # share of the blocks of keys that a sparse step leaves out
    dense_steps: float = 0.05  # share of the run, from its first step on, that reads everything
    ramp: float = 0.3  # share of the run, from its first step on, that leaves out half of the blocks at most
    dense_layers: int = 0  # so do these first layers, always
    mass: float | None = None  # stop at this share of the attention as estimated; None: as many blocks for every row
    floor: float = 0.05  # share of the blocks that is read at least, where `mass` decides
    score: str = "spread"  # "mean": by the means of blocks alone; "spread": and by how their keys scatter
    pooled: bool = True  # blocks that are left out stand in by their means
    reuse: int = 1  # computed steps that use a choice of blocks, the one it was made for included
    budgets: bool = True  # share out blocks between layers as calibrated, where a file beside the checkpoint says how
    kernel: str = "auto"

    def __post_init__(self) -> None:
        check_choice("sparse kernel", self.kernel, SPARSE_KERNELS)
        check_choice("score of blocks", self.score, SPARSE_SCORES)
        _check_range("sparsity", self.sparsity, 0, 0.99, "0.5 is careful, 0.875 fast")
        _check_range("share of dense steps", self.dense_steps, 0, 1, "a share of the steps")
        _check_range("ramp", self.ramp, 0, 1, "a share of the steps, 0 has none")
        _check_range("dense layers", self.dense_layers, 0, 1000, "0 to 2 are usual")
        _check_range("floor", self.floor, 0, 1, "a share of the blocks")
        _check_range("steps that use a choice of blocks", self.reuse, 1, 50, "1 chooses anew in every step")
        if self.mass is not None:
            _check_range("mass of attention", self.mass, 0.01, 1, "0.9 is usual")


@dataclass(frozen=True, kw_only=True)
class SkipOptions:
    """Which forwards of a generation need not run, and how much of attention. One policy at most decides about whole
    steps."""

    magcache: MagCacheOptions | None = None
    taylorseer: TaylorSeerOptions | None = None
    adaptive: AdaptiveOptions | None = None
    guidance: GuidanceOptions | None = None
    sparse: SparseOptions | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("magcache", "taylorseer", "adaptive") if getattr(self, name) is not None]
        if len(given) > 1:
            raise OptionError(f"{' and '.join(given)} given; each decides which steps are skipped: choose one of them")


def _check_range(name: str, value: float, low: float, high: float, advice: str) -> None:
    if not low <= value <= high:
        raise OptionError(f"{name} {value:g} given; allowed are {low:g} to {high:g} ({advice})")
