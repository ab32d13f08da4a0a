"""From a user's `LoadOptions` to the four models of a run, held where the run needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from wan_core.attention.registry import resolve_attention
from wan_core.cache.residual import residual_bytes
from wan_core.checkpoint import find_parts, load_vae
from wan_core.config import DiTConfig, LoadOptions, OptionError, Task, VAEConfig
from wan_core.job import Job
from wan_core.lora import AppliedLoras, check_packed, choose_mode, lora_bytes, lora_files, merging, read_loras
from wan_core.memory.residency import Residency, choose_residency
from wan_core.model.dit import WanModel
from wan_core.optimize import check_compile, optimize, optimize_vae
from wan_core.parallel.conditioning import text_rank
from wan_core.parallel.mesh import RankMesh
from wan_core.parallel.sequence import find_lse
from wan_core.parallel.sharded import load_sharded_dit, why_not_shard
from wan_core.parallel.weights import shared_checkpoint
from wan_core.parts import TINY, Part, Parts, recognise
from wan_core.quant.packed import PRECISION as PACKED
from wan_core.quant.packed import PackedLinear
from wan_core.quant.schemes import SCHEMES, resolve_scheme
from wan_core.quant.swap import Quantization
from wan_core.report import Report
from wan_core.text.umt5 import TextEncoder
from wan_core.vae import VideoVAE


@dataclass(frozen=True)
class Models:
    """Everything a run needs, held by `residency`; `high` and `low` are one module where a task has a single
    transformer."""

    task: Task
    residency: Residency
    attention: str
    checkpoint: Path | None = None  # the high-noise expert's, or the only transformer's
    low_checkpoint: Path | None = None
    loras: tuple[Path, ...] = ()  # of either expert
    ranks: RankMesh | None = None  # that run it together

    @property
    def device(self) -> torch.device:
        return self.residency.device

    def expert(self, name: str) -> WanModel:
        """Ready on the device. A task with a single transformer has it as `high`, whichever is asked for."""
        return cast(WanModel, self.residency.use(name if name in self.residency.models else "high"))

    def text_encoder(self) -> TextEncoder:
        return cast(TextEncoder, self.residency.use("text_encoder"))

    def vae(self) -> VideoVAE:
        return cast(VideoVAE, self.residency.use("vae"))

    @property
    def vae_config(self) -> VAEConfig:
        return cast(VideoVAE, self.residency.models["vae"]).config

    @property
    def dit_config(self) -> DiTConfig:
        return cast(WanModel, self.residency.models["high"]).config


def choose_device(name: str) -> torch.device:
    """ "auto" is the first GPU, or the CPU where there is none. Raises OptionError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as fault:
        raise OptionError(f"device {name!r} is not known; use auto, cpu, cuda or cuda:N") from fault
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"device {name!r} given, but torch {torch.__version__} sees {torch.cuda.device_count()} NVIDIA GPUs"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What a model computes in. "checkpoint" and "auto": bf16 on a GPU, whatever the file stores, as the reference does
    (fp16 would overflow to black frames, fp32 has no fast attention); fp32 on a CPU, which is slow at everything else.
    """
    if precision == "fp32" or (precision != "bf16" and device.type == "cpu"):
        return torch.float32
    return torch.bfloat16


def load_models(
    parts: Parts, options: LoadOptions, report: Report, job: Job | None = None, ranks: RankMesh | None = None
) -> Models:
    """Load what `find_models` found; `job` says how much room a run will need beside the weights (None: the task's own
    size). ranks: those that load and run them together. Raises AttentionError for a backend that cannot run here."""
    dtypes = {
        name: compute_dtype(options.vae_precision if name == "vae" else options.precision, report.device)
        for name, part in parts.of.items()
    }
    attention, attend = resolve_attention(options.attention, report.device, dtypes["high"], parts.dit.head_dim)
    stored = options.precision == "checkpoint"
    precision = precision_of(options.precision, parts.of["high"], report.device, parts.of.get("low"))
    quantization = find_quantization(precision, report.device, options.keep_blocks, as_stored=stored)
    held_as = {name: holding(part, quantization, stored, report.device) for name, part in parts.of.items()}
    check_compile(options.compile, report.device)
    wanted = read_loras(options.loras, parts.dit, "low" in parts.of)
    loras = [one for several in wanted.values() for one in several]
    weights = sum(part.bytes(dtypes[name], held_as[name]) for name, part in parts.of.items()) + lora_bytes(loras)
    activations = activation_bytes(parts, job, dtypes["high"].itemsize)
    attend_lse = None if ranks is None else find_lse(attention, ranks.mesh)
    policy, why = choose_residency(options.residency, report.device, weights, activations)
    high = parts.of["high"]
    why_not = why_not_shard(
        ranks, quantization is not None, options.compile != "off", high.scaled, high.path is not None
    )
    if why_not is None and loras:
        why_not = "LoRAs are summed into whole matrices, or run beside them: leave them out, or hold the experts whole"
    if options.residency == "shard" and why_not is not None:
        raise OptionError(f"residency 'shard' cannot be had: {why_not}")
    shard = options.residency == "shard"
    if ranks is not None and ranks.agree(policy == "swap") and policy != "swap":
        policy, why = "swap", "another rank has no room for more"
    if policy == "swap" and options.residency == "auto" and ranks is not None and why_not is None:
        policy, why, shard = "resident", f"{why}; the ranks of a sequence hold the experts in parts", True
    report.notes.append(f"residency: {'shard' if shard else policy} ({why})")
    residency = Residency(report.device, policy)
    share = None
    if ranks is not None and policy == "resident":  # where weights stay in host memory, ranks share the file's mapping
        share = partial(shared_checkpoint, ranks=ranks)
    mapped = policy == "swap" and quantization is None and parts.of["high"].path is not None
    scaled = parts.of["high"].scaled or is_packed(quantization)
    how, why = choose_mode(options.lora_mode, scaled=scaled, quantized=quantization is not None, mapped=mapped)
    if how == "attach" and is_packed(quantization):
        check_packed(loras, parts.dit)

    def load(name: str) -> nn.Module:
        part = parts.of[name]
        if shard and ranks is not None and part.path is not None and isinstance(part.config, DiTConfig):
            return load_sharded_dit(part.path, ranks, dtypes[name])
        merge = merging(wanted.get(name, []), report.device) if how == "merge" else None
        together = None if name == "text_encoder" else share
        return part.load(residency.load_device, dtypes[name], held_as[name], merge, together)

    with text_encoder_beside(parts, load, ranks) as text_encoder:
        for name in parts.of:
            if name == "text_encoder":
                continue
            model = load(name)
            if isinstance(model, WanModel):
                applied = wanted.get(name, [])
                if applied and how == "attach":
                    AppliedLoras.of(model, report.device).apply(applied)
                report.notes += [
                    f"{name}: {one.words('merged' if how == 'merge' else f'attached: {why}')}" for one in applied
                ]
                shared = {"ranks": ranks, "attend_lse": attend_lse}
                optimize(model, attend=attend, compile=options.compile, device=report.device, **shared)
            elif isinstance(model, VideoVAE):
                optimize_vae(model, report.device, ranks)
            residency.add(name, model)
        if text_encoder is not None:
            residency.add("text_encoder", text_encoder())
    report.settings["models"] = {name: part.source for name, part in parts.of.items()}
    held = {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
    if quantization is not None:
        held |= {name: precision for name in ("high", "low") if name in held}
    held |= {
        name: f"{str(dtypes[name]).removeprefix('torch.')}, {PACKED} as {part.packed.fmt}"
        for name, part in parts.of.items()
        if part.packed is not None and is_packed(held_as[name])
    }
    report.settings |= {"precision": held, "keep_blocks": options.keep_blocks, "compile": options.compile}
    if options.loras:
        report.settings["loras"] = {
            name: ", ".join(f"{one.lora.where} {one.strength:g}" for one in several)
            for name, several in wanted.items()
            if several
        }
    files = lora_files(options.loras)
    return Models(parts.task, residency, attention, parts.of["high"].path, parts.low_path, files, ranks)


@contextmanager
def text_encoder_beside(
    parts: Parts, load: Callable[[str], nn.Module], ranks: RankMesh | None
) -> Iterator[Callable[[], nn.Module] | None]:
    """What gives the text encoder at the end of the body. Of several ranks one has it, and reads it meanwhile; for the
    others, and where there is none, None."""
    if "text_encoder" not in parts.of or (ranks is not None and ranks.rank != text_rank(ranks)):
        yield None
    elif ranks is None or ranks.mesh.size == 1:
        yield partial(load, "text_encoder")
    else:
        with ThreadPoolExecutor(1, "text encoder") as pool:
            yield pool.submit(load, "text_encoder").result


def precision_of(precision: str, part: Part, device: torch.device, other: Part | None = None) -> str:
    """What "checkpoint" means for a transformer: on a GPU, one that is stored in FP8 with scales is used as it is, and
    anywhere one that is packed, or whose `other` expert is."""
    if precision == "checkpoint" and any(one is not None and one.packed is not None for one in (part, other)):
        return PACKED
    if precision != "checkpoint" or not part.scaled or device.type != "cuda":
        return precision
    return "fp8" if SCHEMES["fp8"].why_not(device) is None else "fp8-weights"


def holding(part: Part, quantization: Quantization | None, stored: bool, device: torch.device) -> Quantization | None:
    """How the linears of `part` are held, `quantization` being the transformers' way. A text encoder that is packed or
    in FP8 stays so if what is `stored` was asked for."""
    if isinstance(part.config, DiTConfig):
        return quantization
    return Quantization(PackedLinear, device) if stored and part.packed is not None else None


def is_packed(quantization: Quantization | None) -> bool:
    return quantization is not None and issubclass(quantization.kind, PackedLinear)


def find_quantization(
    precision: str, device: torch.device, keep_blocks: int = 0, *, as_stored: bool = False
) -> Quantization | None:
    """How `precision` holds a transformer's linears; None where it does not quantise. as_stored: linears that a file
    holds in a higher precision keep it. Raises OptionError for one that cannot run on `device`."""
    if precision == PACKED:
        return Quantization(PackedLinear, device, keep_blocks)
    scheme = resolve_scheme(precision, device)
    if scheme is None and keep_blocks:
        raise OptionError(f"{keep_blocks} blocks to keep were given, but precision {precision!r} quantises nothing")
    return None if scheme is None else Quantization(scheme.load(), device, keep_blocks, as_stored)


def activation_bytes(parts: Parts, job: Job | None, itemsize: int = 2) -> int:
    """A generous estimate of what a run needs besides weights: the larger of a forward and the decode. itemsize: bytes
    of a number of the residuals that are kept."""
    if job is not None:
        _, _, T, Y, X = job.latent_shape
    else:
        stride, task = parts.vae.spatial_stride, parts.task
        T, Y, X = (task.frames - 1) // parts.vae.temporal_stride + 1, task.height // stride, task.width // stride
    forward = forward_bytes(parts.dit, parts.dit.tokens(T, Y, X))
    if job is not None:
        forward = forward * (1 + job.batched) + residual_bytes(job.plan, job.tokens, parts.dit.dim, itemsize)
    return max(forward, decode_bytes(parts.vae, Y, X))


def forward_bytes(config: DiTConfig, tokens: int) -> int:
    """A generous estimate of what a forward needs besides weights, bf16, both branches' text included."""
    text = 2 * 2 * 2 * config.num_layers * config.text_len * config.dim
    return tokens * (4 * config.ffn_dim + 20 * config.dim) + text


def decode_bytes(config: VAEConfig, rows: int, columns: int) -> int:
    """A generous estimate of what decoding or encoding latents of `rows` x `columns` takes besides weights, bf16: 10.5
    GiB for the 2.1 VAE at 720p, where 7.5 were measured, and 6.9 for the 2.2 VAE, where 6.5 were."""
    pixels = rows * columns * config.spatial_stride**2 // config.patch**2
    return 16 * 2 * pixels * config.temporal_stride * max(config.encoder_dim, config.decoder_dim)


def load_vae_only(model: str | None, vae: str | None, device: str, precision: str) -> tuple[VideoVAE, torch.device]:
    """The VAE of a release or a file, for decoding saved latents."""
    where = choose_device(device)
    if vae is None and model is None:
        raise OptionError("no VAE given: use --vae FILE, --model FOLDER of a release, or --model tiny")
    path = vae or (TINY / "vae.safetensors" if model == "tiny" else find_parts(str(model)).get("vae"))
    if path is None:
        raise OptionError(f"no VAE found in {model}: add --vae FILE")
    part = recognise(Path(path), "vae", load_vae)
    loaded = cast(VideoVAE, part.load(where, compute_dtype(precision, where), None))
    return optimize_vae(loaded, where), where
