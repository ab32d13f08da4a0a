"""What ranks do in tests of families with inputs of their own and of GPUs: as `parallel_checks`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from parallel_checks import FAMILIES, of_one, ranks_of, relative, shard_of, sharded_attention
from torch import Tensor

from tests import animate_references, control_references
from tests.animate_references import draw_weights
from tests.denoised import denoise
from tests.s2v_references import S2V
from tests.s2v_references import draw_inputs as draw_sound
from wan_core.checkpoint import load_dit
from wan_core.checkpoint.random import random_module
from wan_core.config import (
    MagCacheOptions,
    SkipOptions,
    SparseOptions,
)
from wan_core.execution.optimize import optimize
from wan_core.models.wan.config import T2V_A14B
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.protocol import AttentionCall
from wan_core.ops.attention.registry import BACKENDS
from wan_core.parallel.mesh import gather_parts
from wan_core.parallel.sequence import shard_lengths
from wan_core.parallel.weights import load_sharded_dit
from wan_core.pipeline.settings import find_quantization
from wan_core.sampling.cache.curves import Curve
from wan_core.sampling.cache.skipping import leave_out
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.sparsity.schedule import sparsify


def family_model(name: str, grid: tuple[int, ...], motion: bool) -> tuple[WanModel, dict[str, Tensor]]:
    """A tiny model, and what drives or controls it. motion: of S2V, the frames before."""
    config = FAMILIES[name]
    model = load_dit(draw_weights(config), family=config.family, metadata={"num_heads": config.num_heads})
    if config is S2V:
        return model, draw_sound(config, grid, motion=19 if motion else None)
    references = control_references if name in control_references.CONFIGS else animate_references
    return model, references.draw_inputs(config, grid)


@torch.no_grad()
def family_forward(mesh: str, name: str, grid: tuple[int, ...], motion: bool = True, **changed) -> tuple[float, float]:
    """The difference of a sharded forward and a whole one, and how much driving or control changes it."""
    model, inputs = family_model(name, grid, motion)
    inputs |= changed
    x, time, context = (inputs.pop(name) for name in ("x", "timestep", "context"))
    attend = BACKENDS["math"].load()
    optimize(model, attend=attend)
    uncontrolled = {"image": inputs["image"]} if "image" in inputs else {}
    whole, free = of_one(mesh, lambda: (model(x, time, context, **inputs), model(x, time, context, **uncontrolled)))
    optimize(model, attend=attend, ranks=ranks_of(mesh))
    return relative(model(x, time, context, **inputs), whole), relative(free, whole)


@torch.no_grad()
def family_run(mesh: str, name: str, how: str, grid: tuple[int, ...]) -> tuple[float, float]:
    """The difference of a sharded run and a whole one with MagCache, sparse steps or control of a part, and to full."""
    model, inputs = family_model(name, grid, True)
    x, _, context = (inputs.pop(name) for name in ("x", "timestep", "context"))
    conditioning = Conditioning(
        cond=context, uncond=context.flip(1), concat=x[:, 16:] if x.shape[1] > 16 else None, inputs=inputs,
        uncond_inputs={"audio": torch.zeros_like(inputs["audio"])} if "audio" in inputs else {},
    )  # fmt: skip
    steps = 10 if how == "magcache" else 4  # a step cache takes ten
    plan = make_plan(task="t2v-14B", steps=steps, guidance_high=2.0, guidance_low=2.0)
    curve = Curve(
        task=plan.name, source="flat", high_steps=steps, shift=plan.shift, boundary=0.0, solver=plan.solver,
        samples=None, cond=(1.0,) * steps, uncond=(1.0,) * steps,
    )  # fmt: skip
    skip = SkipOptions(magcache=MagCacheOptions(threshold=0.12, max_skips=2, retention=0.2))
    if how == "part":
        changed = replace(plan, steps=tuple(replace(s, control=(float(s.index < 2),)) for s in plan.steps))
    else:
        changed = (
            leave_out(plan, skip, curve) if how == "magcache" else sparsify(plan, SparseOptions.parse("0.9:ramp0"))
        )

    def run(walked: Plan) -> Tensor:
        return denoise(walked, lambda _: model, conditioning, x[:, :16])

    attend = BACKENDS["math"].load()
    optimize(model, attend=attend)
    full, whole = of_one(mesh, lambda: (run(plan), run(changed)))
    optimize(model, attend=attend, ranks=ranks_of(mesh))
    return relative(run(changed), whole), relative(full, whole)


@torch.no_grad()
def sharded_vace(mesh: str, path: str) -> tuple[float, list[str]]:
    """A VACE file with sharded weights: its difference to the whole model, and the matrices that are not sharded."""
    from torch.distributed.tensor import DTensor

    model, whole = load_sharded_dit(Path(path), ranks_of(mesh), torch.float32), load_dit(Path(path))
    inputs = control_references.draw_inputs(whole.config, (1, 2, 3, 2))
    inputs["control"] = control_references.contexts(inputs["control"])
    x, time, context = (inputs.pop(name) for name in ("x", "timestep", "context"))
    whole_parameters = [
        name
        for name, parameter in model.named_parameters()
        if "blocks." in name and parameter.ndim == 2 and not isinstance(parameter, DTensor)
    ]
    optimize(model, attend=BACKENDS["math"].load(), ranks=ranks_of(mesh))
    return relative(model(x, time, context, **inputs), whole(x, time, context, **inputs)), whole_parameters


@torch.no_grad()
def gpu_attention(mesh: str, backend: str, heads: int, tokens: int, device: str = "cuda") -> tuple[float, float]:
    """Mean errors against fp32 of a backend in bf16 over one sequence: whole, and sharded."""
    ranks = ranks_of(mesh, device)
    generator = torch.Generator(ranks.device).manual_seed(0)
    shape = (3, 1, tokens, heads, 128)
    q, k, v = torch.randn(shape, generator=generator, device=ranks.device).bfloat16()
    k += 3  # a mean that FP8 has to take off
    exact = BACKENDS["sdpa"].load()(q.float(), k.float(), v.float())
    lengths, _ = shard_lengths(tokens, 1, ranks.mesh.shards)
    mine = shard_of(ranks, lengths)
    sharded = sharded_attention(ranks, backend)
    out = sharded(q[:, mine], k[:, mine], v[:, mine], AttentionCall(lengths=lengths))
    out = gather_parts(out, lengths, ranks.sequence, 1)
    return tuple(float((x.float() - exact).norm() / exact.norm()) for x in (sharded.dense(q, k, v), out))


@torch.no_grad()
def gpu_forward(mesh: str, precision: str, attention: str, compile: str = "off") -> tuple[float, float, float]:
    """`fp8_forward` of two blocks at full width with random weights, as a user's options hold and run them."""
    ranks = ranks_of(mesh, "cuda")
    config = replace(T2V_A14B, num_layers=2)
    quantization = find_quantization(precision, ranks.device)
    generator = torch.Generator(ranks.device).manual_seed(0)
    x = torch.randn(1, 16, 5, 30, 52, generator=generator, device=ranks.device)  # 1950 tokens: some ranks have one more
    text = torch.randn(1, 20, config.text_dim, generator=generator, device=ranks.device).bfloat16()
    time = torch.tensor([700.0], device=ranks.device)
    exact_model = random_module(config, device=ranks.device, dtype=torch.bfloat16)
    exact = optimize(exact_model, attend=BACKENDS["sdpa"].load())(x, time, text)
    model = random_module(config, device=ranks.device, dtype=torch.bfloat16, quantization=quantization)
    attend = BACKENDS[attention].load()
    whole = optimize(model, attend=attend, compile=compile)(x, time, text)
    sharded = optimize(model, attend=attend, compile=compile, ranks=ranks)(x, time, text)
    return tuple(float((a - b).norm() / exact.norm()) for a, b in ((whole, exact), (sharded, exact), (sharded, whole)))
