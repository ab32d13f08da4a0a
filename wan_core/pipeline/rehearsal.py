"""What a first forward has to set up, set up while the weights are still being read, where it was not kept.

A block is the same code whatever its weights (`optimize.compile_blocks`), and kernels, cuDNN's plans and cuBLAS's
choices go by sizes alone. So a model of one block with throw-away weights runs one forward at the very size, in the
thread that will run the video (torch's compiler settings, cuDNN's plans and cuBLAS's handles belong to a thread), while
other threads read. What it leaves are compiled code and warm libraries: its weights, its calibration and its random
numbers go with it.

Whatever goes wrong here costs time only: the real first forward does then what was not done.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.staged import AHEAD
from wan_core.execution.compile_cache import Artifacts
from wan_core.execution.memory.planning import GIB, MemoryPlan, factor, unit_bytes
from wan_core.execution.optimize import begin_run, optimize
from wan_core.execution.process_settings import Overlapping, uncollected
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.protocol import Attention
from wan_core.ops.quant.swap import Quantization
from wan_core.pipeline.resolved_request import Job
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.plan import Expert
from wan_core.sampling.sparsity.run import sparse_attention

log = logging.getLogger(__name__)
TURNS = 2e-4  # seconds after which threads that compute in Python take turns; readers would wait 5 ms for each piece


@dataclass(kw_only=True)
class Rehearsal:
    """One forward of one block for `job`, as `config`, `dtype`, `quantization`, `attend` and `compile` will run it on
    `device`. `why_not`: not to be had, and artifacts are all that is loaded. `notes` say what came of it, `phases` how
    many seconds each part took, `ready` whether the forward was made, `failed` whether any of it did."""

    config: DiTConfig
    device: torch.device
    dtype: torch.dtype
    quantization: Quantization | None
    attend: Attention
    compile: str
    job: Job | None
    artifacts: Artifacts | None = None
    why_not: str | None = None
    notes: list[str] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    ready: bool = False
    failed: bool = False

    @property
    def worthwhile(self) -> bool:
        """Whether there is anything to do that the first forward would have to."""
        return self.compile != "off" or (self.device.type == "cuda" and self.why_not is None)

    def begin(self) -> None:
        """Import the compiler and find what it made before: what is nothing but Python, and to be done before others
        read. To be called first."""
        self._caught(self._begin)

    @property
    def beside(self) -> bool:
        """Whether the forward is worth making beside the reading. Where blocks were compiled before, what is left of it
        is a second or two of Python, which readers need too: the first step does it as soon."""
        return not self.failed and (self.artifacts is None or not self.artifacts.loaded)

    def run(self, wanted: Callable[[], bool] = lambda: True) -> None:
        """Make the forward, if `wanted` still says so then. Raises nothing but what ends a program."""
        if self.why_not is None and self.job is not None and wanted():
            with quick_turns, collected_after():
                self._caught(partial(self._forward, self.job))
        if self.ready:
            seconds = self.phases["forward"]
            self.notes.append(f"the first step was prepared while weights were read, in {seconds:.1f} s")
        elif self.why_not is not None and self.compile != "off":
            self.notes.append(f"blocks are compiled in the first step: {self.why_not}")

    def _caught(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as fault:  # noqa: BLE001  (compilers and kernels raise anything; the real forward says it again)
            words = (str(fault).strip().splitlines() or [""])[0][:200]
            note = f"preparing the first step failed, and it takes longer ({type(fault).__name__}: {words})"
            log.warning("%s", note)
            self.notes.append(note)
            self.failed = True
            fault.__traceback__ = None  # it holds the throw-away weights

    def _begin(self) -> None:
        if self.compile != "off":
            with self._timed("import the compiler"):
                threshold = gc.get_threshold()
                gc.set_threshold(50_000)  # an import makes no garbage; looking for it takes a quarter of the time
                try:
                    import torch._inductor.compile_fx  # a second, which would be the first step's  # noqa: F401
                finally:
                    gc.set_threshold(*threshold)
        if self.artifacts is not None:
            with self._timed("artifacts"):
                self.notes.append(f"compile: {self.artifacts.load()}")

    def _forward(self, job: Job) -> None:
        cuda = [self.device] if self.device.type == "cuda" else []
        with self._timed("forward"), torch.random.fork_rng(devices=cuda), torch.no_grad():
            model = stand_in(self.config, self.device, self.dtype, self.quantization)
            optimize(model, attend=self.attend, compile=self.compile, device=self.device, graphs=False)
            done: set[bool] = set()
            for expert in job.plan.experts:
                kinds = {step.sparsity > 0 for step in job.plan.steps if step.expert == expert}
                if not kinds <= done:  # the second expert may be the first that has sparse steps
                    forward_once(model, job, expert, self.device)
                done |= kinds
            if cuda:
                torch.cuda.synchronize(self.device)
        self.ready = True

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = time.perf_counter() - begin


def stand_in(
    config: DiTConfig, device: torch.device, dtype: torch.dtype, quantization: Quantization | None
) -> WanModel:
    """A model with random weights whose blocks are of every kind that the real one has: one block, or three where the
    first and last are kept in a higher precision."""
    config, quantization = _stand_in_of(config, quantization)
    model = random_module(config, device=device, dtype=dtype, quantization=quantization)
    assert isinstance(model, WanModel)
    return model


def _stand_in_of(config: DiTConfig, quantization: Quantization | None) -> tuple[DiTConfig, Quantization | None]:
    kept = quantization is not None and quantization.keep_blocks > 0
    small = replace(config, num_layers=3 if kept else 1)
    # As stored: a file in FP8 has all of these matrices so, or the real forward compiles what differs.
    return small, None if quantization is None else replace(quantization, keep_blocks=int(kept), as_stored=False)


def forward_once(model: WanModel, job: Job, expert: Expert, device: torch.device) -> None:
    """A forward of `model` as the first step of `expert` in `job` runs it, and nothing of it left behind. Where some
    steps have sparse attention and some have not, one of each: they are different code."""
    config, batch = model.config, 2 if job.batched else 1
    begin_run(model)
    noise = draw_noise(0, job.latent_shape).to(device)
    shape = (batch, config.in_channels, *job.latent_shape[2:])
    x = noise.new_zeros(shape)
    x[:, : noise.shape[1]] = noise
    # Two prompts, of which one branch sees its part, as in a run.
    rows = draw_noise(1, (1, 8, config.text_dim)).to(device).expand(2 if job.plan.guided else batch, -1, -1)
    text = model.prepare_text(rows).rows(0, batch)
    phase = [step for step in job.plan.steps if step.expert == expert]
    image = job.request.image is not None or job.request.last_image is not None
    known = config.out_channels == 48 and job.request.image is not None  # each latent frame has its own timestep
    with sparse_attention(model, job.plan, phase, job.latent_shape[2:], image) as sparse:
        for step in {step.sparsity > 0: step for step in reversed(phase)}.values():  # the first of each kind
            if sparse is not None:
                sparse.expect(step, step.branches if job.batched else step.branches[:1])
            timestep = torch.full((batch, shape[2]) if known else (batch,), step.timestep, device=device)
            model(x, timestep, text)
    begin_run(model)


def why_not_beside(
    plan: MemoryPlan | None,
    job: Job,
    config: DiTConfig,
    dtype: torch.dtype,
    quantization: Quantization | None,
    *,
    compile: str,
    precision: str,
    files: int,
) -> str | None:
    """Why a forward of the stand-in has no room beside the loading of `files` files by `plan` (None: on a CPU)."""
    if plan is None:
        return None
    small, held = _stand_in_of(config, quantization)
    weights = sum(unit_bytes(small, dtype.itemsize, held is not None, held.keep_blocks if held else 0))
    each = factor(config, itemsize=dtype.itemsize, device="cuda", compile=compile, precision=precision)
    forward = int(each * 2 * job.tokens * config.dim * (1 + job.batched))
    loaded = max(phase.weights for phase in plan.phases) if plan.policy == "resident" else 0
    needed = loaded + files * AHEAD + weights + forward
    if needed <= plan.room:
        return None
    return f"beside the reading it has no room ({needed / GIB:.1f} GiB of {plan.room / GIB:.1f} usable)"


@contextmanager
def collected_after() -> Iterator[None]:
    """Garbage is looked for once, at the end, and only in what was made inside: tracing makes millions of objects, and
    a compiled module, which refers to itself, holds its weights."""
    with uncollected:
        frozen = gc.get_freeze_count()
        if not frozen:  # else unfreezing would be for what others froze, too
            gc.freeze()
        try:
            yield
        finally:
            gc.collect()
            if not frozen:
                gc.unfreeze()


def _turn_quickly() -> Callable[[], None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, TURNS))
    return partial(sys.setswitchinterval, before)


quick_turns = Overlapping(_turn_quickly)
"""Threads take turns more often inside: who reads files needs Python for an instant between two reads."""
