"""Animate and Animate-2 through the denoising loop, with everything that makes it fast: each equals the plain run."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

import wan_core
from tests.animate_references import ANIMATE2, TINY_ANIMATE, draw_inputs, draw_weights
from tests.denoised import denoise
from tests.int8_files import HOLD, described, encoded
from wan_core.checkpoint.save import write_safetensors
from wan_core.config import SkipOptions, TaylorSeerOptions
from wan_core.execution.memory.residency import Residency
from wan_core.execution.optimize import optimize
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.sdpa import SDPA
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.control import with_passes
from wan_core.sampling.plan import Plan, make_plan
from wan_core.sampling.sparsity.schedule import parse_sparse, sparsify

CPU = torch.device("cpu")
DRIVING = ("pose", "pose_image", "pose_context", "pose_strength")
CONFIGS = {"animate": TINY_ANIMATE, "animate2": ANIMATE2}
GRID = (1, 3, 2, 10)  # so wide that tiles hold tokens of several frames


@pytest.fixture(params=CONFIGS)
def family(request) -> str:
    return request.param


def prepared_model(family: str) -> WanModel:
    config = CONFIGS[family]
    model = wan_core.load_dit(draw_weights(config), {"num_heads": config.num_heads}, family)
    return optimize(model, attend=SDPA)


def conditioned(family: str, videos: int = 1) -> Conditioning:
    """A prompt and a negative prompt; what drives the videos differs between the branches as ComfyUI's nodes and the
    reference have it."""
    drawn = draw_inputs(CONFIGS[family], (videos, *GRID[1:]))
    names = set(drawn) - {"x", "timestep", "context", "image"}
    inputs = {name: drawn[name] for name in names}
    other = {"face": torch.full_like(drawn["face"], -1)} if family == "animate" else {"unconditional": True}
    return Conditioning(
        cond=drawn["context"][:1],
        uncond=drawn["context"][:1].flip(1),
        concat=drawn["x"][:, 16:],
        image_features=drawn["image"],
        inputs=inputs | ({"unconditional": False} if family == "animate2" else {}),
        uncond_inputs=other,
    )


def plan_for(family: str, **options) -> Plan:
    return make_plan(task=f"{family}-14B", **{"steps": 4, "guidance_high": 2.0, "guidance_low": 2.0, **options})


def run(model: WanModel, family: str, plan: Plan | None = None, videos: int = 1, **options) -> torch.Tensor:
    noise = torch.randn(videos, 16, GRID[1], 2 * GRID[2], 2 * GRID[3], generator=torch.Generator().manual_seed(2))
    plan = plan_for(family) if plan is None else plan
    with torch.no_grad():
        return denoise(plan, lambda _: model, conditioned(family, videos), noise, **options)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_branches_together_equal_one_after_the_other(family):
    model = prepared_model(family)
    for videos in (1, 2):
        alone = run(model, family, videos=videos)
        assert difference(run(model, family, videos=videos, batched=True), alone) < 1e-4


def test_what_differs_between_branches_counts(family):
    model = prepared_model(family)
    if family == "animate2":
        model.config = replace(model.config, unconditional_skips=1)
    plan, noise = plan_for(family), torch.randn(1, 16, GRID[1], 2 * GRID[2], 2 * GRID[3])
    with torch.no_grad():
        conditioning = conditioned(family)
        one, other = (
            denoise(plan, lambda _: model, c, noise) for c in (conditioning, replace(conditioning, uncond_inputs={}))
        )
    assert difference(other, one) > 1e-4


def test_conditioning_travels_flat(family):
    conditioning = conditioned(family)
    unpacked = Conditioning.of(conditioning.flat())
    assert unpacked.flat().keys() == conditioning.flat().keys()
    assert all(torch.equal(value, conditioning.flat()[name]) for name, value in unpacked.flat().items())
    assert unpacked.uncond_inputs.get("unconditional") is conditioning.uncond_inputs.get("unconditional")
    assert Conditioning.of(replace(conditioning, inputs={"log_scale": -1.3}).flat()).inputs == {"log_scale": -1.3}


def test_step_caching_changes_the_video_a_little(family):
    """The driving pass is no step: it is not replaced, and nothing is kept of it."""
    model, plan = prepared_model(family), plan_for(family, steps=10)
    skip = SkipOptions(taylorseer=TaylorSeerOptions(interval=2, order=1, retention=0.2))
    cached = skip_forwards(plan, skip, None, None)
    assert any(step.skipped for step in cached.steps)
    whole = run(model, family, plan)
    assert 1e-6 < difference(run(model, family, cached), whole) < 0.5
    assert torch.equal(run(model, family, plan), whole)  # nothing stays behind


@pytest.mark.parametrize("resident", [0, 1])
def test_streamed_blocks_give_the_same_bits(family, resident):
    """The driving pass streams them too."""
    exact = run(prepared_model(family), family)
    residency = Residency(CPU, "stream", resident_blocks=resident)
    residency.add("high", prepared_model(family))
    for _ in range(2):  # the second video finds what the first left
        assert torch.equal(run(residency.use("high"), family), exact)


@pytest.mark.parametrize("kind", ["0.0001/0", "0.9/1"])
def test_the_order_of_tiles_changes_nothing(family, kind):
    """Tokens in the order of the tiles find their face, or their driving frame. Every block is read: because all are
    chosen, in dense steps of a sparse phase, in dense layers of a sparse step."""
    model, plan = prepared_model(family), plan_for(family)
    everything = sparsify(plan, parse_sparse(f"{kind}:ramp0"))
    assert everything.sparse is not None
    assert difference(run(model, family, everything), run(model, family, plan)) < 1e-4


def test_sparse_attention_reads_less(family):
    model, plan = prepared_model(family), plan_for(family)
    whole = run(model, family, plan)
    latents = run(model, family, sparsify(plan, parse_sparse("0.9/0:ramp0")))
    assert 1e-5 < difference(latents, whole) < 0.3
    assert torch.equal(run(model, family, plan), whole)  # nothing stays behind


@pytest.mark.parametrize("layout", ["comfyui", "official"])
def test_int8_files_run_as_they_are_stored(family, layout, tmp_path):
    """Files of the official templates: rotated INT8 matrices, in memory and in products."""
    config = replace(CONFIGS[family], dim=64, ffn_dim=64, num_layers=5)
    weights, state = draw_weights(config), {}
    level = "block." if (family, layout) == ("animate2", "official") else ""
    for name, value in weights.items():
        stem, _, kind = re.sub(r"^(blocks\.\d+\.)", rf"\1{level}", name).rpartition(".")
        if kind == "weight" and name.rpartition(".")[0] in config.quantized_names():
            state |= {f"{stem}.{part}": tensor for part, tensor in encoded("rotated 64", value).items()}
            text = json.dumps(described("rotated 64")).encode()
            state[f"{stem}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
        else:
            state[f"{stem}.{kind}"] = value
    claimed = {"config": '{"transformer": {"model_type": "animate2"}}'} if family == "animate2" and not level else {}
    write_safetensors(state, tmp_path / "m.safetensors", {"num_heads": "2", **claimed})
    drawn = draw_inputs(config, GRID)
    outputs = {}
    for quantization in (None, HOLD):
        model = wan_core.load_dit(tmp_path / "m.safetensors", dtype=torch.float32, quantization=quantization)
        assert model.family == family
        inputs = {name: value for name, value in drawn.items() if name not in ("x", "timestep", "context")}
        with torch.no_grad():
            outputs[quantization] = model(drawn["x"], drawn["timestep"], drawn["context"], **inputs)
    assert 0 < difference(outputs[HOLD], outputs[None]) < 0.05


@pytest.mark.parametrize("batched", [False, True])
def test_steps_that_do_not_read_the_driving_video(batched):
    """Each step against forwards of the model itself, with the driving video and without; a pass over it runs once."""
    model, plan = prepared_model("animate2"), plan_for("animate2", steps=5, solver="euler")
    conditioning, window = conditioned("animate2"), {1, 2, 3}
    steps = [replace(step, undriven=step.index not in window) for step in plan.steps]
    plan = with_passes(replace(plan, steps=tuple(steps)))
    told, passed = [], []
    x = noise = torch.randn(1, 16, GRID[1], 2 * GRID[2], 2 * GRID[3], generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for step in steps:
            inputs = {
                name: value
                for name, value in conditioning.inputs.items()
                if name not in DRIVING or step.index in window
            }
            taken, time = torch.cat([x, conditioning.concat], 1), torch.tensor([step.timestep])
            cond, uncond = (
                model(taken, time, rows, image=conditioning.image_features, **inputs | other)
                for rows, other in ((conditioning.cond, {}), (conditioning.uncond, conditioning.uncond_inputs))
            )
            x = x + (uncond + step.guidance * (cond - uncond)) * (step.sigma_next - step.sigma)
        always, drive = run(model, "animate2", plan_for("animate2", steps=5, solver="euler")), model.drive
        model.drive = lambda *arguments: (passed.append(1), drive(*arguments))[1]
        options = {"batched": batched, "on_step": lambda progress: told.append(progress.forwards)}
        latents = denoise(plan, lambda _: model, conditioning, noise, **options)
    assert difference(latents, x) < 1e-5 and difference(always, x) > 1e-3
    assert sum(passed) == 1 and told == [2, 3, 2, 2, 2] and sum(told) == plan.forwards


def test_passes_of_each_branch_are_no_skipped_forwards():
    """A driving video without a text of its own takes a pass for each branch: of both numbers, forwards and all."""
    one = skip_forwards(plan_for("animate2", steps=12), SkipOptions(taylorseer=TaylorSeerOptions(interval=2)), None)
    two = with_passes(one, own=False)
    assert (two.forwards - one.forwards, two.unskipped - one.unskipped) == (1, 1) and two.saved > 0
