"""Run by ComfyUI's Python: tiny Wan models of its own classes with context windows, sampled by its own sampler and by
WanCore's, from the same weights and seed. Prints one JSON object on its last line.

    python native_windows.py COMFYUI_PATH
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
native_models = importlib.import_module("native_models")

SEED, STEPS = 5, 4
FIRST = 2  # steps of the high-noise expert, where there are two
SIZE = (1, 16, 9, 4, 6)  # of latents
WINDOWS = {"context_length": 17, "context_overlap": 8, "context_schedule": "standard_static", "context_stride": 1,
           "closed_loop": False, "fuse_method": "pyramid", "freenoise": False}  # fmt: skip
UNIFORM, LOOPED = {"context_schedule": "standard_uniform"}, {"context_schedule": "looped_uniform"}
BATCHED = {"context_schedule": "batched", "freenoise": True}
SPLIT = {"split_conds_to_windows": True}
CASES = {  # model, what its windows have besides
    "t2v static pyramid": ("t2v", {}),
    "t2v static relative": ("t2v", {"fuse_method": "relative"}),
    "t2v static flat, FreeNoise": ("t2v", {"fuse_method": "flat", "freenoise": True}),
    "t2v static overlap-linear": ("t2v", {"fuse_method": "overlap-linear"}),
    "t2v uniform pyramid": ("t2v", UNIFORM),
    "t2v uniform overlap-linear": ("t2v", {**UNIFORM, "fuse_method": "overlap-linear"}),
    "t2v uniform relative, heun": ("t2v", {**UNIFORM, "fuse_method": "relative", "solver": "heun"}),
    "t2v looped pyramid": ("t2v", LOOPED),
    "t2v looped relative, closed": ("t2v", {**LOOPED, "fuse_method": "relative", "closed_loop": True}),
    "t2v batched flat, FreeNoise": ("t2v", {**BATCHED, "fuse_method": "flat"}),
    "t2v static pyramid, a text each": ("t2v", SPLIT),
    "t2v uniform pyramid, a text each": ("t2v", {**UNIFORM, **SPLIT}),
    "two experts, uniform pyramid": ("experts", {**UNIFORM, "freenoise": True}),
    "t2v one window": ("t2v", {"context_length": 33, "freenoise": True}),
    "i2v static pyramid": ("i2v 2.2", {}),
    "i2v uniform pyramid, FreeNoise": ("i2v 2.2", {**UNIFORM, "freenoise": True}),
    "i2v uniform relative, retained": ("i2v 2.2", {**UNIFORM, "fuse_method": "relative", "retain_first_frame": True}),
    "i2v 2.1 static flat, retained": ("i2v", {"fuse_method": "flat", "retain_first_frame": True}),
    "5B uniform pyramid": ("5B", UNIFORM),
    "5B from an image, static relative": ("5B image", {"fuse_method": "relative"}),
}
PLANS = {  # of T2V models
    "static": {},
    "uniform": UNIFORM,
    "uniform, every other frame too": {**UNIFORM, "context_length": 9, "context_overlap": 4, "context_stride": 2},
    "looped, two experts": {**LOOPED, "two": True},
    "static, a cache": {"cache": True},
    "uniform, a cache": {**UNIFORM, "cache": True},
    "one window": {"context_length": 33},
}
TASKS = {"t2v": "t2v-14B", "experts": "t2v-A14B", "i2v": "i2v-14B-480P", "i2v 2.2": "i2v-A14B"}
TASKS |= dict.fromkeys(("5B", "5B image"), "ti2v-5B")


def engine_model(native: Any, task: Any) -> Any:
    """The engine's model with the weights of a native one."""
    from wan_core.models.wan.config import DiTConfig
    from wan_core.models.wan.families import family_of

    state = native.model.diffusion_model.state_dict()
    small = native_models.SMALL
    config = DiTConfig(
        in_channels=state["patch_embedding.weight"].shape[1],
        out_channels=task.vae.z_dim,
        **{name: small[name] for name in ("dim", "ffn_dim", "freq_dim", "text_dim", "num_heads", "num_layers")},
        text_len=6,
        image_dim=task.image_dim,
    )
    transformer = family_of(task).model_class(config)(config)
    transformer.load_state_dict(state)
    return transformer.float().eval()


def ours(natives: list[Any], kind: str, conditions: Any, latent: dict[str, Any], sigmas: Any, solver: str) -> Any:
    """Latents of WanCore's sampler, with the context windows of the MODELs as WanCore from MODEL reads them."""
    import torch

    from wan_core.execution.report import Report
    from wan_core.models.wan.families import TASKS as KNOWN
    from wan_core.pipeline.comfy_conditioning import join
    from wan_core.pipeline.denoise import sample_latents
    from wan_core.sampling.context_windows import with_windows
    from wan_core.sampling.denoise import Ready
    from wan_core.sampling.plan import make_plan
    from wan_core.sampling.start import Start

    task = KNOWN[TASKS[kind]]
    models = {name: engine_model(one, task) for name, one in zip(("high", "low"), natives, strict=False)}
    read = importlib.import_module("pack.nodes.native_model").read_windows
    (windows,) = {read(native, "the MODEL") for native in natives}
    sigma_list = [float(sigma) for sigma in sigmas]
    boundary = sum(sigma_list[FIRST - 1 : FIRST + 1]) / 2 if len(natives) == 2 else 0.0
    low = {"guidance_low": 3.0} if len(natives) == 2 else {}
    plan = make_plan(task=task.name, sigmas=sigma_list, boundary=boundary, guidance_high=3.0, solver=solver, **low)
    shape = tuple(latent["samples"].shape)
    plan = with_windows(plan, windows, shape[2]) if windows is not None else plan
    experts = SimpleNamespace(task=task, dit=models["high"].config, vae=task.vae)
    joined = join(*conditions, latent, experts, plan)
    start, cpu = Start(shape=shape, seed=SEED), torch.device("cpu")
    noise = start.sample(joined.plan, task.vae, cpu)
    return joined.plan, sample_latents(
        joined.plan, Ready(models.__getitem__), joined.conditioning, noise, task.vae, Report(cpu), start=start
    )


def compare(kind: str, changed: dict[str, Any]) -> dict[str, Any]:
    import comfy.sample
    import comfy.samplers
    import torch
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    make, extra, size = native_models.variants()["t2v" if kind == "experts" else kind.removesuffix(" image")]
    size = (1, size[1], *SIZE[2:])
    if "concat_mask" in extra:
        unknown_frames = torch.ones(1, 1, *SIZE[2:])
        unknown_frames[:, :, :1] = 0
        extra = {**extra, "concat_latent_image": native_models.rows(*size, seed=7), "concat_mask": unknown_frames}
    changed = {**WINDOWS, **changed}
    models = [make(), native_models.tiny("WAN21_T2V", seed=1)] if kind == "experts" else [make()]
    solver = changed.pop("solver", "euler")
    windowed = [WanContextWindowsManualNode.execute(model, **changed).result[0] for model in models]
    conditions = native_models.conditions(extra)
    if changed.get("split_conds_to_windows"):
        others = [[[-2 * rows, values] for rows, values in one] for one in conditions]
        conditions = [[*conditions[0], *others[0], *conditions[1]], [*conditions[1], *others[1]]]
    latent: dict[str, Any] = {"samples": torch.zeros(size)}
    if kind.endswith("image"):
        latent["noise_mask"] = torch.ones(1, 1, *size[2:])
        latent["samples"][:, :, :1] = native_models.rows(*size, seed=8)[:, :, :1]
        latent["noise_mask"][:, :, :1] = 0
    noise, mask = comfy.sample.prepare_noise(latent["samples"], SEED), latent.get("noise_mask")
    sampler = comfy.samplers.KSampler(models[0], STEPS, torch.device("cpu"), sampler=solver, scheduler="simple")
    how = {"cfg": 3.0, "sampler_name": solver, "scheduler": "simple", "seed": SEED, "noise_mask": mask}
    how |= {"positive": conditions[0], "negative": conditions[1], "disable_pbar": True}

    def theirs(natives: list[Any]) -> Any:
        first, *second = natives
        ends = {"start_step": 0, "last_step": FIRST} if second else {}
        half_way = comfy.sample.sample(first, noise.clone(), STEPS, latent_image=latent["samples"], **ends, **how)
        if not second:
            return half_way
        second_half = {"latent_image": half_way, "start_step": FIRST, "last_step": STEPS, "disable_noise": True}
        return comfy.sample.sample(*second, torch.zeros_like(noise), STEPS, **second_half, **how)

    with torch.inference_mode():
        expected, plain = theirs(windowed), theirs(models)
        plan, latents = ours(windowed, kind, conditions, latent, sampler.sigmas, solver)
    return {
        "error": native_models.error(latents, expected),
        "changes": native_models.error(plain, expected),
        "windows": sorted({len(step.windows) for step in plan.steps}),
        "moves": len({step.windows for step in plan.steps}) > 1,
    }


def planned_and_run(changed: dict[str, Any]) -> list[Any]:
    """Forwards as the plan preview says, with a latent and without, and as ComfyUI's samplers run them."""
    import comfy.sample
    import torch
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    from wan_core.config import SkipOptions, TaylorSeerOptions

    host = importlib.import_module("pack.nodes.host")
    ran = []  # of each forward whose blocks run, how many conditions it has
    changed = {**WINDOWS, **changed}
    cache, two = changed.pop("cache", False), changed.pop("two", False)
    models = [native_models.tiny("WAN21_T2V", seed) for seed in range(1 + two)]
    models = [WanContextWindowsManualNode.execute(model, **changed).result[0] for model in models]
    skipping, steps = SkipOptions(taylorseer=TaylorSeerOptions(interval=2, order=1, retention=0.2)), 4 * STEPS
    for model in models if cache else ():
        host.attach(model, host.StepCache(skipping))
    how = {"cfg": 3.0, "sampler_name": "euler", "scheduler": "simple"}
    latent = {"samples": torch.zeros(SIZE)}
    low = {"model_low": models[1], "split_step": FIRST} if two else {}
    texts = [
        native_models.planned(models[0], steps, **how, seconds_per_forward=1.0, latent=one, **low)[1].splitlines()
        for one in (latent, None)
    ]  # fmt: skip
    for model in models:
        first = model.model.diffusion_model.blocks[0].self_attn
        first.register_forward_pre_hook(lambda _, inputs: ran.append(len(inputs[0])))
    positive, negative = native_models.conditions({})
    parts = [{"start_step": 0, "last_step": FIRST}, {"start_step": FIRST, "last_step": steps}] if two else [{}]
    for model, part in zip(models, parts, strict=True):
        noise = comfy.sample.prepare_noise(latent["samples"], SEED)
        comfy.sample.sample(
            model, noise, steps, positive=positive, negative=negative, latent_image=latent["samples"], seed=SEED,
            disable_pbar=True, **how, **part,
        )  # fmt: skip
    return [*texts, sum(ran)]


def different_windows() -> int:
    """How many of many sizes, schedules and steps give other windows or weights than ComfyUI's; -1 for none tried."""
    import comfy.context_windows as theirs

    from wan_core.config import FUSE_METHODS, WINDOW_SCHEDULES, WindowOptions
    from wan_core.sampling.context_windows import window_weights, windows_of

    wrong, tried = 0, 0
    for schedule in WINDOW_SCHEDULES:
        for frames, length, overlap, step, closed in sizes(schedule):
            options = WindowOptions(length=length, overlap=overlap, schedule=schedule, closed_loop=closed)
            handler = SimpleNamespace(context_length=length, context_overlap=overlap, context_stride=1,
                                      closed_loop=closed, _step=step)  # fmt: skip
            expected = theirs.CONTEXT_MAPPING[schedule](frames, handler, {})
            actual = windows_of(options, frames, step)
            wrong += [list(window) for window in actual] != expected
            tried += 1
            for fuse in FUSE_METHODS[::3] if schedule == "standard_uniform" and overlap else ():
                weighted = WindowOptions(length=length, overlap=overlap, fuse=fuse)
                for window in actual:
                    raw = theirs.FUSE_MAPPING[fuse](length, full_length=frames, idxs=list(window), handler=handler,
                                                    context_overlap=overlap)  # fmt: skip
                    ours = window_weights(window, weighted, frames)
                    wrong += max(abs(one - float(other)) for one, other in zip(ours, raw, strict=True)) > 1e-6
    return wrong if tried else -1


def sizes(schedule: str) -> Any:
    for frames in range(2, 24):
        for length in range(1, frames):
            for overlap in range(0, length, 2):
                for step in range(0, 9, 1 if schedule.endswith("uniform") else 8):
                    yield frames, length, overlap, step, schedule == "looped_uniform" and bool(step % 2)


def main(checkout: str) -> None:
    native_models.set_up(checkout)
    importlib.import_module("pack.nodes.native_model")
    runs: dict[str, Any] = {name: compare(*case) for name, case in CASES.items()}
    plans = {name: planned_and_run(changed) for name, changed in PLANS.items()}
    print(json.dumps({"runs": runs, "plans": plans, "different": different_windows()}))


if __name__ == "__main__":
    main(sys.argv[1])
