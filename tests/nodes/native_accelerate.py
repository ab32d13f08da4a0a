"""Run by ComfyUI's Python: WanCore Accelerate on tiny random models of every Wan class that ComfyUI has.

python native_accelerate.py COMFYUI_PATH CHECK,... [MODEL ...]
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from typing import Any

from native_models import SIZE, Accelerated, error, rows, sample, set_up, tiny, variants


def check_variants(pack: types.ModuleType, names: list[str]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, (make, extra, size) in variants().items():
        if names and name not in names:
            continue
        model, accelerated = make(), Accelerated(pack)
        plain = sample(model, extra, size)
        fast = sample(accelerated(model), extra, size)
        again = sample(model, extra, size)
        results[name] = {
            "error": error(fast, plain),
            "restored": bool((again == plain).all()),
            "finite": bool(plain.isfinite().all() and plain.std() > 0.01),
            "words": accelerated.said,
        }
    return results


def check_sparse(pack: types.ModuleType, names: list[str]) -> dict[str, Any]:
    """Reading all but a millionth of the blocks, and a quarter of them; and where the tokens of the video are."""
    from wan_core.config import SparseOptions

    sparse = importlib.import_module("wan_core.sampling.native.sparse")
    places: list[list[int]] = []

    real = sparse.with_others

    def recorded(tiles: Any, rule: Any, front: int, length: int) -> Any:
        places.append([front, *tiles.grid, length])
        return real(tiles, rule, front, length)

    sparse.with_others = recorded
    results: dict[str, Any] = {}
    for name, (make, extra, size) in variants().items():
        if names and name not in names:
            continue
        model, accelerated = make(), Accelerated(pack)
        plain = sample(model, extra, size)
        errors = []
        places.clear()
        for sparsity in (1e-6, 0.75):
            options = SparseOptions(sparsity=sparsity, dense_steps=0, ramp=0)
            errors.append(error(sample(accelerated(model, sparse=options), extra, size), plain))
        results[name] = {
            "errors": errors,
            "words": accelerated.said,
            "places": sorted(map(list, {*map(tuple, places)})),
        }
    return results


def check_order(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """LoRA and shift before and after the node, other overrides before and after it, two nodes, compiled."""
    import comfy.sd
    from comfy.ldm.modules.attention import attention_sub_quad
    from comfy_api.torch_helpers import set_torch_compile_wrapper
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

    model, accelerated = tiny("WAN21_T2V"), Accelerated(pack)
    layer = "diffusion_model.blocks.1.self_attn.q.lora_"
    lora = {f"{layer}A.weight": rows(4, 48, seed=4), f"{layer}B.weight": rows(48, 4, seed=5)}

    def with_lora(model: Any) -> Any:
        return comfy.sd.load_lora_for_models(model, None, lora, 0.5, 0)[0]

    def with_shift(model: Any) -> Any:
        return ModelSamplingSD3().patch(model, 3.0)[0]

    def with_backend(model: Any) -> Any:
        patched = model.clone()
        patched.set_model_optimized_attention(attention_sub_quad)
        return patched

    def compiled(model: Any) -> Any:
        patched = model.clone()
        set_torch_compile_wrapper(patched, backend="eager")
        return patched

    plain = sample(model, {}, SIZE)
    results: dict[str, Any] = {}
    for name, change in (("lora", with_lora), ("shift", with_shift), ("backend", with_backend), ("compile", compiled)):
        expected = sample(change(model), {}, SIZE)
        results[name] = {
            "changes": error(expected, plain),
            "before": error(sample(accelerated(change(model)), {}, SIZE), expected),
            "after": error(sample(change(accelerated(model)), {}, SIZE), expected),
            "words": accelerated.said[-2:],
        }
    twice = accelerated(accelerated(model, "math"))
    results["twice"] = {
        "error": error(sample(twice, {}, SIZE), plain),
        "words": accelerated.said[-1:],
        "runs": len(accelerated.said),
    }
    return results


def check_parts(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """The steps of two samplers with an expert each, image to image, and samplers that evaluate twice in a step."""
    from wan_core.config import SparseOptions

    runs: list[Any] = []
    native = importlib.import_module("pack.nodes.host.native_run")

    class Recorded(native.NativeRun):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.seen: list[float] = []
            runs.append(self)

        def take(self, by: str) -> None:
            super().take(by)
            self.seen.append(self.sparsity)

    native.NativeRun = Recorded
    model = tiny("WAN21_T2V", num_layers=1)
    fast = Accelerated(pack)(model, sparse=SparseOptions(sparsity=0.8125, dense_steps=0.0))
    parts = [
        (0, 5, "euler", 1.0),
        (5, 10, "euler", 1.0),
        (0, 10, "euler", 0.5),
        (0, 10, "heun", 1.0),
        (0, 10, "uni_pc", 1.0),
    ]
    for first, last, sampler, denoise in parts:
        sample(fast, {}, SIZE, 10, start_step=first, last_step=last, sampler_name=sampler, denoise=denoise, cfg=1.0)
    return {
        "seen": [run.seen for run in runs],
        "parts": [[run.part.first, run.part.steps, run.part.total] for run in runs],
    }


def check_faults(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """Interrupted, or out of memory in a block: the next run is that of a fresh model, and nothing stays in options."""
    import comfy.model_management
    import torch

    from wan_core.config import SparseOptions

    sparse = SparseOptions(sparsity=0.5, dense_steps=0, ramp=0)
    results: dict[str, Any] = {}
    faults = {
        "interruption": comfy.model_management.InterruptProcessingException(),
        "memory": torch.cuda.OutOfMemoryError("no memory left, says the test"),
    }
    fresh = sample(Accelerated(pack)(tiny("WAN21_T2V"), sparse=sparse), {}, SIZE)
    for name, fault in faults.items():
        accelerated = Accelerated(pack)
        model = accelerated(tiny("WAN21_T2V"), sparse=sparse)
        before = sorted(model.model_options["transformer_options"])
        calls = []

        def stop(block: dict[str, Any], fault: BaseException = fault, calls: list[int] = calls) -> dict[str, Any]:
            calls.append(block["block_index"])
            if len(calls) == 5:
                raise fault
            return block

        broken = model.clone()
        broken.set_model_patch(stop, "double_block")
        try:
            sample(broken, {}, SIZE)
            raised = None
        except (torch.OutOfMemoryError, comfy.model_management.InterruptProcessingException) as seen:
            raised = type(seen).__name__
        results[name] = {
            "raised": raised,
            "said": len(accelerated.said),
            "left": sorted(model.model_options["transformer_options"]) != before,
            "same": bool((sample(model, {}, SIZE) == fresh).all() and (sample(model, {}, SIZE) == fresh).all()),
        }
    return results


def check_context(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """Context windows, with attention that reads all blocks."""
    from comfy_extras.nodes_context_windows import WanContextWindowsManualNode

    from wan_core.config import SparseOptions

    model, accelerated = tiny("WAN21_T2V"), Accelerated(pack)
    size = (1, 16, 9, 8, 12)
    windows = {"context_length": 17, "context_overlap": 5, "context_schedule": "standard_static", "context_stride": 1,
               "closed_loop": False, "fuse_method": "pyramid", "freenoise": False}  # fmt: skip
    windowed = WanContextWindowsManualNode.execute(model, **windows).result[0]
    plain = sample(windowed, {}, size)
    all_blocks = SparseOptions(sparsity=1e-6, dense_steps=0, ramp=0)
    return {
        "changes": error(plain, sample(model, {}, size)),
        "dense": error(sample(accelerated(windowed), {}, size), plain),
        "sparse": error(sample(accelerated(windowed, sparse=all_blocks), {}, size), plain),
        "words": accelerated.said,
    }


def check_devices(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """Conditions divided among two devices, a thread each, as ComfyUI's multi-GPU nodes have them."""
    import comfy.multigpu
    import torch

    from wan_core.config import SparseOptions

    devices = torch.device("cpu"), torch.device("cpu", 0)  # not equal: enough for its bookkeeping
    results: dict[str, Any] = {}
    model, other = tiny("WAN21_T2V"), tiny("WAN21_T2V")
    other.model.current_patcher = other
    for name, sparse in (("dense", None), ("sparse", SparseOptions(sparsity=0.5, dense_steps=0, ramp=0))):
        accelerated = Accelerated(pack)
        fast = accelerated(model, sparse=sparse)
        one = sample(fast, {}, SIZE)
        fast.model_options["multigpu_clones"] = {devices[0]: fast, devices[1]: other}
        fast.model_options["multigpu_thread_pool"] = comfy.multigpu.MultiGPUThreadPool(
            list(devices)
        )  # ends with the run
        results[name] = {"error": error(sample(fast, {}, SIZE), one), "words": accelerated.said}
    return results


def check_refusals(pack: types.ModuleType, _: list[str]) -> dict[str, Any]:
    """What the node refuses before any work."""
    import comfy.model_patcher
    import torch

    import wan_core.config as config

    accelerate = importlib.import_module("pack.nodes.accelerate").WanCoreAccelerate
    other = comfy.model_patcher.ModelPatcher(torch.nn.Linear(2, 2), None, None)
    other.model.diffusion_model = torch.nn.Linear(2, 2)
    sparse = config.SkipOptions(sparse=config.SparseOptions(sparsity=0.5))
    model, messages = tiny("WAN21_T2V"), {}
    for name, arguments in {
        "other": (other, "exact", "auto"),
        "backend": (model, "exact", "flash4"),
        "twice": (model, "balanced", "auto", "off", sparse),
    }.items():
        try:
            accelerate.execute(*arguments)
        except config.UserError as fault:
            messages[name] = str(fault)
    return messages


CHECKS = {
    "variants": check_variants,
    "sparse": check_sparse,
    "order": check_order,
    "parts": check_parts,
    "faults": check_faults,
    "context": check_context,
    "devices": check_devices,
    "refusals": check_refusals,
}


if __name__ == "__main__":
    nodes = set_up(sys.argv[1])
    wanted = {name: CHECKS[name](nodes, sys.argv[3:]) for name in sys.argv[2].split(",")}
    print(json.dumps(wanted))
