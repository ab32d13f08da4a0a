"""Run by ComfyUI's Python: prompts that change during a run, sampled by WanCore from MODEL and WanCore Sampler and by
ComfyUI's own sampler, on tiny models of its own classes. `native_checks` runs its checks.
"""

from __future__ import annotations

import importlib
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import native_models as world

SEED, STEPS = 5, 7
SIZE = (1, 16, 2, 4, 6)  # of latents
SMALL = {"dim": 256, "ffn_dim": 64, "num_heads": 2, "num_layers": 2, "text_dim": 4096, "freq_dim": 256}
GIVEN = [1.0, 0.98, 0.9, 0.74, 0.6, 0.35, 0.1, 0.0]  # sigmas of no shift
HALVES, THIRDS = (0.5,), (0.27, 0.63)
CASES: dict[str, dict[str, Any]] = {
    "the model's own shift": {"shift": 8.0},
    "no shift said": {},  # the task's own is another
    "shift 3": {"shift": 3.0},
    "shift 12, thirds": {"shift": 12.0, "cuts": THIRDS},
    "sigmas": {"sigmas": GIVEN},
    "sigmas, thirds": {"sigmas": GIVEN, "cuts": THIRDS},
    "ModelSamplingSD3": {"patched": 5.0},
    "ModelSamplingSD3, shift 12": {"patched": 3.0, "shift": 12.0},
    "ModelSamplingSD3, sigmas": {"patched": 3.0, "sigmas": GIVEN, "cuts": THIRDS},
    "two experts": {"two": True, "shift": 5.0},
    "two experts, ModelSamplingSD3": {"two": True, "patched": 5.0, "cuts": THIRDS},
    "two experts, ModelSamplingSD3, sigmas": {"two": True, "patched": 3.0, "sigmas": GIVEN},
    "a video, half of the noise": {"patched": 5.0, "shift": 3.0, "denoise": 0.5, "cuts": (0.8,)},
    "a video, the last steps": {"patched": 3.0, "shift": 8.0, "start": 3},
    "a video, sigmas": {"patched": 3.0, "sigmas": GIVEN[2:], "cuts": (0.8,)},
    "negative prompts": {"patched": 3.0, "shift": 8.0, "negative": True},
    "heun": {"patched": 3.0, "shift": 8.0, "solver": "heun"},
    "ranges that meet on a step": {"shift": 8.0, "steps": 8},
    "ranges that meet on steps, also the negative ones": {
        "shift": 8.0,
        "steps": 8,
        "cuts": (0.25, 0.75),
        "negative": True,
    },
    "ranges that meet on a step of heun": {"shift": 8.0, "steps": 8, "solver": "heun"},
    "two experts, ranges that meet on a step": {"two": True, "shift": 8.0, "steps": 8},
    "ranges that overlap": {"shift": 5.0, "overlap": 0.2},
    "a long text": {"rows": (1024, 512)},
    "long texts, one of them negative": {"rows": (600, 700), "shift": 5.0, "negative": True, "cuts": THIRDS},
    "long texts of one length that overlap": {"rows": (1024, 1024), "negative": True, "overlap": 0.2},
    "two texts combined, three negative ones": {"shift": 5.0, "overlap": 1.0, "negative": True, "cuts": THIRDS},
}


def prompts(cuts: tuple[float, ...], seed: int, overlap: float = 0.0, rows: int = 512) -> list[Any]:
    """A text for each part of the run, as ConditioningSetTimestepRange and ConditioningCombine give them. overlap: a
    part begins and ends by so much outside of its cuts."""
    parts = [(max(0.0, start - overlap), min(1.0, end + overlap)) for start, end in pairwise((0.0, *cuts, 1.0))]
    return [
        [world.rows(1, rows, 4096, seed=seed + n), {"start_percent": start, "end_percent": end} if cuts else {}]
        for n, (start, end) in enumerate(parts)
    ]


def compare(
    patched: float = 0.0,
    shift: float = 0.0,
    sigmas: list[float] | None = None,
    cuts: tuple[float, ...] = HALVES,
    two: bool = False,
    denoise: float = 1.0,
    start: int = 0,
    negative: bool = False,
    solver: str = "euler",
    steps: int = STEPS,
    overlap: float = 0.0,
    rows: tuple[int, int] = (512, 512),
) -> dict[str, Any]:
    import comfy.sample
    import comfy.samplers
    import torch
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    bridge = importlib.import_module("pack.nodes.from_model").WanCoreFromModel
    sampling = importlib.import_module("pack.nodes.sampling")
    models = [world.tiny("WAN21_T2V", seed, **SMALL) for seed in range(1 + two)]
    models = [ModelSamplingSD3().patch(one, patched)[0] for one in models] if patched else models
    socket = bridge.execute(
        models[0], precision="fp32", attention="sdpa", residency="auto", low=models[1] if two else None
    ).result[0]
    texts = prompts(cuts, 1, overlap, rows[0]), prompts(cuts if negative else (), 20, overlap, rows[1])
    video = world.rows(*SIZE, seed=7)
    from_video = denoise < 1 or start > 0 or (sigmas is not None and sigmas[0] < 1)
    latent = {"samples": video if from_video else torch.zeros(SIZE)}
    boundary = 0.8 if two else 0.0
    own_sigmas = None if sigmas is None else torch.tensor(sigmas)
    plans: list[Any] = []
    real = sampling.join
    sampling.join = lambda *args: plans.append(real(*args)) or plans[-1]

    def ours(positive: Any, uncond: Any) -> Any:
        return sampling.WanCoreSampler.execute(
            socket, positive, uncond, latent, SEED, "batched", steps=steps if own_sigmas is None else 0, shift=shift,
            boundary=boundary, guidance_high=3.0, guidance_low=3.0 * two, solver=solver, preset="none", denoise=denoise,
            start_step=start, sigmas=own_sigmas,
        ).result[0]["samples"]  # fmt: skip

    try:
        latents = ours(*texts)
    finally:
        sampling.join = real
    plan = plans[0].plan
    whole = [step.sigma for step in plan.steps if not step.correction] + [0.0]
    change = sum(sigma >= boundary for sigma in whole) if two else 0
    parts = [(models[0], whole[: change + 1]), (models[1], whole[change:])] if two else [(models[0], whole)]
    expected, noise = latent["samples"], comfy.sample.prepare_noise(latent["samples"], SEED)
    for model, own in parts:
        expected = comfy.sample.sample_custom(
            model, noise, 3.0, comfy.samplers.sampler_object(solver), torch.tensor(own), *texts, expected,
            disable_pbar=True, seed=SEED,
        )  # fmt: skip
        noise = torch.zeros_like(noise)
    other = ours([[texts[0][0][0], {}]], [[texts[1][0][0], {}]])
    return {
        "error": world.error(latents, expected),
        "changes": world.error(other, expected),
        "texts": [[one.texts[negative] for one in step.conditions] for step in plan.steps],
    }


class World:
    def __init__(self, _: Any) -> None:
        nobody = SimpleNamespace(sockets_metadata={}, client_id=None)  # no page watches
        importlib.import_module("server").PromptServer.instance = nobody


def check_texts(_: World) -> None:
    """Every step has the text that ComfyUI's sampler gives it."""
    import torch

    for name, case in CASES.items():
        with torch.inference_mode():
            run = compare(**case)
        texts = run["texts"]
        assert run["error"] <= 2e-5 < 1e-2 < run["changes"], (name, run)
        assert len({one for step in texts for one in step}) > 1, (name, texts)
        several = any(word in name for word in ("meet", "overlap", "combined"))
        assert any(len(step) > 1 for step in texts) == several, (name, texts)
