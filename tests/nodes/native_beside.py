"""Run by ComfyUI's Python: WanCore Accelerate beside other nodes on one MODEL, tiny and random (`native_checks`)."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any

import native_models as world
from native_beside_stubs import MemoryPlan, SparseNode, boxed
from native_cache_runs import EULER, every_second, policies, sample

STEPS = len(EULER) - 1
OVERRIDE = "optimized_attention_override"
SAME = 1e-5


class World:
    """The node itself, and what its models report."""

    def __init__(self, pack: types.ModuleType) -> None:
        self.node = importlib.import_module("pack.nodes.accelerate").WanCoreAccelerate
        host = importlib.import_module("pack.nodes.host")
        self.said: list[str] = []
        self.text = ""
        host.reporter = lambda: self.said.append

    def __call__(self, model: Any, attention: str = "auto", **skipping: Any) -> Any:
        """The model behind the node. skipping: options of a step cache or of sparse attention."""
        from wan_core.config import SkipOptions

        options = SkipOptions(**skipping) if skipping else None
        done = self.node.execute(model, "exact", attention, "off", options)
        self.text = done.ui.value
        return done.result[0]

    def counts(self) -> tuple[int, int]:
        """Skipped and all forwards of the last run."""
        fields = self.said[-1].split("): ", 1)[1].split()
        return int(fields[0]), int(fields[2])


def half(**changed: Any) -> dict[str, Any]:
    from wan_core.config import SparseOptions

    return {"sparse": SparseOptions(**{"sparsity": 0.5, "ramp": 0, **changed})}


def with_override(model: Any, override: Any) -> Any:
    clone = model.clone()
    clone.model_options["transformer_options"][OVERRIDE] = override
    return clone


def check_override_before(it: World) -> None:
    """What another pack's override changes stays, in exact mode and with sparse attention; the report says who
    computed."""
    from comfy.ldm.modules.attention import attention_sub_quad

    def warmer(func: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        return func(q * 1.5, k, v, *args, **kwargs)

    def own(func: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        return attention_sub_quad(q * 1.5, k, v, *args, **kwargs)

    model = world.tiny("WAN21_T2V")
    plain = sample(model, EULER)
    for override in (warmer, own):
        other = with_override(model, override)
        expected = sample(other, EULER)
        assert world.error(expected, plain) > 1e-3
        error = world.error(sample(it(other), EULER), expected)
        assert error <= SAME, (override.__name__, error, it.said[-1])
        assert f"{override.__qualname__}), set before: gets every call first" in it.text, it.text
        by = "sdpa" if override is warmer else f"an attention override ({__name__}.{own.__qualname__}), which was set"
        assert f"self-attention calls: {3 * STEPS} by {by}" in it.said[-1].replace("66", "33"), it.said[-1]
    sparse = sample(it(with_override(model, warmer), **half(sparsity=1e-6)), EULER)
    assert world.error(sparse, sample(with_override(model, warmer), EULER)) <= SAME
    assert "by sparse attention (math)" in it.said[-1], it.said[-1]


def check_override_behind(it: World) -> None:
    """A node behind that passes calls on gets them first, one that computes itself is named as the one to move."""

    def passes_on(model: Any) -> Any:
        earlier = model.model_options["transformer_options"][OVERRIDE]
        return with_override(model, lambda func, *args, **kwargs: earlier(func, *args, **kwargs))

    model = world.tiny("WAN21_T2V")
    plain = sample(model, EULER)
    assert world.error(sample(passes_on(it(model)), EULER), plain) <= SAME
    assert "by sdpa" in it.said[-1] and it.said[-1].endswith("was set later and gets every call first"), it.said[-1]


def check_sparse_node(it: World) -> None:
    """Model Sparse Attention, in either order: it computes what it takes, WanCore the rest. Not with WanCore's own."""
    model = world.tiny("WAN21_T2V")
    plain = sample(model, EULER)
    expected = sample(SparseNode(0.79).apply(model), EULER)
    assert world.error(expected, plain) > 1e-2
    advice = "Model Sparse Attention computes the self-attention that it takes, WanCore the rest"
    for order in ("before", "behind"):
        node = SparseNode(0.79)
        both = it(node.apply(model)) if order == "before" else node.apply(it(model))
        assert world.error(sample(both, EULER), expected) <= SAME, order
        assert (advice in it.text) is (order == "before"), (order, it.text)
        assert it.said[-1].endswith(advice) and it.said[-1].count("Sparse") == 1, (order, it.said[-1])
        taken = 3 * 6 * node.batches  # steps from 1.0 to 0.8
        assert f"self-attention calls: {taken} by sdpa; left" in it.said[-1], (order, taken, it.said[-1])
    twice = [
        world.refusal(lambda: it(SparseNode(0.79).apply(model), **half())),
        world.refusal(lambda: sample(SparseNode(0.79).apply(it(model, **half())), EULER)),
    ]
    assert all("Model Sparse Attention and WanCore's sparse attention" in message for message in twice), twice


def check_easycache(it: World) -> None:
    """EasyCache and LazyCache, in either order: they skip, WanCore computes the rest. Not with WanCore's own cache."""
    from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode

    model = world.tiny("WAN21_T2V")
    for node, name in ((EasyCacheNode, "EasyCache"), (LazyCacheNode, "LazyCache")):
        lazy = lambda model, node=node: node.execute(model, 0.5, 0.1, 0.95, False).result[0]  # noqa: E731
        expected, message = sample(lazy(model), EULER), f"{name} skips forwards, WanCore computes the others"
        assert world.error(sample(it(lazy(model)), EULER), expected) <= SAME
        assert message in it.text and it.said[-1].endswith(message), (it.text, it.said[-1])
        assert world.error(sample(lazy(it(model)), EULER), expected) <= SAME
        assert message not in it.text and it.said[-1].endswith(message), (it.text, it.said[-1])
        twice = [
            world.refusal(lambda lazy=lazy: it(lazy(model), **every_second())),
            world.refusal(lambda lazy=lazy: sample(lazy(it(model, **every_second())), EULER)),
        ]
        assert all(f"{name} and WanCore's step cache are on one model" in message for message in twice), twice


def check_memory_plan(it: World) -> None:
    """What outlives a forward is allocated while ComfyUI's compiler pauses: residuals, velocities and the order of
    blocks."""
    variants = world.variants()
    sparse = half()
    cases = [("t2v", sparse), *(("t2v", {**sparse, **policy}) for policy in policies().values())]
    cases += [("vace", policies()["taylorseer"]), ("fun", sparse), ("animate2", sparse)]
    for size, (name, options) in enumerate(cases, 4):  # of sizes that no other case has: orders of blocks are kept
        make, extra, _ = variants[name]
        model = make()
        grid = variants[name][2] if extra else (1, 16, 3, 4, 2 * size)
        with MemoryPlan() as plan:
            sample(plan.around(model), EULER, extra, size=grid)
            sample(it(plan.around(model), **options), EULER, extra, size=grid)
        assert plan.forwards > STEPS and plan.paused > 0, (name, options, plan.forwards, plan.paused)


def check_containers(it: World) -> None:
    """q, k and v in containers, which are freed once they were read; what is left to ComfyUI stays in them."""
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    forward = importlib.import_module("wan_core.ops.attention.sparse.forward").SparseForward
    real, freed, handed = forward.attend, [], []

    def attend(self: Any, call: Any, q: Any, k: Any, v: Any) -> Any:
        freed.append([handed[-1][i].expired() for i in range(3)])
        return real(self, call, q, k, v)

    def backend(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("called with plain tensors")

    def in_boxes(q: Any, *args: Any, **kwargs: Any) -> Any:
        boxes.append(q.peek().shape)
        return torch.zeros_like(q.peek())

    backend.container_function = in_boxes
    model, boxes = world.tiny("WAN21_T2V"), []
    expected = {name: sample(it(model, **options), EULER) for name, options in (("dense", {}), ("sparse", half()))}
    forward.attend = attend
    try:
        with boxed(lambda tensors: handed.append([StorageWeakRef(x.untyped_storage()) for x in tensors])):
            assert (sample(it(model), EULER) == expected["dense"]).all(), "dense"
            assert (sample(it(model, **half()), EULER) == expected["sparse"]).all(), "sparse"
            assert freed and all(all(three) for three in freed), freed[:3]
            assert "left to ComfyUI" in it.said[-1] and "cross-attention" in it.said[-1]
            unaccelerated = with_override(it(model, "comfyui", **every_second()), None)
            override = it(model, "comfyui", **every_second()).model_options["transformer_options"][OVERRIDE]
            override.original = lambda *args, **kwargs: in_boxes(*args, **kwargs)
            unaccelerated.model_options["transformer_options"][OVERRIDE] = override
            sample(unaccelerated, EULER)
            assert len(boxes) > 3 * STEPS, boxes[:4]
            warm = with_override(model, lambda func, q, *args, **kwargs: func(q * 1.5, *args, **kwargs))
            assert world.error(sample(it(warm), EULER), sample(warm, EULER)) <= SAME
    finally:
        forward.attend = real


def repatched(model: Any, kind: str, anew: Callable[[int], bool], inside: str = "DIFFUSION_MODEL") -> Any:
    """With another pack's wrapper around a forward, which puts a patch that changes nothing on the model: a new object
    where `anew` of how many there were is true. kind: of patches."""
    from comfy.patcher_extension import WrappersMP

    clone, functions = model.clone(), []

    def patched(options: dict[str, Any]) -> dict[str, Any]:
        if kind == "block":
            new = lambda args, extra: extra["original_block"](args)  # noqa: E731
        elif kind == "override":
            earlier = options[OVERRIDE]
            new = lambda func, *args, **kwargs: earlier(func, *args, **kwargs)  # noqa: E731
        else:
            new = lambda block: block["x"]  # noqa: E731
        functions.append(new if not functions or anew(len(functions)) else functions[-1])
        if kind == "block":
            return {**options, "patches_replace": {"dit": {("double_block", 1): functions[-1]}}}
        if kind == "override":
            return {**options, OVERRIDE: functions[-1]}
        return {**options, "patches": {kind: [functions[-1]]}}

    def wrapper(executor: Any, *args: Any, **kwargs: Any) -> Any:
        if "transformer_options" in kwargs:
            return executor(*args, **{**kwargs, "transformer_options": patched(kwargs["transformer_options"])})
        return executor(*args[:-1], patched(args[-1]), **kwargs)

    clone.add_wrapper_with_key(getattr(WrappersMP, inside), "other_pack", wrapper)
    return clone


def check_new_replacements(it: World) -> None:
    """A pack that puts something new on the model in every forward: nothing is kept, and the report names it. A node
    that does so once, or with the same object, is cached."""
    cache = importlib.import_module("pack.nodes.host.native_cache")
    model, residual_counts = world.tiny("WAN21_T2V"), []
    plain = sample(model, EULER)
    real = cache.CachedRun.finish
    cache.CachedRun.finish = lambda self, *args: (
        residual_counts.append((self.most, len(self.states))) or real(self, *args)
    )
    cases = [("block", policy) for policy in policies()] + [("attn1_patch", "taylorseer"), ("override", "taylorseer")]
    for kind, name in cases:
        policy = policies()[name]
        latents = sample(it(repatched(model, kind, lambda _: True), **policy), EULER)
        assert world.error(latents, plain) <= SAME and it.counts()[0] == 0, (kind, name, it.said[-1])
        most, states = residual_counts[-1]
        assert most == 0 and states <= 6, (kind, name, residual_counts[-1])  # two prompts, three steps
        assert "kept in 0.00 GiB" in it.said[-1]
        assert "was put on the model in" in it.said[-1] and "repatched.<locals>" in it.said[-1], it.said[-1]
        assert "remove that node, or the step cache" in it.said[-1]
        sample(it(model, **policy), EULER)
        alone = it.counts()
        sample(it(repatched(model, kind, lambda _: False), **policy), EULER)
        first = 4  # forwards that are skipped with what the first step kept: there patches are new
        assert it.counts()[0] >= alone[0] - first and "was put on" not in it.said[-1], (kind, name, alone, it.said[-1])
        sample(it(repatched(model, kind, lambda count: count == 9), **policy), EULER)
        assert it.counts()[0] > 0 and "was put on" not in it.said[-1], (kind, name, it.said[-1])
    cache.CachedRun.finish = real


def compiled(model: Any) -> Any:
    """TorchCompileModel with torch's quickest backend."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    clone = model.clone()
    ignored = lambda guards: ["transformer_options" not in guard.name for guard in guards]  # noqa: E731
    set_torch_compile_wrapper(clone, backend="eager", options={"guard_filter_fn": ignored})
    return clone


def check_compiled_fun_control(it: World) -> None:
    """Sparse attention behind a torch compile node knows the model and where its reference tokens are. Where they are
    not known, the report says that it does not run."""
    import torch

    make, extra, size = world.variants()["fun"]
    model = make()
    expected = sample(it(model, **half()), EULER, extra, size=size)
    with torch.compiler.set_stance("force_eager"):
        latents = sample(it(compiled(model), **half()), EULER, extra, size=size)
    assert "by sparse attention (math); left" in it.said[-1] and world.error(latents, expected) <= SAME, it.said[-1]
    native = importlib.import_module("pack.nodes.host.native")
    extra_tokens, native.EXTRA_TOKENS = native.EXTRA_TOKENS, ()
    sample(it(model, **half()), EULER, extra, size=size)
    native.EXTRA_TOKENS = extra_tokens
    assert "by sdpa; left" in it.said[-1]
    assert it.said[-1].count("self-attention of 144 tokens read all keys: which of them are the 120 of") == 1


def check_compiled(it: World) -> None:
    """TorchCompileModel before and behind the node, after a run without the node: all is accelerated, and later runs
    without the node are as before."""
    import comfy.ldm.wan.model as wan
    from comfy.ldm.modules.attention import attention_pytorch

    usual, wan.optimized_attention = wan.optimized_attention, attention_pytorch  # that of a GPU: compiled as a whole
    try:
        model, options = world.tiny("WAN21_T2V", num_layers=1), {**half(), **policies()["taylorseer"]}
        plain = sample(model, EULER, cfg=1.0)
        expected = sample(it(model, **options), EULER, cfg=1.0)
        summary = it.said[-1].splitlines()[-1]
        assert "sparse attention (math)" in summary and it.counts()[0] == 5 and world.error(expected, plain) > 1e-3
        assert world.error(sample(compiled(model), EULER, cfg=1.0), plain) <= SAME
        for accelerated in (it(compiled(model), **options), compiled(it(model, **options))):
            assert world.error(sample(accelerated, EULER, cfg=1.0), expected) <= SAME
            assert it.said[-1].splitlines()[-1] == summary, it.said[-1]
        assert world.error(sample(compiled(model), EULER, cfg=1.0), plain) <= SAME
    finally:
        wan.optimized_attention = usual
