"""Run by ComfyUI's Python: guidance that calls a model several times in a step, and prompts that change, with WanCore
Accelerate on tiny Wan models of ComfyUI's own classes. `native_checks` runs its checks.
"""

from __future__ import annotations

from typing import Any

import native_models as world
from native_cache_runs import EULER, SIZE, World, close, engine, every_second, padded, sample
from native_resolutions import HALF, staged


def check_passes(it: World) -> None:
    """SkipLayerGuidanceDiT: its second pass takes details from its own video, as if each pass had a schedule of its
    own; also where it begins in a smaller step, with those of the first pass."""
    import importlib

    import comfy.model_patcher
    import comfy.samplers
    from comfy.patcher_extension import WrappersMP
    from comfy_extras.nodes_pag import PerturbedAttentionGuidance
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    from wan_core.config import SparseOptions

    stages = importlib.import_module("pack.nodes.host.native_stages")
    size = (1, 16, 3, 8, 12)

    def apart(model: Any, scale: float, start: float, end: float) -> Any:
        """SkipLayerGuidanceDiT with a schedule for the second pass alone."""
        own: list[Any] = []

        def guide(args: dict[str, Any]) -> Any:
            options = comfy.model_patcher.create_model_options_clone(args["model_options"])
            around = options["transformer_options"]["wrappers"][WrappersMP.APPLY_MODEL]
            (first,) = around[stages.KEY]
            sigma = float(args["sigma"][0])
            if not end <= sigma <= start:
                return args["denoised"]
            if not own:
                own.append(stages.StagedRun(first.stages, first.sigmas, first.boundary, stages.Patches({})))
                own[0].videos |= first.videos if begins_small else {}
            around[stages.KEY] = own
            options = comfy.model_patcher.set_model_options_patch_replace(
                options, lambda inputs, _: inputs, "dit", "double_block", 1
            )
            (skipped,) = comfy.samplers.calc_cond_batch(
                args["model"], [args["cond"]], args["input"], args["sigma"], options
            )
            return args["denoised"] + (args["cond_denoised"] - skipped) * scale

        patched = model.clone()
        patched.set_model_sampler_post_cfg_function(guide)
        return patched

    model = world.tiny("WAN21_T2V")
    sampling = model.get_model_object("model_sampling")
    for begin, begins_small in ((0.0, False), (0.4, True)):
        sigma = sampling.percent_to_sigma(begin)
        assert begins_small == (0.79 < sigma < 0.93)
        native = SkipLayerGuidanceDiT.execute(model, 2.0, begin, 1.0, "1", "").result[0]
        latents = sample(staged(it, native), EULER, size=size)
        wanted = sample(staged(it, apart(model, 2.0, sigma, 0.0)), EULER, size=size)
        close(latents, wanted, 1e-6)
        assert world.error(latents, sample(staged(it, model), EULER, size=size)) > 1e-2, "the pass must show"
    sparse = {"sparse": SparseOptions(sparsity=0.5, dense_steps=0, ramp=0, reuse=3, kernel="math"), "attention": "math"}
    fast, both = staged(it, native, "1/0.5-1", **sparse), []
    for batched in (True, False):  # apart, the first pass has no other condition in its forward either
        with it.guidance(batched):
            both.append(sample(fast, EULER, size=size))
    close(*both, 1e-5)
    plain = sample(staged(it, model), EULER, size=size)
    perturbed = PerturbedAttentionGuidance.execute(model, 3.0).result[0]  # of no block that Wan has
    close(sample(staged(it, perturbed), EULER, size=size), plain, 1e-4)


def guided(guider: Any, sigmas: list[float], size: tuple[int, ...] = SIZE) -> Any:
    """The latents that a guider of ComfyUI samples."""
    import comfy.samplers
    import torch

    with torch.inference_mode():
        noise, sampler = world.rows(*size, seed=9), comfy.samplers.sampler_object("euler")
        return guider.sample(noise, torch.zeros(size), sampler, torch.tensor(sigmas), disable_pbar=True, seed=0)


def guiders(model: Any) -> dict[str, Any]:
    """Guiders that call a model for three prompts, or in several batches, and give what plain guidance of 3 gives."""
    from comfy_extras.nodes_custom_sampler import CFGGuider, DualCFGGuider
    from comfy_extras.nodes_perpneg import PerpNeg, PerpNegGuider

    positive, negative = world.conditions({})
    results = {
        "plain": CFGGuider.execute(model, positive, negative, 3.0),
        "dual": DualCFGGuider.execute(model, positive, negative, negative, 3.0, 5.0, "regular"),
        "nested": DualCFGGuider.execute(model, positive, negative, negative, 3.0, 1.0, "nested"),
        "perp-neg": PerpNegGuider.execute(model, positive, positive, negative, 3.0, 0.0),
        "perp-neg, old": CFGGuider.execute(
            PerpNeg.execute(model, negative, 0.0).result[0], positive, world.conditions({})[0], 3.0
        ),
    }
    return {name: one.result[0] for name, one in results.items()}


def check_guiders(it: World) -> None:
    """With the resolution schedule and with a step cache they give what plain guidance gives with it."""
    model = world.tiny("WAN21_T2V")
    cached = it.cached(model, **every_second())
    for fast in (staged(it, model), cached):
        by_name = guiders(fast)
        wanted = guided(by_name.pop("plain"), EULER)
        for name, guider in by_name.items():
            for batched in (True, False):
                with it.guidance(batched):
                    close(guided(guider, EULER), wanted, 1e-5)
                if it.said:
                    skipped, forwards = it.counts()
                    assert skipped / forwards == 10 / 22, (name, batched, it.said[-1])
    assert it.said and world.error(wanted, guided(guiders(model)["plain"], EULER)) > 1e-3, "skipping must show"


def check_texts(it: World) -> None:
    """Prompts that change in a smaller step: as in the engine's own run, with the details of the prompt before."""
    import comfy.sample
    import comfy.samplers
    import torch

    from wan_core.sampling.conditioning import Conditioning
    from wan_core.sampling.denoise import Ready, denoise
    from wan_core.sampling.plan import Plan
    from wan_core.sampling.stages import parse_stages, with_stages
    from wan_core.sampling.steps import Step
    from wan_core.sampling.texts import WHOLE, TextRange, assign_ranges, check_texts

    model = world.tiny("WAN21_T2V")
    net = engine(model, 0)
    one, two, negative = (padded(world.rows(1, 6, 32, seed=seed)) for seed in (2, 4, 3))
    steps = tuple(
        Step(index=i, timestep=1000 * s, sigma=s, sigma_next=EULER[i + 1], expert="high" if s >= 0.875 else "low",
             guidance=3.0, branches=("cond", "uncond"))
        for i, s in enumerate(EULER[:-1])
    )  # fmt: skip
    plan = Plan(task="t2v-A14B", solver="euler", shift=8.0, boundary=0.875, steps=steps)
    plan = check_texts(
        assign_ranges(with_stages(plan, parse_stages(HALF)), [TextRange(0, 0.5), TextRange(0.5, 1)], [WHOLE])
    )
    numbers = [step.texts[0] for step in plan.steps]
    change = numbers.index(1)
    assert plan.steps[change - 1].scale == plan.steps[change].scale == 0.5, numbers
    with torch.inference_mode():
        wanted = denoise(
            plan,
            Ready(lambda _: net),
            Conditioning(cond=one, uncond=negative, later_cond=two),
            world.rows(*SIZE, seed=9),
        )
        positive = [[one, {"start_percent": 0.0, "end_percent": 0.5}], [two, {"start_percent": 0.5, "end_percent": 1}]]
        latents = comfy.sample.sample_custom(
            staged(it, model), world.rows(*SIZE, seed=9), 3.0, comfy.samplers.sampler_object("euler"),
            torch.tensor(EULER), positive, [[negative, {}]], torch.zeros(SIZE), disable_pbar=True, seed=0,
        )  # fmt: skip
    close(model.model.process_latent_in(latents), wanted, 1e-4)
