"""Animate and Animate-2 through the denoising loop, with everything that makes it fast: each equals the plain run."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

import wan_core
from tests.animate_references import draw_inputs, draw_weights
from tests.denoised import denoise
from tests.int8_files import HOLD, described, encoded
from tests.sampling.family_runs import DRIVEN as CONFIGS
from tests.sampling.family_runs import conditioned, difference, plan_for, prepared_model, run
from wan_core.checkpoint.save import write_safetensors
from wan_core.config import SkipOptions, TaylorSeerOptions
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.control import with_passes

DRIVING = ("pose", "pose_image", "pose_context", "pose_strength")
GRID = (1, 3, 2, 10)  # so wide that tiles hold tokens of several frames


@pytest.mark.parametrize("family", CONFIGS)
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
