"""Where the models are and how they are loaded: `LoadOptions`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wan_core.config.checks import OptionError
from wan_core.config.table import check, option

# Quantised storage and matmuls of the transformer's linears; `wan_core.ops.quant.schemes` describes each.
QUANTIZED = ("fp8", "fp8-tensor", "fp8-weights", "te-delayed", "te-current", "te-block", "int8")
PRECISIONS = ("checkpoint", "bf16", "fp32", *QUANTIZED)
VAE_PRECISIONS = ("auto", "bf16", "fp32")
COMPILES = ("off", "blocks")
RESIDENCIES = ("auto", "resident", "swap", "stream", "shard")
LORA_MODES = ("auto", "merge", "attach")
LORA_EXPERTS = ("auto", "high", "low")


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
    def parse(cls, text: str) -> LoraOptions:
        """`FILE` or `FILE:STRENGTH`, after `high=` or `low=` for that expert. Raises OptionError."""
        expert, _, file = text.partition("=")
        if expert not in ("high", "low"):
            expert, file = "auto", text
        path, colon, number = file.rpartition(":")
        if colon and path and not Path(file).exists():
            try:
                return cls(path=path, strength=float(number), expert=expert)
            except OptionError:
                raise
            except ValueError:
                pass  # a colon in a path, as in C:\\loras
        return cls(path=file, expert=expert)


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
        "transformer's matrices in FP8 (te: Transformer Engine), see docs/precision.md",
        tip="What the transformer computes in. 'checkpoint': bf16 on a GPU, fp32 on a CPU, and weights that the "
        "file packs (GGUF, NVFP4, MXFP8, INT8) stay packed in memory; FP8 files that ask for products in 16 bits get "
        "them; fp16 is never used, because Wan's activations overflow in it. 'fp8' multiplies the blocks' matrices in "
        "FP8 whatever the file asks for, faster and in half the memory, with a scale for every row ('-tensor', "
        "'-block': for those); it needs a GPU with FP8 units (Ada or newer, for '-block' Hopper). 'te-...' does so "
        "with the kernels of Transformer Engine, where that is installed. 'fp8-weights' only stores FP8: "
        "half the memory on any GPU, no faster. 'int8' multiplies in INT8, rotated, from Turing on.",
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
    )
    vae_precision: str = option("auto", choices=VAE_PRECISIONS, help="of the VAE; auto: bf16 on a GPU, fp32 on a CPU")
    attention: str = option(
        "auto",
        help="backend, see `doctor`; fast: one that rounds to FP8 or INT8, where the card has one that is faster "
        "(default %(default)s)",
        tip="The attention kernel. 'auto' takes the fastest that runs here and changes no numbers; FP8 and int8 "
        "kernels ('cudnn-fp8', 'int8', 'sage') only by name, or by 'fast', which takes the card's first. "
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
        None,
        fields=("memory_limit", "host_memory_limit"),
        help="use at most so much device memory, to plan and run as on a smaller GPU; and so much host memory for "
        "weights that wait there, and for what Animate-2 prepares (other weights stay in their mapped files). /64 "
        "limits host memory alone (default: what is available)",
        metavar="GIB[/HOST]",
    )
    host_memory_limit: float | None = None
    lora_mode: str = option(
        "auto",
        choices=LORA_MODES,
        help="merge LoRAs into the weights, or attach them as extra matmuls; auto: attach to weights that stay "
        "packed (GGUF), else merge",
        tip="How LoRAs are put on this model. 'merge': summed into the weights, which costs nothing while it runs; "
        "another strength reads the weights that change again. 'attach': two more products in every linear, some "
        "percent slower; another strength takes no time. 'auto': merge, and attach where weights stay packed "
        "(GGUF).",
        advanced=True,
    )
    loras: tuple[LoraOptions, ...] = option(
        (),
        flag="lora",
        help="a LoRA, for the expert that its metadata or name contains, else for both; high=FILE or low=FILE: for "
        "that expert; FILE:0.8: at this strength; may be repeated",
        metavar="[EXPERT=]FILE[:STRENGTH]",
        parse=LoraOptions.parse,
        several=True,
    )

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
