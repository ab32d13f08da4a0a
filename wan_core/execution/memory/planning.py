"""The device memory that a run will take, known before it starts, and the cheapest plan in time that fits.

Everything is a pure function of numbers: sizes of weights from the architectures, activations from the number of
tokens. What a forward takes beside its weights is proportional to tokens * dim, with a factor that was measured on an
H200 at 480p and 720p and is the same at both (`FACTORS`).

Legend: L tokens of one forward, C channels of the transformer, GiB 1024^3 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from wan_core.checkpoint.detect import expected_shapes
from wan_core.config import OptionError
from wan_core.config.host_memory import HOST_RESERVE
from wan_core.execution.memory.memory_plan import CONTEXT, RESERVE, MemoryPlan, Phase
from wan_core.execution.memory.residency import Policy
from wan_core.execution.memory.streaming import SLOTS, spread, stage_bytes
from wan_core.execution.report import GIB
from wan_core.models.vae.config import VAEConfig
from wan_core.models.wan.config import TORCH_PER_TOKEN, DiTConfig, PreparedForm
from wan_core.models.wan.families import family_of

# Bytes of activations over 2 L C. benchmarks/results/single-*.json, activation_gib less the prompt's keys and values.
FACTORS = {"fused": 5.05, "compiled": 6.06, "engine": 5.66, "torch": TORCH_PER_TOKEN}
DECODE = {False: 11.5, True: 15.5}  # of a VAE's widest layer at full size, 2.1 and 2.2, measured likewise
TEXT = int(0.15 * GIB)  # activations of encoding prompts
LATENTS = 0.2 * GIB  # latents and their history, the rotation table, workspaces of products
LEAST_STREAMED = SLOTS + 1  # blocks: fewer would take more memory for their slots than they free


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes of weights of the models. `units`: one transformer, first what is outside blocks, then each block.
    `experts`: number of transformers. `text_stage`: bytes of the text encoder on the device while its blocks stream; 0:
    they cannot stream."""

    units: tuple[int, ...]
    experts: int
    text_encoder: int
    vae: int
    clip_vision: int = 0
    text_stage: int = 0

    @property
    def expert(self) -> int:
        return sum(self.units)

    @property
    def all(self) -> int:
        return self.expert * self.experts + self.text_encoder + self.vae + self.clip_vision


@dataclass(frozen=True, kw_only=True)
class Beside:
    """Activations of each phase, in bytes. `denoise` has `residuals` and `prompts` in it, which have what is prepared
    beside text. `forms`: the ways in which that may be kept; here it is the first."""

    text: int
    denoise: int
    decode: int
    image: int = 0  # encoding one; 0: there is none
    sound: int = 0  # encoding it, with the weights of its encoder, which are there meanwhile; 0: there is none
    residuals: int = 0
    prompts: int = 0
    forms: tuple[PreparedForm, ...] = ()

    def kept_as(self, form: PreparedForm) -> Beside:
        """With what is prepared in one of `forms`."""
        more = form.device - self.forms[0].device
        return replace(self, denoise=self.denoise + more, prompts=self.prompts + more)

    @property
    def most(self) -> int:
        return max(self.text, self.denoise, self.decode, self.image, self.sound)


# ---------------------------------------------------------------------------------------------------- what phases take


def unit_bytes(config: DiTConfig, itemsize: int, quantized: bool, keep_blocks: int = 0) -> tuple[int, ...]:
    """Bytes of a transformer's units: first what is outside blocks, then each block. A quantised matrix has one scale
    for each output channel."""
    units = {module: layer + 1 for layer in range(config.num_layers) for module in config.modules_of(layer)}
    encoded = {f"{name}.weight" for name in config.quantized_names(keep_blocks)} if quantized else set()
    nbytes = [0] * (config.num_layers + 1)
    for name, shape in expected_shapes(config).items():
        numbers = math.prod(shape)
        size = numbers + 4 * shape[0] if name in encoded else numbers * itemsize
        nbytes[units.get(".".join(name.split(".")[:2]), 0)] += size
    return tuple(nbytes)


def factor(config: DiTConfig, *, itemsize: int, device: str, compile: str, precision: str) -> float:
    """Bytes of activations per token and channel for this precision and compile mode (see `FACTORS`). FP8 fused passes
    take the same, compiled or not."""
    if itemsize == 4 or device != "cuda":
        return FACTORS["torch"] * itemsize / 2
    if precision.startswith("te-") or precision == "fp8-tensor":
        return FACTORS["engine"] if compile == "off" else FACTORS["compiled"]
    if compile != "off" and precision in ("checkpoint", "bf16", "fp8-weights"):
        return FACTORS["compiled"]
    return FACTORS["fused"]


def beside_weights(
    dit: DiTConfig,
    vae: VAEConfig,
    latents: tuple[int, ...],
    *,
    per_token: float,
    itemsize: int = 2,
    guided: bool = True,
    residuals: int = 0,
    batched: bool = False,
    image: bool = False,
    texts: float = 1,
) -> Beside:
    """latents: [B, C, T, Y, X]. per_token: of `factor`. itemsize: of the numbers that residuals and prompts are kept
    in. guided: two prompts are prepared. residuals: bytes that a cache keeps. texts: of a prompt, prepared at
    once; a longer one counts as several."""
    B, _, T, Y, X = latents
    tokens = B * dit.tokens(T, Y, X)
    prompts = int(texts * (1 + guided) * 2 * dit.num_layers * dit.context_len * dit.dim * itemsize)
    family = family_of(dit)
    prompts += family.prepared_bytes(dit, latents, itemsize)
    forward = (per_token + family.more_per_token) * 2 * tokens * dit.dim * (1 + batched)
    decode = vae_bytes(vae, Y, X)
    return Beside(
        text=TEXT,
        denoise=int(forward + prompts + residuals + LATENTS * min(1.0, tokens / 32760)),
        decode=decode,
        image=decode if image else 0,
        residuals=residuals,
        prompts=prompts,
        forms=tuple(one._replace(activations=int(forward)) for one in family.prepared_forms(dit, latents, itemsize)),
    )


def vae_bytes(config: VAEConfig, rows: int, columns: int, itemsize: int = 2) -> int:
    """The bytes that decoding or encoding latents of `rows` x `columns` takes beside weights, a latent frame at a time.
    itemsize: of the VAE's numbers."""
    pixels = rows * columns * config.spatial_stride**2 // config.patch**2
    widest = itemsize * pixels * config.temporal_stride * max(config.encoder_dim, config.decoder_dim)
    return int(DECODE[config.residual] * widest)


def device_room(device: torch.device, limit_gib: float | None = None) -> int:
    """Bytes that this process may still take on a GPU, what it holds in its cache included."""
    free, _ = torch.cuda.mem_get_info(device)
    allocated, cached = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    room = free + cached - allocated
    return room if limit_gib is None else min(room, limited(limit_gib) - allocated)


def limited(gib: float) -> int:
    """What torch may take on a card of so many GiB. Raises OptionError for a card that is too small for anything."""
    if gib * GIB < 2 * CONTEXT:
        raise OptionError(
            f"memory limit {gib:g} GiB given; CUDA itself takes {CONTEXT / GIB:.1f}: "
            f"allowed are {2 * CONTEXT / GIB:.1f} and more"
        )
    return int(gib * GIB) - CONTEXT


def cap_memory(device: torch.device, gib: float) -> None:
    """Make this process fail where a card of so many GiB would. The card is not smaller to other processes."""
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, limited(gib) / total), device)


# ----------------------------------------------------------------------------------------------------------- the choice


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where an earlier plan put weights that are loaded. together: models stay beside each other where they fit."""

    policy: Policy
    resident_blocks: int | None  # where blocks stream
    together: bool = True


def plan_memory(
    sizes: Sizes,
    beside: Beside,
    available: int,
    mode: Literal["auto", "resident", "swap", "stream"] = "auto",
    resident_blocks: int | None = None,
    *,
    placed: Placed | None = None,
    host: int | None = None,
    kept: PreparedForm | None = None,
) -> MemoryPlan:
    """The first that fits of: all resident; experts that take turns; as many resident blocks as fit.

    available: bytes on the device for this run. mode: one of these instead; resident_blocks: so many, which is
    streaming. placed: weights stay where they are while the steps fit, half of the reserve counted in, and numbers do
    not change; None: nothing is loaded.

    What is prepared beside text is kept in that of its forms that fits and copies the fewest bytes in a forward, blocks
    that stream counted in: bytes on the device are either weights or what is prepared. Forms that change numbers come
    after all that do not. host: bytes of host memory for weights and what is prepared; None: enough. kept: the form of
    the run before, whose host memory is used again if it is the same. Raises OptionError for a number of blocks that
    the model does not have.
    """

    def fits_host(plan: MemoryPlan) -> bool:
        if host is None or plan.form is None or not plan.form.host:
            return True  # weights alone may stay in their files
        return plan.host + HOST_RESERVE <= host + (plan.form.host if plan.form.uses_again(kept) else 0)

    def best(mode: Literal["auto", "resident", "swap", "stream"], blocks: int | None, together: bool) -> MemoryPlan:
        forms = beside.forms or (None,)
        plans = [_plan_form(sizes, beside, form, available, mode, blocks, together) for form in forms]
        fitting = [plan for plan in plans if plan.denoise <= plan.room and fits_host(plan)]
        if fitting:
            return min(fitting, key=lambda plan: (plan.form is not None and not plan.form.exact, plan.copied))
        return min(plans, key=lambda plan: (max(0, plan.denoise - plan.room), plan.host))

    if placed is not None:
        same = best(placed.policy, placed.resident_blocks, placed.together)
        if same.denoises and same.exact:
            return same
    return best(mode, resident_blocks, mode != "swap")


def _plan_form(
    sizes: Sizes,
    activations: Beside,
    form: PreparedForm | None,
    available: int,
    mode: Literal["auto", "resident", "swap", "stream"],
    resident_blocks: int | None,
    together: bool,
) -> MemoryPlan:
    """The plan of `plan_memory` for one form of the prepared tensors; None: the family has no forms."""
    activations = activations if form is None else activations.kept_as(form)
    blocks = len(sizes.units) - 1
    if resident_blocks is not None and not 0 <= resident_blocks <= blocks:
        raise OptionError(f"{resident_blocks} resident blocks given; the transformer has {blocks}, so 0 to {blocks}")
    reserve = int(RESERVE[0] + RESERVE[1] * available)
    room = available - reserve
    why = "asked for"
    if mode != "auto":
        policy = mode
    elif resident_blocks is not None:
        policy = "stream"
    else:
        swaps = sizes.expert + activations.denoise <= room
        policy = "resident" if sizes.all + activations.most <= room else "swap" if swaps else "stream"
        peak = activations.most / GIB
        why = f"weights {sizes.all / GIB:.1f}, activations up to {peak:.1f}, of {room / GIB:.1f} GiB usable"
    resident = blocks
    if policy == "stream":
        resident = _fitting_blocks(sizes, activations, room) if resident_blocks is None else resident_blocks
    copied = sum(sizes.units[1 + layer] for layer in spread(blocks, resident)) + (form.copied if form else 0)
    # The text encoder streams where it can and does not fit as a whole.
    splits, whole = 0 < sizes.text_stage < sizes.text_encoder, sizes.text_encoder + activations.text
    streams_text = policy != "resident" and splits and whole > room
    named = {
        "text_encoder": activations.text,
        "clip_vision": activations.text,
        "vae": max(activations.decode, activations.image),
    }
    return MemoryPlan(
        policy=policy,
        resident_blocks=resident,
        blocks=blocks,
        room=room,
        reserve=reserve,
        host=(0 if policy == "resident" else sizes.all) + (0 if form is None else form.host),
        together=together,
        streams_text=streams_text,
        phases=tuple(_phases(sizes, activations, policy, resident, room if together else 0, streams_text)),
        beside=named | dict.fromkeys(("high", "low"), activations.denoise),
        why=why,
        form=form,
        copied=copied,
    )


def _fitting_blocks(sizes: Sizes, activations: Beside, room: int) -> int:
    """The largest number of resident blocks that fits; at least `LEAST_STREAMED` blocks stream."""
    blocks = len(sizes.units) - 1
    for resident in range(max(0, blocks - LEAST_STREAMED), 0, -1):
        if stage_bytes(sizes.units, resident) + activations.denoise <= room:
            return resident
    return 0


def _phases(
    sizes: Sizes, activations: Beside, policy: Policy, resident: int, room: int, streams_text: bool
) -> list[Phase]:
    """room: for models beside the one that runs; 0: it is alone."""
    stage = stage_bytes(sizes.units, resident)

    def phase(name: str, own: int, run: int, what: str, others: tuple[int, ...]) -> Phase:
        """The others, in the order in which they leave, stay as far as there is room."""
        staying = list(others)
        while staying and own + run + sum(staying) > room:
            staying.pop(0)
        return Phase(name, own + sum(staying), run, what) if policy != "resident" else Phase(name, sizes.all, run, what)

    text, vae = sizes.text_stage if streams_text else sizes.text_encoder, sizes.vae
    contents = "the text encoder" + (f", its blocks stream ({sizes.text_encoder / GIB:.2f})" if streams_text else "")
    heard = [phase("encode audio", 0, activations.sound, "with the encoder of sound, which leaves", ())]
    phases = heard if activations.sound else []
    phases.append(phase("text", text, activations.text, contents, ()))
    image = (vae,) if activations.image else ()
    if activations.image:
        encoders = "the VAE, the CLIP vision encoder" if sizes.clip_vision else "the VAE"
        phases.append(phase("encode image", vae + sizes.clip_vision, activations.image, encoders, (text,)))
    prompts, residuals = activations.prompts / GIB, activations.residuals / GIB
    contents = f"one transformer; {prompts:.2f} of prompts" + (f", {residuals:.2f} of residuals" if residuals else "")
    phases.append(phase("denoise", stage, activations.denoise, contents, (text, *image)))
    phases.append(phase("decode", vae, activations.decode, "the VAE; latents stay", (text, stage)))
    return phases
