"""Run by ComfyUI's Python: WanCore Accelerate on tiny random models of every Wan class that ComfyUI has, through
ComfyUI's own sampler. `native_checks` runs its checks.
"""

from __future__ import annotations

import importlib
from typing import Any

import native_models as world
from native_models import LAYERS, SAME, SIZE, error, rows, sample, tiny, variants

CROSS = "cross-attention calls"
STEPS, SMALL = 3, (1, 16, 1, 4, 4)
# Calls of self-attention in a forward, where there is more than one in a block: VACE has two hints, Animate-2 a pose
# branch and a call for each of five frames.
CALLS = {"vace": 3 * LAYERS, "animate": 5, "animate2": 6 * LAYERS}
# Tokens before the video's, its grid, all tokens: a 5 x 8 x 12 latent has 5 x 4 x 6 tokens.
PLACES = {
    "fun": [24, 5, 4, 6, 144],
    "context": [0, 5, 4, 6, 192],
    "odd": [0, 3, 4, 5, 60],
    "animate2": [0, 4, 4, 6, 96],
    "s2v": [0, 5, 4, 6, 178],
    "humo": [0, 5, 4, 6, 144],
    "scail": [48, 5, 4, 6, 288],
}
World = world.Accelerated


def said(taken: str, others: int = 9) -> str:
    return f"WanCore Accelerate: self-attention calls: {taken}; left to ComfyUI: {others} {CROSS}"


def half() -> Any:
    from wan_core.config import SparseOptions

    return SparseOptions(sparsity=0.5, ramp=0)


def all_blocks() -> Any:
    """All but a millionth."""
    from wan_core.config import SparseOptions

    return SparseOptions(sparsity=1e-6, ramp=0)


def check_variants(it: World) -> None:
    """A model gives what it gives without the node, also after a run with it."""
    for name, (make, extra, size) in variants().items():
        model = make()
        plain = sample(model, extra, size)
        assert plain.isfinite().all() and plain.std() > 0.01, name
        assert error(sample(it(model), extra, size), plain) <= SAME, name
        assert (sample(model, extra, size) == plain).all(), name
        counts = f"WanCore Accelerate: self-attention calls: {STEPS * CALLS.get(name, LAYERS)} by sdpa; "
        assert it.said[-1].startswith(counts) and it.said[-1].endswith(CROSS), (name, it.said[-1])


def check_sparse(it: World) -> None:
    """Reading all blocks, and a quarter of them; and where the tokens of the video are."""
    from wan_core.config import SparseOptions

    sparse = importlib.import_module("wan_core.sampling.native.sparse")
    places: set[tuple[int, ...]] = set()
    real = sparse.with_others

    def recorded(tiles: Any, rule: Any, front: int, length: int) -> Any:
        places.add((front, *tiles.grid, length))
        return real(tiles, rule, front, length)

    sparse.with_others = recorded
    for name, (make, extra, size) in variants().items():
        model = make()
        plain = sample(model, extra, size)
        places.clear()
        for options, least, most in (
            (all_blocks(), 0, SAME),
            (SparseOptions(sparsity=0.75, ramp=0), SAME, 0.1),
        ):
            assert least <= error(sample(it(model, sparse=options), extra, size), plain) <= most, (name, options)
            taken = f"{STEPS * CALLS.get(name, LAYERS)} by sparse attention (math)"
            assert f"self-attention calls: {taken}" in it.said[-1], (name, it.said[-1])
        assert places == {tuple(PLACES.get(name, [0, 5, 4, 6, 120]))}, (name, places)
    sparse.with_others = real


def check_order(it: World) -> None:
    """LoRA, shift and torch compile before and after the node: the same."""
    import comfy.sd
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    model = tiny("WAN21_T2V")
    layer = "diffusion_model.blocks.1.self_attn.q.lora_"
    lora = {f"{layer}A.weight": rows(4, 48, seed=4), f"{layer}B.weight": rows(48, 4, seed=5)}

    def with_lora(model: Any) -> Any:
        return comfy.sd.load_lora_for_models(model, None, lora, 0.5, 0)[0]

    def with_shift(model: Any) -> Any:
        return ModelSamplingSD3().patch(model, 3.0)[0]

    def compiled(model: Any) -> Any:
        patched = model.clone()
        set_torch_compile_wrapper(patched, backend="eager")
        return patched

    plain = sample(model, {}, SIZE)
    for change in (with_lora, with_shift, compiled):
        expected = sample(change(model), {}, SIZE)
        assert (error(expected, plain) > 1e-3) is (change is not compiled), change
        for both in (it(change(model)), change(it(model))):
            assert error(sample(both, {}, SIZE), expected) <= SAME, change
            assert it.said[-1] == said("9 by sdpa"), it.said[-1]


def check_backend(it: World) -> None:
    """ComfyUI's own choice of a kernel: before the node it gets what is left, after it it is reported."""
    from comfy.ldm.modules.attention import attention_sub_quad

    def with_backend(model: Any) -> Any:
        patched = model.clone()
        patched.set_model_optimized_attention(attention_sub_quad)
        return patched

    model = tiny("WAN21_T2V")
    expected = sample(with_backend(model), {}, SIZE)
    assert error(sample(it(with_backend(model)), {}, SIZE), expected) <= SAME
    assert it.said[-1] == said("9 by sdpa"), it.said[-1]
    assert error(sample(with_backend(it(model)), {}, SIZE), expected) <= SAME
    warning, counts = it.said[-1].splitlines()
    assert warning.startswith("warning: an attention override (comfy.model_patcher"), warning
    assert warning.endswith("was set later and computes attention: put WanCore Accelerate after that node"), warning
    assert counts.startswith("WanCore Accelerate: self-attention calls: none"), counts


def check_faster_backend(it: World) -> None:
    """`auto` leaves self-attention to a kernel that rounds where ComfyUI was started with it, or Model Attention
    Backend chose it, on cards where it is faster; and to ComfyUI's choice on other GPUs than NVIDIA's."""
    import comfy.ldm.wan.model as wan
    import torch
    from comfy.ldm.modules import attention

    beside, node = (importlib.import_module(f"pack.nodes.{name}") for name in ("host.native_beside", "accelerate"))
    own, cards = attention.optimized_attention, {"Ada": (8, 9), "Hopper": (9, 0)}

    @attention.wrap_attn
    def rounded(q: Any, *args: Any, **kwargs: Any) -> Any:
        return own(q.half().float(), *args, **kwargs)

    def text(model: Any, name: str = "auto") -> str:
        return node.WanCoreAccelerate.execute(model, "exact", name).ui.as_dict()["text"][0]

    plain, by_node = tiny("WAN21_T2V"), tiny("WAN21_T2V")
    other = plain.clone()
    other.load_device = torch.device("xpu")
    assert "attention: comfyui (its choice for what is no NVIDIA GPU)" in text(other)
    by_node.set_model_optimized_attention(rounded)
    for theirs, ours in beside.ROUNDING.items():
        registered = {**attention.REGISTERED_ATTENTION_FUNCTIONS, theirs: rounded}
        real = attention.REGISTERED_ATTENTION_FUNCTIONS, beside.capability
        attention.REGISTERED_ATTENTION_FUNCTIONS = registered
        try:
            for model, started in ((plain, rounded), (by_node, own)):
                attention.optimized_attention = wan.optimized_attention = started
                beside.capability = lambda _: cards["Ada"]
                assert f"attention: comfyui ({ours}, which was chosen there" in text(model)
                assert "attention: sdpa\n" in text(model, "sdpa") + "\n"
                accelerated = node.WanCoreAccelerate.execute(model, "exact", "auto").result[0]
                assert (sample(accelerated, {}, SIZE) == sample(model, {}, SIZE)).all()
                beside.capability = lambda _: cards["Hopper"]
                assert "attention: sdpa\n" in text(model) + "\n"
            assert "attention: sdpa\n" in text(plain) + "\n"
        finally:
            attention.REGISTERED_ATTENTION_FUNCTIONS, beside.capability = real
            attention.optimized_attention = wan.optimized_attention = own


def check_compared_once(it: World) -> None:
    """A run is compared once for a file and a size, also where the file is loaded again for every prompt, and once for
    a model whose file is not known."""
    from wan_core.config import SkipOptions

    loads = {"file.safetensors": ["a", "a"], "other.safetensors": ["b"], None: ["c", "d"]}
    compared = []
    for path, models in loads.items():
        for name in models:
            model, said = tiny("WAN21_T2V", seed=ord(name)), list[str]()
            model.cached_patcher_init = path and (print, (path, {}))
            for _ in range(2):
                sample(it.accelerate(model, "auto", SkipOptions(), said.append, 0, "auto"), {}, SMALL, 10)
            compared += ["instead of" in text for text in said]
    assert compared == [True, False, False, False, True, False, True, False, True, False], compared


def check_twice(it: World) -> None:
    """The second of two nodes replaces the first."""
    model = tiny("WAN21_T2V")
    assert error(sample(it(it(model, "math")), {}, SIZE), sample(model, {}, SIZE)) <= SAME
    assert it.said == [said("9 by sdpa")], it.said


def check_parts(it: World) -> None:
    """The steps of two samplers with an expert each, image to image, and samplers that evaluate twice in a step: the
    budgets of 10 steps, 0.625 in the first 30 %, then 0.8125."""
    from wan_core.config import SparseOptions

    native, runs = importlib.import_module("pack.nodes.host.native_run"), list[Any]()

    class Recorded(native.NativeRun):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.seen: list[float] = []
            runs.append(self)

        def take(self, by: str) -> None:
            super().take(by)
            self.seen.append(self.sparsity)

    native.NativeRun = Recorded
    fast = it(tiny("WAN21_T2V", num_layers=1), sparse=SparseOptions(sparsity=0.8125))
    whole = [0.625] * 3 + [0.8125] * 7
    parts = [
        (0, 5, "euler", 1.0, whole[:5], (0, 5, 10)),
        (5, 10, "euler", 1.0, whole[5:], (5, 5, 10)),
        (0, 10, "euler", 0.5, [0.8125] * 10, (10, 10, 20)),
        (0, 10, "heun", 1.0, [0.625] * 5 + [0.8125] * 14, (0, 10, 10)),  # two forwards in a step but the last
        (0, 10, "uni_pc", 1.0, whole, (0, 10, 10)),
    ]
    for first, last, sampler, denoise, seen, place in parts:
        sample(fast, {}, SIZE, 10, start_step=first, last_step=last, sampler_name=sampler, denoise=denoise, cfg=1.0)
        part = runs[-1].part
        assert runs[-1].seen == seen and (part.first, part.steps, part.total) == place, (sampler, runs[-1].seen, part)
    native.NativeRun = Recorded.__base__


def check_faults(it: World) -> None:
    """Interrupted, or out of memory in a block: the next run is that of a fresh model, and nothing stays in options."""
    import comfy.model_management
    import torch

    fresh = sample(it(tiny("WAN21_T2V"), sparse=half()), {}, SIZE)
    for fault in (
        comfy.model_management.InterruptProcessingException(),
        torch.cuda.OutOfMemoryError("no memory left, says the test"),
    ):
        it.said.clear()
        model = it(tiny("WAN21_T2V"), sparse=half())
        before = sorted(model.model_options["transformer_options"])
        calls: list[int] = []

        def stop(block: dict[str, Any], fault: BaseException = fault, calls: list[int] = calls) -> dict[str, Any]:
            calls.append(block["block_index"])
            if len(calls) == 5:
                raise fault
            return block

        broken = model.clone()
        broken.set_model_patch(stop, "double_block")
        try:
            sample(broken, {}, SIZE)
            raise AssertionError("nothing was raised")
        except type(fault):
            assert not it.said and sorted(model.model_options["transformer_options"]) == before
        for _ in range(2):
            assert (sample(model, {}, SIZE) == fresh).all(), fault


def check_context(it: World) -> None:
    """Context windows, with attention that reads all blocks."""
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    model, size = tiny("WAN21_T2V"), (1, 16, 9, 8, 12)
    windows = {"context_length": 17, "context_overlap": 5, "context_schedule": "standard_static", "context_stride": 1,
               "closed_loop": False, "fuse_method": "pyramid", "freenoise": False}  # fmt: skip
    windowed = WanContextWindowsManualNode.execute(model, **windows).result[0]
    plain = sample(windowed, {}, size)
    assert error(plain, sample(model, {}, size)) > 1e-3
    assert error(sample(it(windowed), {}, size), plain) <= SAME and it.said[-1] == said("18 by sdpa", 18), it.said
    assert error(sample(it(windowed, sparse=all_blocks()), {}, size), plain) <= SAME
    assert it.said[-1].startswith(said("18 by sparse attention (math)", 18)) and "sparse attention: " in it.said[-1]


def check_time_of_another_device(it: World) -> None:
    """A run ends when the model's own device has computed it, which may be another than the current one."""
    run = importlib.import_module("pack.nodes.host.native_run")
    real, model, waited = run.wait_for, tiny("WAN21_T2V"), []
    run.wait_for = waited.append
    try:
        sample(it(model), {}, SIZE)
    finally:
        run.wait_for = real
    assert waited == [model.load_device], waited


def check_devices(it: World) -> None:
    """Conditions divided among two devices, a thread each, as ComfyUI's multi-GPU nodes have them."""
    import comfy.multigpu
    import torch

    devices = torch.device("cpu"), torch.device("cpu", 0)  # not equal: enough for its bookkeeping
    model, other = tiny("WAN21_T2V"), tiny("WAN21_T2V")
    other.model.current_patcher = other
    for sparse, by in ((None, "sdpa"), (half(), "sparse attention (math)")):
        fast = it(model, sparse=sparse)
        one = sample(fast, {}, SIZE)
        assert it.said[-1].startswith(said(f"9 by {by}", 9)), it.said[-1]
        fast.model_options["multigpu_clones"] = {devices[0]: fast, devices[1]: other}
        pool = comfy.multigpu.MultiGPUThreadPool(list(devices))  # ends with the run
        fast.model_options["multigpu_thread_pool"] = pool
        assert error(sample(fast, {}, SIZE), one) <= SAME, by
        assert it.said[-1].startswith(said(f"18 by {by}", 18)), it.said[-1]


def check_refusals(it: World) -> None:
    """What the node refuses before any work."""
    import comfy.model_patcher
    import torch

    from wan_core.config import SkipOptions

    accelerate = importlib.import_module("pack.nodes.accelerate").WanCoreAccelerate
    other = comfy.model_patcher.ModelPatcher(torch.nn.Linear(2, 2), None, None)
    other.model.diffusion_model = torch.nn.Linear(2, 2)
    model = tiny("WAN21_T2V")
    for message, arguments in {
        "WanCore Accelerate takes Wan models, this is Linear: connect a Wan model": (other, "exact", "auto"),
        "'flash4' cannot run on cpu": (model, "exact", "flash4"),
        "speed balanced and sparse given": (model, "balanced", "auto", "off", SkipOptions(sparse=half())),
    }.items():
        refused = world.refusal(lambda arguments=arguments: accelerate.execute(*arguments))
        assert message in refused, refused
