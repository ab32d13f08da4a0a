"""Suite `sparse`: sparse attention by its parts, and whole videos with it.

kernels           one layer's self-attention, q, k and v as the block hands them over: dense backends, sparse ones at
                  three budgets with the choice of blocks and their means included, `choice` and `means` apart, the
                  permutation of a forward's tokens, and comfy-kitchen's sol_attn where it is installed. `error` is
                  against the formula in bf16 on random numbers, which have no structure: it ranks kernels at the same
                  budget, and says nothing about budgets
SETTING           a whole video, by phase, as `quality --setting` writes it: magcache:balanced+sparse:balanced
SETTING@STEPS     the same in so many steps without guidance, as step-distilled weights are run
native            one forward of ComfyUI's own transformer, compiled, and what a run of the task's steps with guidance
                  takes at that, our encoding and decoding included

Weights are random: times mean something, videos do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import make_case, parse_size, plain_model
from benchmarks.measure import make_room, measure, relative_error
from benchmarks.options import SUITES
from benchmarks.peers import PEERS
from benchmarks.rows import Row, guarded
from benchmarks.setups import Setup, find_setup
from wan_core.config import OptionError, Request, SkipOptions
from wan_core.execution.report import GIB
from wan_core.models.wan.tasks import find_task
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.attention.sdpa import sdpa
from wan_core.ops.attention.sparse.forward import SparseAttention, SparseForward, SparseFp8Attention
from wan_core.ops.attention.sparse.kernels import KERNELS, SMALL, SparseKernel, block_length
from wan_core.ops.attention.sparse.routing import Route, Rule, choose, estimate
from wan_core.ops.attention.sparse.tiles import make_tiles
from wan_core.ops.kernels.block_layout import block_sizes
from wan_core.ops.kernels.blocked import pool, quantize_heads_first, quantize_values
from wan_core.ops.kernels.formats import Quantized
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.arguments import parse_setting

PROMPT = "a red circle moving right on a blue background"
KEEPS = (0.5, 0.25, 0.125)
NATIVE = "comfyui-compiled"


def sparse_rows(
    name: str, sizes: list[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Raises OptionError for an entry that is not known, before any work."""
    entries = options.setting or SUITES["sparse"].settings
    for entry in entries:
        if entry not in ("kernels", "native"):
            parse_setting(entry.partition("@")[0])
            if not (entry.partition("@")[2] or "1").isdecimal():
                raise OptionError(f"setting {entry!r} given; after @ comes a number of steps")
    chosen = options.setup or (["fp8 + cudnn-fp8"] if device.type == "cuda" else ["plain torch"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    if device.type == "cpu":
        dtype = torch.float32
    for setup in map(find_setup, chosen):
        if reason := setup.why_not(device, dtype):
            raise OptionError(reason)
    trial = Trial(name, device, dtype, options.runs or 3, options.layers)
    for size in sizes:
        for entry in entries:
            make_room(device)
            if entry == "kernels":
                yield from trial.kernels(size)
            elif entry == "native":
                yield guarded("native", size, PEERS[NATIVE].why_not(), lambda s=size: trial.native(s))
            else:
                for setup in map(find_setup, chosen):
                    yield from trial.videos(entry, setup, size, options.steps)


class Trial:
    """What the rows of one run share."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, runs: int, layers: int | None) -> None:
        self.name, self.device, self.dtype, self.runs, self.layers = name, device, dtype, runs, layers
        self.native_forward: dict[str, float] = {}
        self.pipes: dict[str, Pipeline] = {}
        self.warm: set[tuple[object, ...]] = set()
        self.folder = TemporaryDirectory(prefix="wancore-sparse-")

    # ----------------------------------------------------------------------------------------------------- kernels

    def kernels(self, size: str) -> Iterator[Row]:
        width, height, frames = parse_size(size)
        cuda = self.device.type == "cuda"
        grid = (frames - 1) // 4 + 1, height // 16, width // 16
        tokens, heads, dim = grid[0] * grid[1] * grid[2], 40 if cuda else 2, 128 if cuda else 64
        generator = torch.Generator(self.device).manual_seed(0)
        shape = 1, tokens, heads, dim
        q, k, v = (torch.randn(shape, device=self.device, dtype=self.dtype, generator=generator) for _ in range(3))
        for name in ("cudnn", "flash4", "cudnn-fp8", "sdpa") if cuda else ("sdpa",):
            reason = BACKENDS[name].why_not(self.device, self.dtype, dim)
            yield guarded(f"attention, {name}", size, reason, lambda n=name: self._dense(n, q, k, v))
        for kernel in KERNELS.values():
            if cuda and kernel.name == "math" and tokens >= SMALL:
                continue
            reason = kernel.why_not(self.device, self.dtype, dim)
            for keep, pooled in [(1.0, False), *((keep, True) for keep in KEEPS), (0.25, False)]:
                name = f"attention, sparse {kernel.name}, {100 * keep:g} %{'' if pooled or keep == 1 else ', alone'}"
                make = lambda k_=kernel, a=keep, b=pooled: self._sparse(k_, grid, a, b, q, k, v)  # noqa: E731
                yield guarded(name, size, reason, make)
        yield guarded("choice and means", size, None, lambda: self._choice(grid, q, k))
        x = torch.randn(1, tokens, heads * dim, device=self.device, dtype=self.dtype)
        tiles = make_tiles(grid, 128, self.device)
        yield guarded(
            "permutation, both ways", size, None, lambda: self._timed(lambda: x[:, tiles.order][:, tiles.inverse])
        )
        if cuda:
            yield guarded(
                "attention, sol_attn, top 25 %", size, why_not_sol(), lambda: self._timed(lambda: sol(q, k, v))
            )

    def _dense(self, name: str, q: Tensor, k: Tensor, v: Tensor) -> Row:
        attend = BACKENDS[name].load()
        if not attend.takes_fp8:
            return self._timed(lambda: attend(q, k, v))
        from wan_core.ops.attention.fp8 import key_mean, quantize

        laid = quantize(q), quantize(k, key_mean(k)), quantize(v)
        return self._timed(lambda: attend.quantized(*laid).data)

    def _sparse(
        self,
        kernel: SparseKernel,
        grid: tuple[int, int, int],
        keep: float,
        pooled: bool,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Row:
        tokens = q.shape[1]
        block = block_length(kernel, tokens)
        tiles = make_tiles(grid, block, self.device)
        if kernel.fp8:
            from wan_core.ops.attention.fp8 import key_mean

            laid = [quantize_heads_first(q, block), quantize_heads_first(k, block, key_mean(k))]
            laid.append(quantize_values(v.flatten(-2), v.shape[2], block))
            attend = SparseFp8Attention(block)
            run: Callable[[AttentionCall], Tensor] = lambda call: attend.quantized(*laid, call).data  # noqa: E731
        else:
            plain = SparseAttention()
            run = lambda call: plain(q, k, v, call)  # noqa: E731

        def once() -> Tensor:
            return run(AttentionCall(sparse=SparseForward(kernel, [], tiles, [Rule(keep)], pooled=pooled)))

        row = self._timed(once)
        if keep == 1:
            exact = sdpa(q, k, v)
            found = once()
            if kernel.fp8:
                found = Quantized(found, laid[2].scale).dequantize()
            row["error"] = relative_error(found.float(), exact.float())
        return row

    def _choice(self, grid: tuple[int, int, int], q: Tensor, k: Tensor) -> Row:
        tiles = make_tiles(grid, 128, self.device)
        sizes = block_sizes(q.shape[1], 128, self.device)

        def once() -> Route:
            means = pool(q, 128)[0], *pool(k, 128)
            return choose(estimate(*means, sizes, "spread"), Rule(0.25), tiles.forced, sizes)

        return self._timed(lambda: once().blocks)

    def _timed(self, run: Callable[[], Tensor]) -> Row:
        with torch.no_grad():
            return measure(lambda: run, self.device, self.runs).numbers()

    # ------------------------------------------------------------------------------------------------------ videos

    def native(self, size: str) -> Row:
        """A forward of the peer on random weights, all layers."""
        model, stride = plain_model(self.name, self.device, self.dtype, self.layers, None)
        case = make_case(model, size, stride)
        _, run = PEERS[NATIVE].ready(model)
        measured = measure(lambda: lambda: run(case.x, case.timestep, case.contexts[0]), self.device, self.runs)
        self.native_forward[size] = measured.median
        return {**measured.numbers(), "tokens": case.tokens}

    def picture(self, width: int, height: int) -> Path:
        """A first frame."""
        from PIL import Image

        path = Path(self.folder.name) / f"{width}x{height}.png"
        Image.new("RGB", (width, height), (20, 40, 200)).save(path)
        return path

    def videos(self, entry: str, setup: Setup, size: str, steps: int | None) -> Iterator[Row]:
        """A row for each phase, the total, and the native time computed from the forward of `native` in this run."""
        setting, _, few = entry.partition("@")
        width, height, frames = parse_size(size)
        request = Request(
            prompt=PROMPT,
            width=width,
            height=height,
            frames=frames,
            steps=int(few) if few else steps,
            skip=parse_setting(setting),
            guidance_high=1.0 if few else None,
            guidance_low=1.0 if few else None,
            shift=5.0 if few else None,
        )
        if setup.name not in self.pipes:
            self.pipes.clear()
            make_room(self.device)
            load = setup.load_options(self.name, self.device)
            self.pipes[setup.name] = Pipeline.load(load)
            self.warm.clear()
        pipe = self.pipes[setup.name]
        if pipe.models.task.image == "channels":  # without one it makes no video
            request = replace(request, image=str(self.picture(width, height)))
        # What is compiled and tuned on first use is no part of a video: two steps, one of each expert, come before.
        stages = request.skip.stages if request.skip else ()
        sparse = request.skip.sparse if request.skip else None
        ways = sparse and replace(sparse, sparsity=0.875, dense_steps=0.0)
        kind = size, ways, *(stage.scale for stage in stages)
        if kind not in self.warm:
            skip = SkipOptions(sparse=ways) if ways else None
            pipe.generate(Request(**{**vars(request), "steps": 2, "boundary": 0.9, "skip": skip}))
            for stage in stages:
                skip = SkipOptions(sparse=skip and skip.sparse, stages=(replace(stage, low=0.9, high=1.0),))
                pipe.generate(Request(**{**vars(request), "steps": 3, "skip": skip}))
            self.warm.add(kind)
        result = pipe.generate(request)
        found = result.report.as_dict()
        name = f"{entry}, {setup.name}"
        for phase, numbers in found["phases"].items():
            yield {"name": f"{name}: {phase}", "size": size, **numbers}
        total = sum(p.seconds for key, p in result.report.phases.items() if key != "load")
        row: Row = {"name": f"{name}: total", "size": size, "seconds": round(total, 3)}
        row["peak_gib"] = round(max((p.peak for p in result.report.phases.values()), default=0) / GIB, 3)
        row |= {"forwards": result.plan.forwards, "notes": result.report.notes}
        if size in self.native_forward and not few:
            default = find_task(result.plan.task)
            ours = sum(p.seconds for key, p in result.report.phases.items() if key in ("text", "decode"))
            native = 2 * (steps or default.steps) * self.native_forward[size] + ours
            row |= {"native_seconds": round(native, 2), "ratio": round(native / total, 3), "ratio_to": NATIVE}
        yield row


def why_not_sol() -> str | None:
    try:
        import comfy_kitchen  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError, RuntimeError) as fault:
        return f"comfy-kitchen cannot be imported ({fault}): pip install comfy-kitchen"
    usable = getattr(comfy_kitchen, "sol_attn_is_available", lambda: False)()
    return None if usable else "this comfy-kitchen has no sol_attn for this card"


def sol(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    import comfy_kitchen  # pyright: ignore[reportMissingImports]

    return comfy_kitchen.sol_attn(q, k, v, topk_ratio=0.25)
