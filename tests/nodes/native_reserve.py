"""Run by ComfyUI's Python: the memory for which a step cache asks ComfyUI, and the bytes that it then keeps, on tiny
Wan models of ComfyUI's own classes. `native_checks` runs its checks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import native_models as world
from native_cache_runs import EULER, World

OFF = {"windows, uniform", "windows, looped"}  # windows that move: nothing is kept
# Conditions that run in a part of the steps or windows alone: all count.
TURNS = ("simple skip-layer guidance", "two prompts, one after the other", "two prompts shared out among windows")
FRAMES, LONG = 7, 33  # latent frames of 25 and of 129
BLOCK = "1"  # that skip-layer guidance leaves out
WINDOWS = {"context_length": 5, "context_overlap": 2, "context_schedule": "standard_static", "context_stride": 1,
           "closed_loop": False, "fuse_method": "pyramid", "dim": 2, "freenoise": False}  # fmt: skip
FAMILIES = (
    "t2v", "i2v", "i2v 2.2", "5B", "fun", "context", "vace", "camera", "animate", "animate2", "s2v", "humo", "scail",
    "wandancer",
)  # fmt: skip
Case = dict[str, Any]


def windows(**changed: Any) -> Case:
    return {"windows": {**WINDOWS, **changed}}


def slg(node: str = "SkipLayerGuidanceDiT", **changed: Any) -> Case:
    scale = {"scale": 2.0} if node == "SkipLayerGuidanceDiT" else {}
    return {"slg": (node, {**scale, "start_percent": 0.0, "end_percent": 1.0, "double_layers": BLOCK, **changed})}


def cases() -> dict[str, Case]:
    """Name -> what differs from text-to-video of 7 latent frames, guided, whose skipped steps are forecast from two."""
    simple = "SkipLayerGuidanceDiTSimple"
    dual = {"guider": ("DualCFGGuider", 3.0, 2.0, "regular")}
    all_cases: dict[str, Case] = {name: {"model": name} for name in FAMILIES}
    all_cases |= {
        f"{name}, windows": {"model": name, **windows()} for name in FAMILIES if name != "humo"
    }  # slow to make
    return all_cases | {
        "windows of 129 frames": {"frames": LONG, **windows()},
        "windows without a lead": windows(causal_window_fix=False),
        "windows, batched": windows(context_schedule="batched"),
        "windows of 129 frames, batched": {"frames": LONG, **windows(context_schedule="batched")},
        "windows, uniform": windows(context_schedule="standard_uniform"),
        "windows, looped": windows(context_schedule="looped_uniform", closed_loop=True),
        "windows of rows": {"area": (12, 6), **windows(dim=3, context_length=8, context_overlap=4)},
        "one window": windows(context_length=FRAMES),
        "skip-layer guidance": slg(),
        "skip-layer guidance, windows": {**slg(), **windows()},
        "skip-layer guidance, VACE": {**slg(), "model": "vace"},
        "simple skip-layer guidance": slg(simple),
        "simple skip-layer guidance in the first half": slg(simple, end_percent=0.5),
        "simple skip-layer guidance, windows": {**slg(simple), **windows()},
        "batch of 2": {"batch": 2},
        "batch of 2, VACE": {"batch": 2, "model": "vace"},
        "batch of 2, Fun": {"batch": 2, "model": "fun"},
        "no guidance": {"cfg": 1.0},
        "no guidance, the negative prompt all the same": {"cfg": 1.0, "both": True},
        "one prompt at a time": {"batched": False},
        "two prompts": {"prompts": [{}, {}]},
        "two prompts, one after the other": {"prompts": [{"end_percent": 0.5}, {"start_percent": 0.5}]},
        "two prompts shared out among windows": {"prompts": [{}, {}], **windows(split_conds_to_windows=True)},
        "dual guidance": dual,
        "dual guidance, nested": {"guider": ("DualCFGGuider", 3.0, 2.0, "nested")},
        "dual guidance of two prompts": {"guider": ("DualCFGGuider", 3.0, 1.0, "regular")},
        "dual guidance, windows": {**dual, **windows()},
        "dual guidance, skip-layer guidance": {**dual, **slg()},
        "perpendicular guidance": {"guider": ("PerpNegGuider", 3.0, 1.0)},
        "a guider of one prompt": {"guider": ("BasicGuider",)},
        "two experts' ranges": {"model": "i2v 2.2"},
        "the first steps of a longer run": {"sigmas": EULER[:7], "steps": len(EULER) - 1},
        "bfloat16, windows": {"dtype": "bfloat16", **windows()},
        "bfloat16, VACE": {"dtype": "bfloat16", "model": "vace"},
        "heun": {"sampler": "heun"},
    }


def model_of(case: Case) -> tuple[Any, dict[str, Any], tuple[int, ...]]:
    """The model of a case with what other nodes put on it, its conditions beside the text, and its latents' size."""
    import comfy_extras.nodes_context_windows
    import comfy_extras.nodes_slg

    name, frames = case.get("model", "t2v"), case.get("frames", FRAMES)
    area = case.get("area", (8, 12) if name == "s2v" else (4, 6))  # motion has blocks of 8 rows and columns
    world.SIZE, world.DTYPE = (1, 16, frames, *area), case.get("dtype", "float32")
    make, extra, size = world.variants()[name]
    model = make()
    if "windows" in case:
        node = comfy_extras.nodes_context_windows.ContextWindowsManualNode
        model = node.execute(model, **case["windows"]).result[0]
    if "slg" in case:
        node, settings = case["slg"]
        model = getattr(comfy_extras.nodes_slg, node).execute(model, **settings).result[0]
    if case.get("both"):
        model = model.clone()
        model.disable_model_cfg1_optimization()
    return model, extra, (case.get("batch", 1), *size[1:])


def guider_of(model: Any, extra: dict[str, Any], case: Case) -> Any:
    import comfy_extras.nodes_custom_sampler as custom
    import comfy_extras.nodes_perpneg as perpneg

    positive, negative, third = ([[world.rows(1, 6, 32, seed=seed), dict(extra)]] for seed in (2, 3, 4))
    for n, settings in enumerate(case.get("prompts", ())):
        positive += [[world.rows(1, 6, 32, seed=5 + n), {**extra, **settings}]]
    positive = positive[1:] if "prompts" in case else positive
    kind, *settings = case.get("guider", ("CFGGuider", case.get("cfg", 3.0)))
    prompts = {"BasicGuider": [positive], "CFGGuider": [positive, negative]}.get(kind, [positive, third, negative])
    node = getattr(custom, kind, None) or getattr(perpneg, kind)
    return node.execute(model, *prompts, *settings).result[0]


@contextmanager
def recorded(cache: Any) -> Iterator[tuple[list[Any], list[int]]]:
    """The shapes for which ComfyUI estimates memory inside, and the bytes of all residuals after each that is kept."""
    import comfy.sampler_helpers as helpers

    shapes: list[Any] = []
    buffer_bytes: list[int] = [0]
    states: weakref.WeakSet[Any] = weakref.WeakSet()
    estimate, residuals = helpers.estimate_memory, cache.Residuals

    class Counted(residuals):
        def slot(self, step: int, like: Any) -> Any:
            states.add(self)
            slot = super().slot(step, like)
            buffer_bytes.append(
                sum(0 if one.buffer is None else one.buffer.untyped_storage().nbytes() for one in states)
            )
            return slot

    helpers.estimate_memory = lambda model, shape, conds: shapes.append(list(shape)) or estimate(model, shape, conds)
    cache.Residuals = Counted
    try:
        yield shapes, buffer_bytes
    finally:
        helpers.estimate_memory, cache.Residuals = estimate, residuals


def measure(it: World, case: Case) -> list[int]:
    """[Bytes that ComfyUI is asked for beyond a run without a cache, bytes that are kept at most.]"""
    import comfy.samplers
    import torch

    from wan_core.config import TaylorSeerOptions

    model, extra, size = model_of(case)
    policy: dict[str, Any] = {"taylorseer": TaylorSeerOptions(interval=2, retention=0.1)}
    models = [model, it.cached(model, case.get("steps", 0), **policy)]
    sampler = comfy.samplers.sampler_object(case.get("sampler", "euler"))
    noise, sigmas = world.rows(*size, seed=9), torch.tensor(case.get("sigmas", EULER))
    with recorded(it.cache) as (shapes, buffer_bytes), it.guidance(case.get("batched", True)), torch.inference_mode():
        for one, steps in zip(models, (sigmas[:2], sigmas), strict=True):  # the first for its estimate alone
            guider_of(one, extra, case).sample(noise, torch.zeros(size), sampler, steps, disable_pbar=True, seed=0)
    plain, asked = (model.model.memory_required([2 * shape[0], *shape[1:]]) for shape in shapes)
    return [round(asked - plain), max(buffer_bytes)]


def check_what_is_kept_was_asked_for(it: World) -> None:
    for name, case in cases().items():
        asked, kept_bytes = measure(it, case)
        assert (kept_bytes == 0) == (name in OFF), (name, kept_bytes)
        most = 2.1 if name.startswith(TURNS) else 1.1
        assert 0.95 * kept_bytes <= asked <= most * kept_bytes, (name, asked, kept_bytes)
