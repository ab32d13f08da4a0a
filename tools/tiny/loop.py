"""The training loop that every phase shares: a step as a CUDA graph, one for each size of video, a learning rate that
falls to zero exactly when the time is up, and a moving average of the weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tools.tiny.files import read_resume, write_resume

Losses = Callable[[], dict[str, Tensor]]
STARTED = time.monotonic()  # the time limit counts from here: imports and compilation included
REPORT_SECONDS = 10.0
CALIBRATION = 8  # steps that are timed before the first report


class NonFiniteLossError(RuntimeError):
    """Training diverged."""


class Clock:
    """How far a run has come, 0..1: by wall time, and by steps where a number of steps is given."""

    def __init__(self, minutes: float, steps: int | None, reserve: float = 0.0) -> None:
        """`reserve`: seconds of `minutes` kept back for what follows training (statistics, saving)."""
        self.begin = time.monotonic()
        self.end = STARTED + 60 * minutes - reserve
        self.steps = steps
        if steps is None and self.end - self.begin < 1:
            raise SystemExit(f"--minutes {minutes:g} leaves no time to train: {reserve:g} s are kept for what follows")

    def progress(self, step: int) -> float:
        if self.steps is not None:
            return step / self.steps
        return (time.monotonic() - self.begin) / (self.end - self.begin)


class Trainer:
    """AdamW on `modules` for a loss, with a moving average of the weights.

    Args:
        modules: part name -> module, trained together. The names are those of the resume files.
        losses: each draws a batch and returns named scalar losses, whose sum is minimised. They take turns, one a step;
            one that stands there several times has several turns. They must not synchronise with the device, nor
            depend on Python state that changes: on a GPU each is captured once and replayed.
    """

    def __init__(
        self,
        modules: dict[str, nn.Module],
        losses: Sequence[Losses],
        *,
        peak_lr: float,
        weight_decay: float = 0.0,
        warmup: int = 200,
        average_decay: float = 0.999,
        init: Path | None = None,
    ) -> None:
        self.modules, self.losses = modules, losses
        self.peak_lr, self.warmup, self.average_decay = peak_lr, warmup, average_decay
        resumed = {part: read_resume(init, part) for part in modules} if init is not None else {}
        for part, state in resumed.items():
            if state is not None:
                modules[part].load_state_dict(state["weights"])
        self.named = {part: dict(module.named_parameters()) for part, module in modules.items()}
        self.parameters: list[Tensor] = [p for named in self.named.values() for p in named.values()]
        self.average = [p.detach().clone() for p in self.parameters]
        for average, (part, name) in zip(self.average, self._names(), strict=True):
            if (state := resumed.get(part)) is not None:
                average.copy_(state["average"][name])
        self.device = self.parameters[0].device
        self.cuda = self.device.type == "cuda"
        # Inside a CUDA graph the learning rate must be a tensor, or its first value would be replayed for ever.
        lr = torch.tensor(0.0, device=self.device) if self.cuda else 0.0
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=lr, betas=(0.9, 0.99), weight_decay=weight_decay, fused=self.cuda, capturable=self.cuda
        )
        # Of all graphs: each is done with what it keeps there when it ends, but for losses that are read at once.
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None
        self.graphs: dict[Losses, tuple[torch.cuda.CUDAGraph, dict[str, Tensor]]] = {}  # and the losses it writes
        self.current: dict[str, Tensor] = {}

    def _names(self) -> list[tuple[str, str]]:
        return [(part, name) for part, named in self.named.items() for name in named]

    def _body(self, draw: Losses) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        losses = draw()
        torch.stack(list(losses.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        self.current = {name: value.detach() for name, value in losses.items()}

    def _capture(self, draw: Losses) -> None:
        """Record one step. The rehearsals before it run with a learning rate of zero: they only fill the moments."""
        self.optimizer.param_groups[0]["lr"].zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._body(draw)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, pool=self.pool):
            self._body(draw)
        self.graphs[draw] = graph, self.current

    def step(self, index: int, lr: float) -> None:
        group, draw = self.optimizer.param_groups[0], self.losses[index % len(self.losses)]
        if self.cuda:
            if draw not in self.graphs:
                self._capture(draw)
            graph, self.current = self.graphs[draw]
            group["lr"].fill_(lr)
            graph.replay()
        else:
            group["lr"] = lr
            self._body(draw)
        # Early on, a long memory would average in the random start.
        decay = min(self.average_decay, (1 + index) / (10 + index))
        with torch.no_grad():
            torch._foreach_lerp_(self.average, self.parameters, 1 - decay)  # pyright: ignore[reportPrivateImportUsage]

    def run(self, clock: Clock, between: Callable[[int], None] | None = None) -> int:
        """Train until the clock is at 1; `between(step)` runs before every step. Returns the number of steps.

        Raises NonFiniteLossError.
        """
        step, reported, reported_step = 0, time.monotonic(), 0
        while (progress := clock.progress(step)) < 1:
            if between is not None:
                between(step)
            lr = self.peak_lr * min(1.0, (step + 1) / self.warmup) * 0.5 * (1 + math.cos(math.pi * progress))
            self.step(step, lr)
            step += 1
            if self.cuda and step % 16 == 0:
                torch.cuda.synchronize()  # the clock is the host's: do not let it run ahead of the work
            now = time.monotonic()
            if now - reported > REPORT_SECONDS or step == CALIBRATION:
                self._report(step, progress, lr, (now - reported) / (step - reported_step))
                reported, reported_step = now, step
        self._report(step, 1.0, 0.0, (time.monotonic() - clock.begin) / max(1, step))
        return step

    def _report(self, step: int, progress: float, lr: float, seconds: float) -> None:
        values = {name: float(value) for name, value in self.current.items()}
        text = "  ".join(f"{name} {value:.5f}" for name, value in values.items())
        elapsed = time.monotonic() - STARTED
        print(
            f"[{elapsed:5.0f} s] step {step}  {progress:4.0%}  lr {lr:.2e}  {text}  {1e3 * seconds:.1f} ms/step",
            flush=True,
        )
        if not all(map(math.isfinite, values.values())):
            raise NonFiniteLossError(
                f"the loss is no longer finite at step {step} ({text}): start again with a lower --lr"
            )

    def finish(self, folder: Path) -> None:
        """Write the resume files, then give the modules the averaged weights."""
        averages = iter(self.average)
        for part, named in self.named.items():
            average = {name: next(averages) for name in named}
            write_resume(folder, part, dict(named), average)
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.average, strict=True):
                parameter.copy_(average)
