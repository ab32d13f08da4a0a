"""Run by ComfyUI's Python: runs of its samplers that are no plain guided ones, on tiny Wan models of its own classes.
`native_checks` runs its checks.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import native_models as world
from native_cache_runs import EULER, SIZE, World, close, every_second, policies, sample

SMALL = (1, 16, 2, 4, 4)  # of latents


def dual(model: Any, scale: float, second: float, style: str = "regular", sigmas: Any = EULER) -> Any:
    """DualCFGGuider's run with three prompts."""
    import comfy.samplers
    import torch
    from comfy_extras.nodes_custom_sampler import DualCFGGuider

    prompts = [[[world.rows(1, 6, 32, seed=seed), {}]] for seed in (4, 2, 3)]
    guider = DualCFGGuider.execute(model, *prompts, scale, second, style).result[0]
    noise = world.rows(*SIZE, seed=9)
    with torch.inference_mode():
        return guider.sample(
            noise, torch.zeros(SIZE), comfy.samplers.sampler_object("euler"), torch.tensor(sigmas),
            disable_pbar=True, seed=0,
        )  # fmt: skip


def check_dual_guidance(it: World) -> None:
    """Every one of three conditionings is skipped, batched or not; of two that count, the result is CFG's."""
    model = world.tiny("WAN21_T2V")
    for name, policy in policies().items():
        fast, latents = it.cached(model, **policy), []
        plain = sample(fast, EULER)
        skipped, forwards = it.counts()
        for batched in (True, False):
            with it.guidance(batched):
                close(dual(fast, 0.0, 3.0), plain)  # the first prompt's scale is 0
                assert it.counts() == (skipped * 3 // 2, forwards * 3 // 2), (name, batched, it.said[-1])
                for style in ("regular", "nested"):
                    latents.append(dual(fast, 3.0, 2.0, style))
                    assert it.counts()[0] % 3 == 0 and it.counts()[0] >= 6, (name, batched, it.said[-1])
        close(latents[2], latents[0])
        close(latents[3], latents[1])
        assert (latents[0] != dual(model, 3.0, 2.0)).any() and (latents[0] != latents[1]).any(), name
    alone = dual(fast, 1.0, 1.0)
    assert it.counts()[1] == len(EULER) - 1 and alone.isfinite().all(), "scales of 1 leave one prompt"


def check_rising(it: World) -> None:
    """Inversion, a step that stands still and parts without a step run as they do without the node, whatever is given
    of the whole run; with a cache nothing is skipped, and the report says so."""
    import torch

    from wan_core.config import SkipOptions, SparseOptions

    def same(actual: Any, expected: Any) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, equal_nan=True)  # ComfyUI's of [1.0] is NaN

    model = world.tiny("WAN21_T2V")
    flipped = [0.0001, *EULER[-2::-1]]
    still = [*EULER[:4], EULER[3], *EULER[4:]]
    for sigmas in (flipped, still, [1.0], [0.0]):
        plain = sample(model, sigmas)
        for whole in (0, 12):
            for sparse in (None, SparseOptions(sparsity=1e-6, ramp=0)):
                fast = it.accelerate(model, "comfyui", SkipOptions(sparse=sparse), it.said.append, whole)
                same(sample(fast, sigmas), plain)
            same(sample(it.cached(fast, whole, **every_second()), sigmas), plain)
            said = next(line for line in reversed(it.said) if "step cache" in line)
            assert "every step is computed" in said, said
            assert ("sigmas do not fall" if sigmas[1:] else "the sampler has no step") in said, said


def check_prompts_that_no_sampler_of_comfyui_reads(it: World) -> None:
    """They are refused, and not sampled as if they were plain ones; one prompt for the whole video is one."""
    from wan_core.config import NagOptions, OptionError, SkipOptions
    from wan_core.models.wan.families import NAG, PROMPTS

    fast = it.accelerate(world.tiny("WAN21_T2V"), "comfyui", SkipOptions(), it.said.append)
    plain = world.sample(fast, {}, SIZE)
    whole = {PROMPTS: {"starts": [0], "tokens": [3, 6]}}
    close(world.sample(fast, {**whole, NAG: None}, SIZE), plain)
    for extra in ({NAG: NagOptions()}, {PROMPTS: {"starts": [0, 4], "tokens": [3, 4, 6]}}):
        said = ""
        try:
            world.sample(fast, extra, SIZE)
        except OptionError as fault:
            said = str(fault)
        assert "use WanCore from MODEL and WanCore Sampler" in said, extra


def check_counts(it: World) -> None:
    """The plan preview counts the forwards that run, of samplers that evaluate once a step, at cfg 3 and 1, with a
    cache and without. NAG runs the negative prompt at cfg 1 too."""
    from comfy_extras.nodes_nag import NAGuidance

    model, ran = world.tiny("WAN21_T2V", num_layers=1), []
    model.model.diffusion_model.blocks[0].self_attn.register_forward_pre_hook(lambda _, args: ran.append(len(args[0])))
    cached, nag = it.cached(model, **every_second()), NAGuidance.execute(model, 5.0, 0.5, 1.5).result[0]
    cases = [(name, cached, 1.0) for name in ("euler", "dpmpp_2m", "res_multistep", "uni_pc")]
    cases += [("euler", model, 3.0), ("lcm", model, 1.0), ("euler", nag, 1.0)]
    for name, one, cfg in cases:
        table = world.planned(one, 10, cfg, name, "simple", 1.0)[1]
        ran.clear()
        world.sample(one, {}, SMALL, 10, cfg=cfg, sampler_name=name)
        planned = int(re.search(r"(\d+)( of \d+)? forwards", table)[1])
        assert planned == sum(ran), (name, cfg, planned, sum(ran), table)
        assert f"{name} is counted as one evaluation of the model a step" in table
    assert "24 forwards" in world.planned(nag, 12, 1.0, "euler", "simple", 1.0)[1]


def check_slopes(it: World) -> None:
    """The memory of sparse attention's slopes is that of a context window, whichever node comes first."""
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode
    from native_reserve import recorded

    from wan_core.config import SkipOptions, SparseOptions

    windows = {"context_length": 17, "context_overlap": 9, "context_schedule": "standard_uniform", "context_stride": 1,
               "closed_loop": False, "fuse_method": "pyramid", "freenoise": False}  # fmt: skip
    model = world.tiny("WAN21_T2V")

    def windowed(one: Any) -> Any:
        return WanContextWindowsManualNode.execute(one, **windows).result[0]

    def sparse(one: Any) -> Any:
        return it.accelerate(one, "auto", SkipOptions(sparse=SparseOptions(sparsity=0.5)), it.said.append)

    with recorded(it.cache) as (shapes, _):
        for one in (windowed(model), sparse(windowed(model)), windowed(sparse(model))):
            sample(one, EULER[:2], size=(1, 16, 9, 4, 6))
    plain, before, after = (model.model.memory_required([2 * shape[0], *shape[1:]]) for shape in shapes)
    assert before == after > plain, (plain, before, after)


def check_no_curve(it: World) -> None:
    """A word of speed runs on a model without a curve; MagCache is refused."""
    from wan_core.config import MagCacheOptions, SkipOptions, TaylorSeerOptions

    accelerate = importlib.import_module("pack.nodes.accelerate").WanCoreAccelerate
    model = world.variants()["vace"][0]()
    extra = world.variants()["vace"][1]
    extra = {
        **extra,
        "vace_frames": [world.rows(1, 32, *SMALL[2:])] * 2,
        "vace_mask": [world.rows(1, 64, *SMALL[2:])] * 2,
    }
    sigmas = [1 - step / 20 for step in range(21)]
    for word, numbers in (("balanced", (2, 0.7)), ("fast", (2, 0.4))):
        result = accelerate.execute(model, word, "comfyui", "off")
        assert f"left out: speed {word}" in result.ui.as_dict()["text"][0], result.ui.as_dict()
        table = world.planned(result.result[0], 20, 3.0, "euler", "simple", 1.0)[1]
        assert f"speed {word}: taylorseer {numbers[0]}/{numbers[1]}" in table and "forecast" in table, table
        latents = sample(result.result[0], sigmas, extra, size=SMALL)
        options = TaylorSeerOptions(interval=numbers[0], retention=numbers[1])
        assert (latents == sample(it.cached(model, taylorseer=options), sigmas, extra, size=SMALL)).all(), word
    own = SkipOptions(magcache=MagCacheOptions(threshold=0.1, max_skips=2, retention=0.2))
    assert "take taylorseer" in world.refusal(lambda: accelerate.execute(model, "exact", "comfyui", "off", own))
