"""The first use of kernels, before a video needs them: imports and compiling.

A thread of each rank runs a block of random weights while the models are read. What is compiled is kept in files, so
one process of a host goes first, and others wait for it and read them.

What fails here is logged and has no other effect: the first step does the same work, and raises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import cast

import torch

from wan_core import __version__
from wan_core.checkpoint.switch_interval import SWITCH_INTERVAL
from wan_core.config.compile_cache import one_goes_first
from wan_core.execution.optimize import begin_run, optimize
from wan_core.execution.report import Report, device_name, installed
from wan_core.models.wan.model import WanModel
from wan_core.models.wan.runners import ForwardInfo
from wan_core.ops.attention.registry import AttentionError
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


class FirstUse:
    """`load_kernels` in a thread of its own, for which its caller can wait."""

    def __init__(self, settings: ModelSettings) -> None:
        self.seconds, self.fault = 0.0, "an unexpected error, see above"
        self.noted = False
        self.thread = threading.Thread(target=self._run, args=(settings,), daemon=True)
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

    def _run(self, settings: ModelSettings) -> None:
        begin = time.perf_counter()
        # A new thread's current device is the first GPU, whatever its creator's is.
        here = torch.cuda.device(settings.device) if settings.device.type == "cuda" else nullcontext()
        try:
            with SWITCH_INTERVAL.short(), here, one_goes_first(compiled_name(settings)):
                load_kernels(settings, settings.device)
            self.fault = ""
        except FAULTS as fault:
            self.fault = (str(fault).splitlines() or [type(fault).__name__])[0]
            log.info("WanCore could not prepare kernels before they are needed: %s", fault)
        self.seconds = time.perf_counter() - begin


def prepares(settings: ModelSettings) -> bool:
    """Not on a CPU, and not where blocks are compiled with their own weights."""
    return settings.device.type == "cuda" and settings.options.compile == "off"


def compiled_name(settings: ModelSettings) -> str:
    """What the compiled code depends on. It only decides who waits: Triton, torch and flash-attn-4 find what they kept
    by keys that hold their own versions."""
    facts = [torch.__version__, installed(COMPILERS), __version__, device_name(settings.device)]
    facts += [settings.recognised.dit, settings.precision, settings.attention]
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


def random_block(settings: ModelSettings, device: torch.device) -> WanModel:
    """The transformer of `settings` with one block, of random weights, that computes as it will."""
    config, quantization = replace(settings.recognised.dit, num_layers=1), settings.quantization
    if quantization is not None:
        quantization = None if is_packed(quantization) else replace(quantization, keep_blocks=0)
    blocks = cast(WanModel, PartToLoad(random_part(config, 0), settings.dtype, quantization).load(device))
    return optimize(blocks, attend=settings.attend, device=device)


def forward_each_kind(model: WanModel, plan: Plan, steps: Sequence[Step], device: torch.device) -> None:
    """A forward of `model` for the first of each kind of `steps`, and nothing of it left behind: steps with sparse
    attention and without are different code."""
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
    frames_differ = config.out_channels == 48 and plan.image  # each latent frame has its own timestep
    kinds = {step.nag: step for step in reversed(steps)}
    for step in kinds.values():  # the first of each kind
        branches = step.branches if plan.batched else step.branches[:1]
        timestep = torch.full((batch, T) if frames_differ else (batch,), step.timestep, device=device)
        seen = text
        if step.nag and plan.nag is not None:
            seen = text.with_negative(text, nag_numbers(plan.nag, device))
        with sparse_attention(model, plan, steps, grid):
            model(x, timestep, seen, ForwardInfo(step.index, branches, sparsity=step.sparsity))
    begin_run(model)
