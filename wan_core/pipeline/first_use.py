"""The first use of kernels, before a video needs them: imports, compiling, the choice of algorithms for a size.

A thread does it while weights are read. It runs blocks of random weights, and on a rank on a shard of the size that the
rank will have, without the other ranks: none of them waits in an exchange for another that compiles. What is compiled
is kept in files, so one process of a host goes first, and others wait for it and read them.

What fails here is logged and has no other effect: the first step does the same work, and raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar, cast

import torch

from wan_core import __version__
from wan_core.checkpoint.staged import AHEAD
from wan_core.checkpoint.switch_interval import SWITCH_INTERVAL
from wan_core.config.compile_cache import one_goes_first
from wan_core.execution.memory.planning import MemoryPlan, unit_bytes
from wan_core.execution.optimize import begin_run, optimize, optimize_vae
from wan_core.execution.report import Report, installed
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.registry import AttentionError
from wan_core.ops.attention.sparse.kernels import SMALL, resolve_kernel
from wan_core.ops.kernels import fused
from wan_core.parallel.mesh import RankMesh
from wan_core.pipeline.model_parts import is_packed
from wan_core.pipeline.settings import ModelSettings, PartToLoad
from wan_core.pipeline.sources import random_part
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.guided import nag_numbers
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.run import sparse_attention
from wan_core.sampling.steps import Step

log = logging.getLogger(__name__)
COMPILERS = ("triton", "triton-windows", "flash-attn-4", "nvidia-cudnn-frontend")
TOKENS = 16  # rows and columns of latents: enough for every kernel to run, few enough to take no time
FAULTS = (AttentionError, OSError, RuntimeError, ValueError, ImportError, AttributeError)
"""What kernels and libraries that do not fit this machine raise; out of memory is a RuntimeError."""


class Ended(RuntimeError):
    """Nobody needs the kernels any more."""


class FirstUse:
    """`work` in a thread of its own, for which its caller can wait. A process has one: a new one ends the one before,
    whose models may be gone, and waits until its memory is free. work: is given a function to call between its parts,
    which raises `Ended` after `end`."""

    latest: ClassVar[FirstUse | None] = None

    def __init__(self, work: Callable[[Callable[[], None]], object], device: torch.device) -> None:
        if (before := FirstUse.latest) is not None:
            before.end()
            before.thread.join()
        FirstUse.latest = self
        self.work, self.device = work, device
        self.ended = threading.Event()
        self.seconds, self.fault = 0.0, "an unexpected error, see above"
        self.noted = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def wait(self, report: Report) -> None:
        """Until it has ended. Says in `report` once what it took."""
        begin = time.perf_counter()
        self.thread.join()
        if not self.noted:
            self.noted = True
            waited = time.perf_counter() - begin
            how = f"not prepared before they are needed: {self.fault}"
            how = how if self.fault else f"prepared in {self.seconds:.1f} s beside loading"
            report.notes.append(f"kernels: {how}, waited for {waited:.1f} s")

    def end(self) -> None:
        """Do no more than what has begun, without waiting for that."""
        self.ended.set()

    def check(self) -> None:
        if self.ended.is_set():
            raise Ended("loading has ended")

    def _run(self) -> None:
        begin = time.perf_counter()
        # A new thread's current device is the first GPU, whatever its creator's is.
        here = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        try:
            with SWITCH_INTERVAL.short(), here:
                self.work(self.check)
            self.fault = ""
        except FAULTS as fault:
            self.fault = (str(fault).splitlines() or [type(fault).__name__])[0]
            log.info("WanCore could not prepare kernels before they are needed: %s", fault)
        self.seconds = time.perf_counter() - begin
        del self.work  # with the models' settings


def begin_first_use(settings: ModelSettings, plan: Plan | None, ranks: RankMesh) -> FirstUse | None:
    """Begin to prepare this rank's kernels for `plan`; None: of any size. None where there is nothing to prepare."""
    if not prepares(settings):
        return None
    device = settings.device
    if plan is None:
        return FirstUse(lambda _: load_kernels(settings, device), device)
    return FirstUse(lambda check: rehearse(settings, plan, ranks, check), device)


def prepares(settings: ModelSettings) -> bool:
    """Not on a CPU, and not where blocks are compiled with their own weights."""
    return settings.device.type == "cuda" and settings.compile == "off"


def fits_beside(settings: ModelSettings, memory: MemoryPlan) -> bool:
    """Whether a rehearsal fits beside weights that are being read. Activations are planned for, but not
    these blocks, nor weights that are read ahead before they are encoded."""
    config, transformers = settings.recognised.dit, sum(name in ("high", "low") for name in settings.parts)
    outside, block, *_ = unit_bytes(config, settings.dtype.itemsize, False)
    ahead = 0 if settings.quantization is None else 2 * AHEAD * transformers
    return memory.peak + outside + block + ahead <= memory.room


def compiled_name(settings: ModelSettings, plan: Plan, ranks: RankMesh) -> str:
    """What the compiled code depends on. Of the number of tokens that is whether 16 divide it. It only
    decides who waits: Triton, torch and flash-attn-4 find what they kept by keys that hold their own versions."""
    card = torch.cuda.get_device_name(settings.device) if settings.device.type == "cuda" else "cpu"
    tokens = {settings.recognised.dit.tokens(*plan.latent_shape[2:]) % 16}
    facts = [torch.__version__, installed(COMPILERS), __version__, card, settings.recognised.dit, settings.precision]
    facts += [settings.attention, ranks.mesh, sorted(tokens), plan.sparse]
    return ", ".join(map(str, facts))


@torch.no_grad()
def load_kernels(settings: ModelSettings, device: torch.device) -> None:
    """Run a block of random weights as `settings` says, so that kernels are compiled, or read from where an earlier
    process kept them, before the weights of the model are there. Nothing of it stays."""
    model = random_block(settings, device)
    config = model.config
    x = draw_noise(0, (1, config.in_channels, 1, TOKENS, TOKENS)).to(device)
    image = config.blank_features(x, 1)
    text = model.prepare_text(x.new_zeros(1, 8, config.text_dim), image)
    model(x, torch.full((1,), 500.0, device=device), text)


@torch.no_grad()
def rehearse(settings: ModelSettings, plan: Plan, ranks: RankMesh, check: Callable[[], None]) -> None:
    """Each kind of step of `plan` once, as this rank will run it, with one block of random weights and without the
    other ranks. Kernels are compiled anew for some sizes, so a shard has its own. Nothing of it stays. check: called
    between two parts; may raise to stop."""
    load_libraries(settings, plan)  # each process has to import them: nobody waits for that
    check()
    shared = ranks.apart() if ranks.sequence.size > 1 else None
    model = random_block(settings, settings.device, shared)
    split = ranks.cfg.size > 1 or ranks.layers.size > 1
    plan = replace(plan, guidance_mode="sequential") if split else plan
    with one_goes_first(compiled_name(settings, plan, ranks), check):
        known = model.config.out_channels == 48 and plan.image
        forward_each_kind(model, plan, plan.steps, settings.device, known=known, check=check)
    del model
    check()
    if "vae" in settings.parts:
        rehearse_vae(settings, plan, ranks.apart())


@torch.no_grad()
def rehearse_vae(settings: ModelSettings, plan: Plan, ranks: RankMesh) -> None:
    """Decode the beginning of a video of `plan` as this rank will, in its strip of the picture: every piece has the
    size of the first, the second or the last. If there is an image, encode as much too."""
    part, device = settings.parts["vae"], settings.device
    config = settings.recognised.vae
    vae = optimize_vae(cast(VideoVAE, PartToLoad(random_part(config, 0), part.dtype).load(device)), device, ranks)
    chunk = 1 if vae.strips is None else vae.strips.chunk
    _, C, T, Y, X = plan.latent_shape
    T = min(T, 2 * chunk + (T % chunk or chunk))
    for _ in vae.decode_stream(torch.zeros(1, C, T, Y, X, device=device), chunk=chunk):
        pass
    if plan.image:
        F, scale = config.video_frames(T), config.spatial_stride
        vae.encode(torch.zeros(1, 3, F, Y * scale, X * scale, device=device), chunk=1)


def load_libraries(settings: ModelSettings, plan: Plan) -> None:
    """Import the libraries of kernels and attention, and what they load at their first call."""
    device, dtype, dim = settings.device, settings.dtype, settings.recognised.dit.head_dim
    fused.why_not(device)
    tokens = torch.zeros(1, 256, 2, dim, dtype=dtype, device=device)
    settings.attend(tokens, tokens, tokens)
    if plan.sparse is not None:
        resolve_kernel(plan.sparse.kernel, device, dtype, dim, SMALL, fp8=settings.attend.takes_fp8).load()


def random_block(settings: ModelSettings, device: torch.device, ranks: RankMesh | None = None) -> WanModel:
    """The transformer of `settings` with one block, of random weights, that computes as it will."""
    config, quantization = replace(settings.recognised.dit, num_layers=1), settings.quantization
    if quantization is not None:
        quantization = None if is_packed(quantization) else replace(quantization, keep_blocks=0)
    blocks = cast(WanModel, PartToLoad(random_part(config, 0), settings.dtype, quantization).load(device))
    return optimize(blocks, attend=settings.attend, compile=settings.compile, device=device, ranks=ranks)


def forward_each_kind(
    model: WanModel,
    plan: Plan,
    steps: Sequence[Step],
    device: torch.device,
    *,
    known: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """A forward of `model` for the first of each kind of `steps`, and nothing of it left behind: steps with sparse
    attention and without are different code. known: each latent frame has its own timestep. check: called before each;
    may raise to stop."""
    config, batch = model.config, 2 if plan.batched else 1
    begin_run(model)
    B, C, T, Y, X = plan.latent_shape
    grid = T, Y, X
    noise = draw_noise(0, (B, C, *grid)).to(device)
    shape = (batch, config.in_channels, *grid)
    x = noise.new_zeros(shape)
    x[:, : noise.shape[1]] = noise
    # Two prompts, of which one branch sees its part, as in a run.
    rows = draw_noise(1, (1, 8, config.text_dim)).to(device).expand(2 if plan.reads_negative else batch, -1, -1)
    image = config.blank_features(rows, len(rows))
    prepared = model.prepare_text(rows, image)
    text = prepared.rows(0, batch)
    kinds = {(step.sparsity > 0, step.nag): step for step in reversed(steps)}
    for step in kinds.values():  # the first of each kind
        check()
        branches = step.branches if plan.batched else step.branches[:1]
        timestep = torch.full((batch, shape[2]) if known else (batch,), step.timestep, device=device)
        seen = text
        if step.nag and plan.nag is not None:
            seen = text.with_negative(text, nag_numbers(plan.nag, device))
        with sparse_attention(model, plan, steps, grid):
            model(x, timestep, seen, ForwardInfo(step.index, branches, sparsity=step.sparsity))
    begin_run(model)
