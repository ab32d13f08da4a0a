"""From a user's `LoadOptions` to the four models of a run, held where the run needs them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import nn

from wan_core.checkpoint import find_parts, load_vae
from wan_core.checkpoint.load import StoredValues
from wan_core.config import LoadOptions, OptionError
from wan_core.execution.compile_cache import Artifacts
from wan_core.execution.memory.planning import MemoryPlan, cap_memory
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import check_compile, compilations, compiled_anew, optimize, optimize_vae
from wan_core.execution.report import Report
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.tasks import Task
from wan_core.ops.attention.registry import resolve_attention
from wan_core.ops.quant.packed import PRECISION as PACKED
from wan_core.ops.quant.packed import PackedLinear
from wan_core.ops.quant.schemes import SCHEMES, resolve_scheme
from wan_core.ops.quant.swap import Quantization
from wan_core.parallel.conditioning import text_rank
from wan_core.parallel.mesh import RankMesh
from wan_core.parallel.sequence import check_lse
from wan_core.parallel.sharded import load_sharded_dit, why_not_shard
from wan_core.parallel.weights import shared_checkpoint
from wan_core.pipeline.loading import load_parts
from wan_core.pipeline.loras import AppliedLoras, check_packed, choose_mode, lora_bytes, lora_files, merging, read_loras
from wan_core.pipeline.memory_planning import Planned, make_residency, plan_models
from wan_core.pipeline.rehearsal import Rehearsal, why_not_beside
from wan_core.pipeline.resolved_request import Job
from wan_core.pipeline.sources import TINY, Part, Parts, is_packed, recognise


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
    planned: Planned | None = None  # None on a CPU
    artifacts: Artifacts | None = None  # where blocks are compiled
    rehearsed: bool = False  # the first step was prepared while weights were read
    ranks: RankMesh | None = None  # that run it together

    @property
    def device(self) -> torch.device:
        return self.residency.device

    def expert(self, name: str) -> WanModel:
        """Ready on the device. A task with a single transformer has it as `high`, whichever is asked for."""
        return cast(WanModel, self.residency.use(name if name in self.residency.models else "high"))

    @property
    def compiles(self) -> bool:
        """Whether the next forward compiles its block, as far as is known."""
        kept = self.artifacts is None or self.artifacts.loaded or bool(self.artifacts.saved)
        return not kept and not self.rehearsed

    def keep_compiled(self) -> bool:
        """Write what this process compiled to disk, for the next; whether there was anything new."""
        return self.artifacts is not None and self.artifacts.save(compilations(), compiled_anew())

    def prefetch(self, name: str, other: str, runs: int) -> None:
        """The next `runs` runs of the blocks of expert `name` are the last before `other` is asked for."""
        self.residency.prefetch(name, other, runs)

    def place(self, job: Job) -> MemoryPlan | None:
        """Have the models where `job` needs them: another size may take another plan than the one they were loaded
        by. None on a CPU."""
        if self.planned is None:
            return None
        plan = self.planned(job, self.residency)
        self.residency.follow(plan.policy, plan.resident_blocks, plan.room if plan.together else None, plan.beside)
        return plan

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
    planned = None
    wanted = read_loras(options.loras, parts.dit, "low" in parts.of)
    loras = [one for several in wanted.values() for one in several]
    if report.device.type == "cuda":
        if options.memory_limit is not None:
            cap_memory(report.device, options.memory_limit)
        extra = lora_bytes(loras)
        planned = partial(plan_models, parts, options, dtypes, precision, report.device, held_as=held_as, extra=extra)
    elif options.memory_limit is not None:
        raise OptionError("a memory limit is one of a GPU's memory, and this run is on a CPU: leave it out")
    artifacts = None
    if options.compile != "off":
        what = {"precision": precision, "keep_blocks": options.keep_blocks, "attention": attention, "dit": parts.dit}
        artifacts = Artifacts.open(report.device, what)
    if ranks is not None:
        check_lse(attend.gives_lse, attention, ranks.mesh)
    high = parts.of["high"]
    why_not = why_not_shard(
        ranks, quantization is not None, options.compile != "off", high.scaled, high.path is not None
    )
    if why_not is None and loras:
        why_not = "LoRAs are summed into whole matrices, or run beside them: leave them out, or hold the experts whole"
    if options.residency == "shard" and why_not is not None:
        raise OptionError(f"residency 'shard' cannot be had: {why_not}")
    residency, shard = make_residency(parts, options, report, job, planned, ranks, shards=why_not is None)
    mapped = residency.policy == "swap" and quantization is None and high.path is not None
    scaled = parts.of["high"].scaled or is_packed(quantization)
    how, why = choose_mode(options.lora_mode, scaled=scaled, quantized=quantization is not None, mapped=mapped)
    if how == "attach" and is_packed(quantization):
        check_packed(loras, parts.dit)
    merges = {name: merging(wanted.get(name, []), report.device) if how == "merge" else None for name in parts.of}
    share = None
    if ranks is not None and residency.policy == "resident":
        share = partial(shared_checkpoint, ranks=ranks)

    def load(name: str) -> nn.Module:
        part = parts.of[name]
        if shard and ranks is not None and part.path is not None and isinstance(part.config, DiTConfig):
            return load_sharded_dit(part.path, ranks, dtypes[name])
        together = None if name == "text_encoder" else share
        return part.load(residency.load_device, dtypes[name], held_as[name], merges[name], together)

    names = [name for name in parts.of if name != "text_encoder" or ranks is None or ranks.rank == text_rank(ranks)]
    if job is not None and residency.policy == "stream":
        job = job.streamed()
    why_not = None
    if ranks is not None:
        why_not = "the ranks make it together"
    elif loras and how == "attach":
        why_not = "LoRAs are attached to its linears"
    elif is_packed(quantization):
        why_not = "what is packed differs from matrix to matrix"
    elif job is None:
        why_not = "the size of the video was not known while weights were read"
    else:
        memory = None if planned is None else planned(job)
        given = {"compile": options.compile, "precision": precision, "files": len(names)}
        why_not = why_not_beside(memory, job, parts.dit, dtypes["high"], quantization, **given)
    rehearsal = Rehearsal(
        config=parts.dit,
        device=report.device,
        dtype=dtypes["high"],
        quantization=quantization,
        attend=attend,
        compile=options.compile,
        job=job,
        artifacts=artifacts,
        why_not=why_not,
    )
    loaded = load_parts(names, load, report.device, in_order=share is not None, rehearsal=rehearsal)
    report.notes += rehearsal.notes
    for name in names:
        model, applied = loaded.pop(name), wanted.get(name, [])
        if isinstance(model, WanModel):
            if applied and how == "attach":
                path = parts.of[name].path
                original = None if path is None else StoredValues(path)
                AppliedLoras.of(model, report.device).apply(applied, original=original)
            report.notes += [
                f"{name}: {one.words('merged' if how == 'merge' else f'attached: {why}')}" for one in applied
            ]
            graphs = residency.policy == "resident"  # a graph knows addresses, and launches no copies
            shared = {"ranks": ranks}
            optimize(
                model, attend=rehearsal.attend, compile=options.compile, device=report.device, graphs=graphs, **shared
            )
        elif isinstance(model, VideoVAE):
            optimize_vae(model, report.device, ranks)
        residency.add(name, model)
        del model
    report.notes += residency.notes
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
    checkpoint, low = high.path, parts.low_path
    # Ranks stay where they were loaded: another place for another size would have to be agreed on by all of them.
    later = planned if ranks is None else None
    return Models(parts.task, residency, attention, checkpoint, low, files, later, artifacts, rehearsal.ready, ranks)


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
