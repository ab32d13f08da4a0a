"""Small random models of every family that has inputs of its own, and their runs through the denoising loop."""

from __future__ import annotations

import torch

import wan_core
from tests.animate_references import ANIMATE2, TINY_ANIMATE, draw_weights
from tests.animate_references import draw_inputs as draw_driven
from tests.control_references import CONFIGS as CONTROLLED
from tests.control_references import OWN, contexts
from tests.control_references import draw_inputs as draw_controlled
from tests.denoised import denoise
from tests.s2v_references import S2V
from tests.s2v_references import draw_inputs as draw_sound
from wan_core.execution.optimize import optimize
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.sdpa import SDPA
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.plan import Plan, make_plan

DRIVEN = {"animate": TINY_ANIMATE, "animate2": ANIMATE2}
CONFIGS = {**CONTROLLED, **DRIVEN, "s2v": S2V}
# Frames, rows and columns of tokens. Those of the driven families are so wide that tiles hold tokens of several frames.
GRIDS = dict.fromkeys(CONFIGS, (3, 4, 5)) | dict.fromkeys(DRIVEN, (3, 2, 10))

Grid = tuple[int, int, int]


def prepared_model(name: str, seed: int = 0) -> WanModel:
    config = CONFIGS[name]
    family = name if name in DRIVEN else None
    return optimize(wan_core.load_dit(draw_weights(config, seed), {"num_heads": config.num_heads}, family), attend=SDPA)


def conditioned(name: str, videos: int = 1, grid: Grid | None = None) -> Conditioning:
    """A prompt and a negative prompt. What drives a video differs between the branches as ComfyUI's nodes and the
    references have it, and the negative prompt of S2V hears nothing but zeros."""
    config, size = CONFIGS[name], (videos, *(grid or GRIDS[name]))
    uncond_inputs, image, concat = {}, None, None
    if name in DRIVEN:
        drawn = draw_driven(config, size)
        inputs = {key: drawn[key] for key in set(drawn) - {"x", "timestep", "context", "image"}}
        uncond_inputs = {"face": torch.full_like(drawn["face"], -1)} if name == "animate" else {"unconditional": True}
        inputs |= {"unconditional": False} if name == "animate2" else {}
    elif name == "s2v":
        drawn = draw_sound(config, size)
        inputs = {key: drawn[key] for key in ("audio", "reference", "motion", "pose")}
        uncond_inputs = {"audio": torch.zeros_like(drawn["audio"])}
    else:
        drawn, own = draw_controlled(config, size), OWN[config.family]
        inputs = {own: drawn[own]}
        if own == "control":
            inputs = {own: contexts(drawn[own]), "control_scale": torch.tensor([0.8, 0.6])}
    if name != "s2v":
        image, concat = drawn.get("image"), drawn["x"][:, 16:] if config.in_channels > 16 else None
    text = drawn["context"][:1]
    conditions = {"inputs": inputs, "uncond_inputs": uncond_inputs}
    return Conditioning(cond=text, uncond=text.flip(1), concat=concat, image_features=image, **conditions)


def plan_for(name: str, **options) -> Plan:
    task = f"{name}-14B" if name in DRIVEN or name == "s2v" else "t2v-14B"
    return make_plan(task=task, **{"steps": 4, "guidance_high": 2.0, "guidance_low": 2.0, **options})


def run(
    models: WanModel | dict[str, WanModel],
    name: str,
    plan: Plan | None = None,
    videos: int = 1,
    grid: Grid | None = None,
    conditioning: Conditioning | None = None,
    **options,
) -> torch.Tensor:
    frames, rows, columns = grid or GRIDS[name]
    shape = (videos, 16, frames, 2 * rows, 2 * columns)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    acquire = models.__getitem__ if isinstance(models, dict) else lambda _: models
    conditioning = conditioning or conditioned(name, videos, grid)
    with torch.no_grad():
        return denoise(plan or plan_for(name), acquire, conditioning, noise, **options)


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
