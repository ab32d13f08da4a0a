"""Run by ComfyUI's Python: step caching on tiny Wan models of ComfyUI's own classes, sampled by its own samplers.
`native_checks` runs its checks.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

import native_models as world
from native_cache_runs import (
    EULER,
    SIZE,
    World,
    close,
    engine,
    every_second,
    native_conditions,
    never,
    ours,
    policies,
    sample,
)


def check_never(it: World) -> None:
    """A cache that never skips: bit for bit, both ways of guidance."""
    model = world.tiny("WAN21_T2V")
    for batched in (True, False):
        with it.guidance(batched):
            plain = sample(model, EULER)
            for policy in never():
                assert (sample(it.cached(model, **policy), EULER) == plain).all(), (batched, policy)


def check_one_model(it: World) -> None:
    """Every policy equals the engine's own run with the same weights: sigmas of both experts' ranges, one model."""
    world.conditions = native_conditions
    model = world.tiny("WAN21_T2V")
    net = engine(model, 0)
    full = sample(model, EULER)
    ran: list[int] = []
    model.model.diffusion_model.blocks[1].register_forward_pre_hook(lambda _, args: ran.append(len(args[0])))
    for name, policy in policies().items():
        expected, skipped = ours({"high": net, "low": net}, EULER, 0.875, policy)
        for batched in (True, False):
            ran.clear()
            with it.guidance(batched):
                latents = model.model.process_latent_in(sample(it.cached(model, **policy), EULER))
            close(latents, expected)
            assert it.counts() == skipped and 4 <= skipped[0] <= 12, (name, batched, it.said[-1], skipped)
            assert sum(ran) == skipped[1] - skipped[0], "blocks run as often as is reported"
        assert world.error(latents, model.model.process_latent_in(full)) > 1e-3, "skipping must show"


def check_two_experts(it: World) -> None:
    """Two samplers with an expert each: parts of 6 and 5 steps of a run of 11, as the engine's run of both."""
    world.conditions = native_conditions
    models = [world.tiny("WAN21_T2V", seed) for seed in (0, 1)]
    nets = dict(zip(("high", "low"), (engine(model, 0) for model in models), strict=True))

    for name, policy in policies().items():
        expected, skipped = ours(nets, EULER, 0.79, policy)
        fast = [it.cached(model, 11, **policy) for model in models]
        half = sample(fast[0], EULER[:7])
        first = it.counts()
        latents = models[0].model.process_latent_in(sample(fast[1], EULER[6:], latent=half))
        close(latents, expected)
        assert tuple(a + b for a, b in zip(first, it.counts(), strict=True)) == skipped, (name, it.said)
    short = it.cached(models[0], 9, **policy)
    sample(short, EULER[:7])
    assert "fewer than 10" in it.said[-1], it.said[-1]


def check_variants(it: World) -> None:
    """Without skips bit for bit; every second step skipped: what the velocity of the step before gives."""
    import torch

    variants = world.variants()
    fixed = world.rows(3, 512, seed=8)
    for name in ("i2v", "5B", "fun", "vace", "camera", "animate", "animate2", "s2v", "humo", "scail", "wandancer"):
        make, extra, size = variants[name]
        model = make()
        if name == "animate":  # its motion encoder takes seconds
            model.model.diffusion_model.motion_encoder.get_motion = lambda image: image.mean((2, 3)) @ fixed
            extra = {**extra, "face_video_pixels": world.rows(1, 3, 4, 8, 8)}
        sigmas = [1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.2, 0.0]
        plain = sample(model, sigmas, extra, size=size)
        assert (sample(it.cached(model, **never()[0]), sigmas, extra, size=size) == plain).all(), name
        seen: list[Any] = []
        fast = it.cached(model, **every_second())
        latents = sample(fast, sigmas, extra, size=size, callback=lambda i, x0, x, n, seen=seen: seen.append((x0, x)))
        skipped, forwards = it.counts()
        assert latents.isfinite().all() and (latents != plain).any() and 0 < skipped <= forwards // 2, (
            name,
            it.said[-1],
        )
        level = "blocks" if name in ("i2v", "5B", "fun", "camera", "humo", "scail") else "output"
        assert f"{level} kept" in it.said[-1], (name, it.said[-1])
        if level == "output":  # x0 = x - sigma * velocity: the velocity of step 0 is that of step 1
            velocities = [(x - x0) / sigma for (x0, x), sigma in zip(seen, sigmas, strict=False)]
            torch.testing.assert_close(velocities[1], velocities[0], rtol=1e-4, atol=1e-4)
            assert (velocities[2] - velocities[1]).abs().max() > 1e-3, name


def check_windows(it: World) -> None:
    """Context windows have residuals of their own; windows that move are computed in every step."""
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    size = (1, 16, 9, 4, 6)
    windows = {"context_length": 17, "context_overlap": 9, "context_stride": 1, "closed_loop": False,
               "fuse_method": "pyramid", "freenoise": False}  # fmt: skip

    def windowed(schedule: str) -> Any:
        model = world.tiny("WAN21_T2V")
        return WanContextWindowsManualNode.execute(model, context_schedule=schedule, **windows).result[0]

    model = windowed("standard_static")
    plain = sample(model, EULER, size=size)
    assert (sample(it.cached(model, **never()[0]), EULER, size=size) == plain).all()
    states: list[int] = []
    with it.runs() as runs:
        fast = it.cached(model, **policies()["taylorseer"])
        latents = sample(fast, EULER, size=size, callback=lambda *_: states.append(len(runs[-1].states)))
    assert states[-1] == 2 * 3, states  # two prompts, three windows
    assert it.counts() == (30, 66), it.said[-1]
    assert world.error(latents, plain) < 0.5 and (latents != plain).any()
    moving = windowed("standard_uniform")
    assert (sample(it.cached(moving, **every_second()), EULER, size=size) == sample(moving, EULER, size=size)).all()
    assert "move from step to step" in it.said[-1], it.said[-1]


def check_faults(it: World) -> None:
    """Interrupted, or out of memory in a block: nothing is left, and the next run is that of a fresh model."""
    import comfy.model_management
    import torch

    policy = policies()["taylorseer"]
    fresh = sample(it.cached(world.tiny("WAN21_T2V"), **policy), EULER)
    model = it.cached(world.tiny("WAN21_T2V"), **policy)
    for fault in (comfy.model_management.InterruptProcessingException(), torch.cuda.OutOfMemoryError("says the test")):
        calls: list[int] = []

        def stop(*_: Any, fault: BaseException = fault, calls: list[int] = calls) -> None:
            calls.append(1)
            if len(calls) == 5:
                raise fault

        handle = model.model.diffusion_model.blocks[1].register_forward_pre_hook(stop)
        try:
            sample(model, EULER)
            raise AssertionError("nothing was raised")
        except (comfy.model_management.InterruptProcessingException, torch.cuda.OutOfMemoryError) as seen:
            seen.__traceback__ = None
        finally:
            handle.remove()
        gc.collect()
        alive = [thing for thing in gc.get_objects() if isinstance(thing, it.cache.CachedRun)]
        residuals = [thing for thing in gc.get_objects() if isinstance(thing, it.cache.Residuals)]
        assert not alive and not residuals, (alive, residuals)
        assert "patches_replace" not in model.model_options["transformer_options"]
        assert "wrappers" not in model.model_options["transformer_options"]
        other = sample(model, EULER, size=(1, 16, 2, 6, 4))
        assert (other == sample(it.cached(world.tiny("WAN21_T2V"), **policy), EULER, size=(1, 16, 2, 6, 4))).all()
        assert (sample(model, EULER) == fresh).all() and "freed" in it.said[-1]


def check_samplers(it: World) -> None:
    """Samplers that evaluate twice in a step skip both; what they evaluate between two sigmas is not kept."""
    model = world.tiny("WAN21_T2V")
    expected = {
        "heun": (20, 42),
        "dpm_2": (20, 42),
        "uni_pc": (10, 22),
        "dpmpp_2m": (10, 22),
        "res_multistep": (10, 22),
    }
    keep, sigmas = it.cache.keep_blocks, []
    it.cache.keep_blocks = lambda *arguments: sigmas.append(float(arguments[2]["sigmas"][0])) or keep(*arguments)
    for sampler in expected:
        plain = sample(model, EULER, sampler=sampler)
        assert (sample(it.cached(model, **never()[0]), EULER, sampler=sampler) == plain).all(), sampler
        fast = sample(it.cached(model, **every_second()), EULER, sampler=sampler)
        assert fast.isfinite().all() and world.error(fast, plain) < 0.6, (sampler, world.error(fast, plain))
        assert it.counts() == expected[sampler], (sampler, it.said[-1])
    it.cache.keep_blocks = keep
    assert all(min(abs(sigma - scheduled) for scheduled in EULER) < 1e-5 for sigma in sigmas) and len(sigmas) > 25


def check_conditions(it: World) -> None:
    """Prompts that change in a run, skip-layer guidance, a second cache, and what is refused."""
    import comfy.sample
    import comfy.samplers
    import torch
    from comfy_extras.nodes_easycache import EasyCacheNode
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    from wan_core.config import OptionError

    model = world.tiny("WAN21_T2V")
    fast = it.cached(model, **every_second())
    slg = SkipLayerGuidanceDiT.execute(model, 2.0, 0.0, 1.0, "1", "")
    guided = slg.result[0]
    plain = sample(guided, EULER)
    assert (plain != sample(model, EULER)).any()
    assert (sample(it.cached(guided, **never()[0]), EULER) == plain).all()
    with it.runs() as runs:
        states: list[int] = []
        count = lambda *_: states.append(len(runs[-1].states))  # noqa: E731
        assert world.error(sample(it.cached(guided, **every_second()), EULER, callback=count), plain) < 0.6
    assert states[-1] == 3, "the prompt without the layer has residuals of its own"
    # the first of them begins in a step that is skipped, and is computed there
    late = [[world.rows(1, 6, 32, seed=4), {"start_percent": 0.637}], [world.rows(1, 6, 32, seed=2), {}]]
    with torch.inference_mode():
        latents = comfy.sample.sample_custom(
            fast, world.rows(*SIZE, seed=9), 1.0, comfy.samplers.sampler_object("euler"), torch.tensor(EULER),
            late, late, torch.zeros(SIZE), disable_pbar=True, seed=0,
        )  # fmt: skip
    assert latents.isfinite().all() and 0 < it.counts()[0] < it.counts()[1] / 2, it.said[-1]
    both = EasyCacheNode.execute(fast, 0.2, 0.15, 0.95, False).result[0]
    refused = []
    lcm = lambda: sample(fast, EULER, sampler="lcm")  # noqa: E731
    for run in (lcm, lambda: sample(both, EULER)):
        with suppress(OptionError):
            run()
            refused.append("not refused")
    assert not refused


def check_memory(it: World) -> None:
    """ComfyUI is asked for memory for the residuals and the slopes of sparse attention too."""
    import comfy.sampler_helpers

    from wan_core.config import SkipOptions, SparseOptions

    asked = []
    real = comfy.sampler_helpers.estimate_memory
    comfy.sampler_helpers.estimate_memory = lambda model, shape, conds: asked.append(shape) or real(model, shape, conds)
    model = world.tiny("WAN21_T2V")
    sample(model, EULER)
    sample(it.cached(model, **policies()["taylorseer"]), EULER)
    both = SkipOptions(sparse=SparseOptions(sparsity=0.5), **policies()["taylorseer"])
    sample(it.accelerate(model, "auto", both, it.said.append), EULER)
    comfy.sampler_helpers.estimate_memory = real
    needed = [model.model.memory_required([2 * shape[0], *shape[1:]]) for shape in asked]
    residuals = 2 * 2 * 18 * 48 * 4  # slots, prompts, tokens, channels, bytes
    assert needed[1] - needed[0] >= residuals, (asked, needed)
    assert needed[2] - needed[1] >= 24 / 128 * 18 * 48 * 4, (asked, needed)  # a matrix for each block of 128 tokens


def pose_cache(newer: bool) -> Any:
    """ComfyUI's cache of the pose branch; newer: with `select` as of the versions after 0.33, whatever this one is."""
    from comfy.ldm.wan.model_animate2 import PoseBranchCache

    class Newer(PoseBranchCache):
        def select(self, k: Any, create: bool = True) -> bool:
            there = any(slot["key"].shape == k.shape and (slot["key"] == k).all() for slot in self.slots)
            self.slot = None
            if there or create:
                super().select(k)
            return there

    return Newer() if newer else PoseBranchCache()


def check_pose_cache(it: World) -> None:
    """Animate-2 with ComfyUI's own cache of its pose branch, and with a pose for a part of the run: the step cache that
    never skips and Accelerate change nothing, and the pose branch runs once, also where steps are skipped."""
    make, extra, size = world.variants()["animate2"]
    pose = {"pose_video_latent": extra["pose_video_latent"], "clip_vision_output_pose": extra["clip_vision_output"]}
    pose |= {"cross_attn_pose": world.rows(1, 512, 32, seed=4)}
    without = {name: value for name, value in extra.items() if name not in pose}
    whole, parted = world.conditions, [(pose, 0.2, 0.7), ({}, 0.0, 0.2), ({}, 0.7, 1.0)]

    def conditions(inputs: dict[str, Any]) -> Any:
        both = whole(inputs)
        parts = [({**more, "start_percent": start, "end_percent": end}) for more, start, end in parted]
        return [[[one[0][0], {**one[0][1], **part}] for part in parts] for one in both]

    runs: list[int] = []
    for part in (False, True):
        for newer in (False, True):
            world.conditions, inputs = (conditions, without) if part else (whole, {**extra, **pose})
            model = make()
            cache = model.model_options["transformer_options"]["animate2_cache"] = pose_cache(newer)
            block = model.model.diffusion_model.blocks[0]
            block.forward_pose = lambda *args, run=block.forward_pose, **named: (runs.append(1), run(*args, **named))[1]
            first = sample(model, EULER, inputs, size=size)  # its first step has keys and values before they were kept
            close(first, plain := sample(model, EULER, inputs, size=size))
            assert sum(runs) == 1 and cache.filled(len(model.model.diffusion_model.blocks)), (part, newer, sum(runs))
            assert (sample(it.cached(model, **never()[0]), EULER, inputs, size=size) == plain).all(), (part, newer)
            close(sample(world.Accelerated(it.pack)(model), EULER, inputs, size=size), plain)
            latents = sample(it.cached(model, **every_second()), EULER, inputs, size=size)
            skipped, forwards = it.counts()
            assert latents.isfinite().all() and (latents != plain).any() and 2 <= skipped <= forwards // 2, it.said[-1]
            assert sum(runs) == 1, "what the cache holds is read in every run"
            runs.clear()
    world.conditions = whole
