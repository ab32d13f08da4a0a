"""Where the weights of a run are held: from the sizes of its models and of its activations, both known from headers
alone, to a memory plan and the residency that follows it.

Weights that do not stay on the GPU wait in pinned host memory, from where they reach it at full speed; which ones is
decided before any are read. Where there is not enough of it, weights that are used as they are stored stay in their
mapped files: the system reads and drops their pages as it has room, and copies are slower. Blocks of a packed file that
are kept are decoded, into host memory. The text encoder goes first, which a prompt needs once, then the low-noise
expert, which the last steps need.

Sizes that a CPU cannot hold are refused before anything of that size is made. `peak_bytes` says for all families what
the inputs of a video take; its numbers per pixel are measured (`tests/nodes/host_peaks.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, NamedTuple, cast

from wan_core.config import LoadOptions, OptionError, SparseOptions
from wan_core.config.host_memory import available_bytes
from wan_core.execution.memory.planning import (
    Beside,
    MemoryPlan,
    Placed,
    Sizes,
    beside_weights,
    cap_memory,
    device_room,
    plan_memory,
)
from wan_core.execution.memory.residency import KEPT_FREE, Policy, Residency, Waits
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.execution.report import GIB, Report
from wan_core.models.audio.wav2vec2 import SpeechConfig, encoding_bytes
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import DiTConfig, PreparedForm
from wan_core.models.wan.families.family import Family
from wan_core.ops.attention.sparse.kernels import BLOCK
from wan_core.ops.attention.sparse.slopes import HEADS
from wan_core.parallel.mesh import RankMesh
from wan_core.pipeline.check import check_activation
from wan_core.pipeline.loras import Wanted, check_packed, lora_bytes
from wan_core.pipeline.model_parts import Parts, is_packed
from wan_core.pipeline.settings import ModelSettings, PartToLoad
from wan_core.sampling.cache.residual import residual_bytes
from wan_core.sampling.conditioning import latent_shape
from wan_core.sampling.plan import Plan

STAY_IN_FILES = ("text_encoder", "low", "high")  # in this order
# Host memory for frames, libraries and compilers where weights stay in files, in place of `KEPT_FREE`. Of 16 GiB 15.3
# were available, and a process took at most 2.0 in all that were not its weights, and mapped 1.2 of libraries.
UNPLANNED = int(3.25 * GIB)
LORA_WHY = "the weights stay in the mapped file"


class HostPlan(NamedTuple):
    """`mapped`: names of the models whose weights stay in their files, all but so many bytes that are pinned. `pins`:
    there is room to pin the others; None: that is decided one by one."""

    mapped: Mapping[str, int] = MappingProxyType({})
    pins: bool | None = None

    def waits(self, name: str) -> Waits:
        """For `Residency.add`."""
        return Waits(False, self.mapped[name]) if name in self.mapped else Waits(self.pins)


def plan_host(parts: Mapping[str, PartToLoad], available: int | None, prepared: PreparedForm | None = None) -> HostPlan:
    """Where the weights of `parts` wait. available: bytes of host memory; None: not known. prepared: what a run keeps
    there beside them.

    Raises OptionError where they do not fit: what they need, and what to do."""
    if available is None:
        return HostPlan()
    mapped: list[str] = []
    prepared_bytes = 0 if prepared is None else prepared.host
    needed, room = sum(part.bytes for part in parts.values()), int(available * (1 - KEPT_FREE))
    for name in STAY_IN_FILES:
        full = needed > room or needed + prepared_bytes > available
        if full and name in parts and parts[name].stays_in_file:
            mapped.append(name)
            needed -= parts[name].bytes - parts[name].decoded_bytes
            room = available - UNPLANNED
    if needed + prepared_bytes > available:
        sizes = ", ".join(
            f"{name} {size / GIB:.1f}"
            for name, part in parts.items()
            if (size := part.decoded_bytes if name in mapped else part.bytes)
        )
        if prepared is not None and prepared_bytes:
            raise _no_room(prepared, needed, available)
        raise OptionError(
            f"these models wait in host memory, which takes {needed / GIB:.1f} GiB ({sizes}), and "
            f"{available / GIB:.1f} GiB are available: end other programs, or use files whose weights can stay there: "
            "scaled FP8 or GGUF with precision 'checkpoint', INT8 (ConvRot) with 'int8'"
        )
    # Transformers share what is left: their blocks are copied in every step, those of a text encoder once a prompt.
    experts = [name for name in mapped if name != "text_encoder"]
    spare = max(0, room - prepared_bytes - needed) // max(1, len(experts))
    return HostPlan({name: spare if name in experts else 0 for name in mapped}, True if needed <= room else None)


def check_prepared(
    form: PreparedForm | None, before: PreparedForm | None, waiting: int, limit_gib: float | None = None
) -> None:
    """Raise OptionError where host memory has no room for what a run keeps there, beside `waiting` bytes of weights.
    before: what the run before kept, whose memory may be used again."""
    available = host_room(limit_gib, waiting)
    if form is None or form.uses_again(before) or available is None:
        return
    if form.host and waiting + form.host > available:
        raise _no_room(form, waiting, available)


def _no_room(form: PreparedForm, weights: int, available: int) -> OptionError:
    return OptionError(
        f"{form.words}, take {form.host / GIB:.1f} GiB beside {weights / GIB:.1f} GiB of weights, and "
        f"{available / GIB:.1f} GiB of host memory are available: make a smaller video or shorter clips, end other "
        "programs, or use a GPU with more memory"
    )


def check_host(parts: Mapping[str, PartToLoad], available: int | None) -> None:
    """Raise OptionError where a CPU's models do not fit into host memory. Weights that are used as they are stored stay
    in their mapped files and do not count; blocks that are decoded do. available: bytes of host memory; None: not
    known."""
    sizes = {name: part.decoded_bytes if part.stays_in_file else part.bytes for name, part in parts.items()}
    sizes = {name: size for name, size in sizes.items() if size}
    if available is None or sum(sizes.values()) <= available:
        return
    gib = ", ".join(f"{name} {size / GIB:.1f}" for name, size in sizes.items())
    raise OptionError(
        f"on a CPU these models take {sum(sizes.values()) / GIB:.1f} GiB of host memory ({gib}), and "
        f"{available / GIB:.1f} GiB are available: end other programs, or use a smaller model or a GPU"
    )


def host_room(limit_gib: float | None = None, waiting: int = 0) -> int | None:
    """Bytes of host memory for weights, up to the limit; None: not known. waiting: of weights that are there now."""
    available = available_bytes()
    available = None if available is None else available + waiting
    if limit_gib is None:
        return available
    return int(limit_gib * GIB) if available is None else min(available, int(limit_gib * GIB))


def staying_in_file(part: PartToLoad, loras: Sequence[Wanted] = ()) -> PartToLoad:
    """`part` for weights that are a mapped file's: LoRAs are attached, because merging would copy them. Raises
    OptionError for one of `loras` that has to be merged."""
    check_attached(part, loras)
    return replace(part, lora_mode="attach", lora_why=LORA_WHY)


def check_attached(part: PartToLoad, loras: Sequence[Wanted]) -> None:
    """Raise OptionError for one of `loras` that has to be merged, where `part` stays packed in a mapped file."""
    config = part.part.config
    if is_packed(part.quantization) and isinstance(config, DiTConfig):
        check_packed(loras, config, "host memory is short, and they stay in the mapped file: end other programs")


POLICIES: tuple[Policy, ...] = ("resident", "swap", "stream")
"""From the most device memory to the least."""


def plans_memory(settings: ModelSettings) -> bool:
    """Whether memory is planned: on a GPU, where the memory limit is applied now. Raises OptionError for a limit on a
    CPU."""
    limit, on_gpu = settings.options.memory_limit, settings.device.type == "cuda"
    if limit is not None and not on_gpu:
        raise OptionError("a memory limit applies to a GPU, and this run is on a CPU: leave it out")
    if limit is not None:
        cap_memory(settings.device, limit)
    return on_gpu


def memory_plan_of(
    settings: ModelSettings, plan: Plan | None, layers: range | None = None, held: Residency | None = None
) -> MemoryPlan:
    """The memory plan of models that are held as `settings` say, on a GPU. plan: None is the task's own size. layers:
    the blocks of a transformer that this rank holds; None: all. held: what an earlier plan put on the device; it stays
    if `plan` fits."""
    options = settings.options
    loras, itemsize = lora_bytes(settings.attached_loras), settings.dtype.itemsize
    beside = beside_plan(settings.recognised, plan, settings.per_token(), itemsize, loras)
    sizes = model_sizes(settings, layers)
    available = device_room(settings.device, options.memory_limit)
    waiting = 0 if held is None else held.weights_in_host_memory()
    host, kept = host_room(options.host_memory_limit, waiting), None if held is None else held.kept_form
    placed = None
    if held is not None:
        available += held.weights_on_device()
        blocks = held.resident_blocks if held.policy == "stream" else None
        placed = Placed(policy=held.policy, resident_blocks=blocks, together=held.room is not None)
    mode = cast(Literal["auto", "resident", "swap", "stream"], options.residency)
    return plan_memory(sizes, beside, available, mode, options.resident_blocks, placed=placed, host=host, kept=kept)


def choose_residency(
    options: LoadOptions,
    report: Report,
    plan: MemoryPlan | None,
    layers: int,
    ranks: RankMesh | None,
    why_not_shard: str | None,
) -> tuple[Residency, bool]:
    """Where the weights are held, and whether ranks hold the experts in parts. plan: None on a CPU; there weights stay,
    unless streaming is asked for. layers: of a transformer."""
    device = report.device
    if options.residency == "shard":
        if why_not_shard is not None:
            raise OptionError(f"residency 'shard' is not available: {why_not_shard}")
        report.notes.append("residency: shard (asked for)")
        return Residency(device, "resident"), True
    if plan is None:
        return _on_cpu(options, report, layers), False
    if ranks is not None:
        # By the fullest device, for all of them: the ranks must agree.
        policy = POLICIES[int(ranks.agree(POLICIES.index(plan.policy)))]
        blocks = int(ranks.agree(plan.resident_blocks if plan.policy == "stream" else 1 << 20, largest=False))
        if policy != "resident" and options.residency == "auto" and why_not_shard is None:
            report.notes.append(f"residency: shard ({plan.why}; the ranks of a sequence hold the experts in parts)")
            return Residency(device, "resident"), True
        if policy != plan.policy:
            report.notes.append(f"residency: {policy} (another rank has no room for more)")
            blocks = blocks if policy == "stream" else 0
            return Residency(device, policy, resident_blocks=blocks, streams_text=plan.streams_text), False
    report.notes += [f"residency: {plan.policy} ({plan.why})", plan.table()]
    room = plan.room if plan.together else None
    made = Residency(
        device,
        plan.policy,
        resident_blocks=plan.resident_blocks,
        room=room,
        beside=plan.beside,
        streams_text=plan.streams_text,
        form=plan.form if ranks is None else None,  # ranks share host memory: each looks what is left when it runs
    )
    return made, False


def _on_cpu(options: LoadOptions, report: Report, layers: int) -> Residency:
    streams = options.residency == "stream" or options.resident_blocks is not None
    blocks = options.resident_blocks or 0
    if not 0 <= blocks <= layers:
        raise OptionError(f"{blocks} resident blocks given; the transformer has {layers}")
    report.notes.append(f"residency: {'stream' if streams else 'resident'} (weights are in host memory on a CPU)")
    policy = "stream" if streams else "resident"
    return Residency(report.device, policy, resident_blocks=blocks, streams_text=streams)


OTHERS = ("text_encoder", "vae", "clip_vision")


def model_sizes(settings: ModelSettings, layers: range | None = None) -> Sizes:
    """Sizes of the models that are loaded; a text encoder or VAE that is not loaded counts 0. layers: the layers of a
    transformer that this process loads; None: all."""
    others = {name: settings.parts[name].bytes if name in settings.parts else 0 for name in OTHERS}
    stage = stage_bytes(settings.parts["text_encoder"].units, 0) if "text_encoder" in settings.parts else 0
    units, experts = settings.parts["high"].units, 1 + ("low" in settings.parts)
    units = units if layers is None else (units[0], *(units[1 + layer] for layer in layers))
    return Sizes(units=units, experts=experts, text_stage=stage, **others)


def beside_plan(parts: Parts, plan: Plan | None, per_token: float, itemsize: int, loras: int = 0) -> Beside:
    """Device memory of a run besides weights. plan: None is the task's own size. Transformers alone encode and
    decode nothing. loras: bytes of attached ones, which stay on the device in every phase."""
    if plan is None:
        stride, task = parts.vae.spatial_stride, parts.task
        T, Y, X = parts.vae.latent_frames(task.frames), task.height // stride, task.width // stride
        beside = beside_weights(parts.dit, parts.vae, (1, parts.vae.z_dim, T, Y, X), per_token=per_token)
    else:
        B, C, T, Y, X = plan.latent_shape
        beside = beside_weights(
            parts.dit,
            parts.vae,
            (B, C, T, Y, X),
            per_token=per_token + slope_factor(parts.dit.num_heads, parts.dit.head_dim, plan.sparse),
            itemsize=itemsize,
            guided=plan.reads_negative,
            residuals=residual_bytes(plan, B * parts.dit.most_tokens(T, Y, X), parts.dit.dim, itemsize),
            batched=plan.batched,
            image=plan.image,
            texts=parts.dit.text_rows(plan.text_rows) / parts.dit.text_len,
        )
    if parts.speech is not None:
        seconds = parts.task.frames / parts.task.fps if plan is None else plan.seconds
        config = cast(SpeechConfig, parts.speech.config)
        beside = replace(beside, sound=encoding_bytes(config, seconds) if seconds else 0)
    beside = beside if "vae" in parts.of else replace(beside, text=0, decode=0, image=0)
    sizes = {name: getattr(beside, name) for name in ("text", "denoise", "decode", "image", "sound")}
    return replace(beside, **{name: size + loras for name, size in sizes.items() if size})


def check_fits(settings: ModelSettings, plan: Plan, room: int | None) -> None:
    """Raise OptionError for latents that cannot be sampled. room: bytes of host memory, where that is a CPU's."""
    parts, itemsize = settings.recognised, settings.dtype.itemsize
    if room is not None:
        beside = beside_plan(parts, plan, settings.per_token(), itemsize)
        check_sampling(plan.latent_shape, beside.denoise, room)
    B, _, T, Y, X = plan.latent_shape
    tokens = B * parts.dit.tokens(T, Y, X)
    check_activation((tokens, parts.dit.dim), itemsize, settings.device)


def slope_factor(heads: int, head_dim: int, sparse: SparseOptions | None) -> float:
    """Bytes of activations (see `FACTORS`) for the slopes of sparse attention: a matrix of the head's dim for each head
    and block. For a few heads at a time also keys and values, before and after dequantising, and covariances."""
    if sparse is None or not sparse.slope:
        return 0.0
    return head_dim / BLOCK + min(1.0, HEADS / heads) * (4 + head_dim / BLOCK)


def peak_bytes(
    family: Family,
    config: VAEConfig,
    width: int,
    height: int,
    frames: int,
    *,
    batch: int = 1,
    given: Collection[str] = (),
) -> int:
    """Bytes of everything that exists at once: latents of `batch` videos with the copy that is repeated, and what the
    family makes of the fields `given`. config: of the VAE. Raises OptionError for a size that cannot be made."""
    latents = 4 * math.prod(latent_shape(config, width, height, frames)) * (1 + batch)
    return latents + family.picture_bytes(width, height, frames, given)


def check_peak(
    family: Family,
    config: VAEConfig,
    size: tuple[int, int, int],
    room: int,
    *,
    batch: int = 1,
    given: Collection[str] = (),
) -> None:
    """Raise OptionError where `peak_bytes` of size (width, height, frames) is more than the `room` that is available,
    with how many frames would fit."""
    width, height, frames = size

    def peak(frames: int, batch: int = batch) -> int:
        return peak_bytes(family, config, width, height, frames, batch=batch, given=given)

    if peak(frames) <= room:
        return
    fitting = largest(lambda count: peak(4 * count + 1) <= room, (frames - 1) // 4)
    several = f" of {batch} videos" if batch > 1 else ""
    advice = f"at this size at most {4 * fitting + 1} frames fit" if fitting else "choose a smaller size"
    if not fitting and peak(frames, 1) <= room:
        advice = "make fewer videos at once"
    raise OptionError(
        f"the inputs{several} of {width}x{height} and {frames} frames take {peak(frames) / GIB:.3g} GiB of host memory "
        f"at once, and {room / GIB:.3g} GiB are available: {advice}"
    )


def check_pictures(shape: tuple[int, ...], room: int) -> None:
    """Raise OptionError where decoded frames [F, H, W, 3] in float32 are more than the `room` that is available."""
    needed = 4 * math.prod(shape)
    if needed > room:
        frames, height, width = shape[:3]
        raise OptionError(
            f"{frames} frames of {width}x{height} take {needed / GIB:.3g} GiB of host memory as IMAGE, and "
            f"{room / GIB:.3g} GiB are available: use WanCore Decode to Video, which writes them while they are made, "
            "or make a smaller or shorter video"
        )


def check_sampling(shape: tuple[int, ...], needed: int, room: int) -> None:
    """Raise OptionError where sampling latents [B, C, T, Y, X] on a CPU takes more than the `room` that is available.
    needed: bytes of everything but weights."""
    if needed > room:
        raise OptionError(
            f"sampling latents of {' x '.join(map(str, shape))} on a CPU takes {needed / GIB:.3g} GiB of host memory "
            f"in addition to the weights, and {room / GIB:.3g} GiB are available: make a smaller or shorter video"
        )


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number from 0 to `most` that fits, where all smaller ones fit too; 0 if none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
