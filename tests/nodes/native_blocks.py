"""Run by ComfyUI's Python: fused blocks on tiny Wan models of ComfyUI's own classes. No kernel runs on a CPU: plain
torch computes the passes, and writes over what kernels overwrite. `native_checks` runs its checks.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

from native_beside import repatched
from native_cache_runs import EULER, every_second, sample
from native_models import LAYERS, SAME, error, rows, tiny, variants

SIGMAS = [1.0, 0.8, 0.4, 0.0]
WORDS = "norms, gates and rotations by WanCore"


class World:
    """Models with fused blocks, and how many of their blocks were."""

    def __init__(self, pack: types.ModuleType) -> None:
        from wan_core.ops.kernels import fused

        self.blocks = importlib.import_module("pack.nodes.host.native_blocks")
        self.accelerate = importlib.import_module("pack.nodes.host.native_run").accelerate
        self.said: list[str] = []
        self.fused = 0
        self.blocks.runs_kernel = lambda _: True
        own = {name: overwriting(getattr(fused, name)) for name in ("head_norm", "residual", "residual_norm")}
        self.blocks.fused = types.SimpleNamespace(norm=fused.norm, **own)
        self.real, self.blocks.fused_block = vars(self.blocks).get("real", self.blocks.fused_block), self.counted
        self.blocks.real = self.real  # the checks of a module share it
        self.known = self.blocks.is_known(*self.forwards())

    @staticmethod
    def forwards() -> list[Any]:
        import comfy.ldm.wan.model as wan

        return [wan.WanAttentionBlock.forward, wan.WanSelfAttention.forward, wan.optimized_attention]

    def counted(self, *args: Any) -> Any:
        self.fused += 1
        return self.real(*args)

    def __call__(self, model: Any, compare: str = "off", **skipping: Any) -> Any:
        from wan_core.config import SkipOptions

        return self.accelerate(model, "comfyui", SkipOptions(**skipping), self.said.append, compare=compare)

    def same(self, model: Any, blocks: int, *args: Any, what: Any = "", **how: Any) -> None:
        """A run gives what it gives without the node, with as many fused blocks."""
        expected, self.fused = sample(model, *args, **how), 0
        found = error(sample(self(model), *args, **how), expected)
        assert found <= SAME and self.fused == blocks, (what, found, self.fused, blocks)
        assert (WORDS in self.said[-1]) is (blocks > 0), (what, self.said[-1])


def overwriting(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of `fused`, whose result uses the memory of its first argument, as that of a kernel."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(x, *args, **kwargs)
        several = isinstance(result, tuple)
        total = result[0] if several else result
        written = x.copy_(total.reshape(x.shape)).view(total.shape)
        return (written, *result[1:]) if several else written

    return run


@contextmanager
def batched(both: bool) -> Iterator[None]:
    """Whether ComfyUI has memory for both prompts in one forward."""
    import comfy.model_patcher

    patcher = comfy.model_patcher.ModelPatcher
    real, patcher.get_free_memory = patcher.get_free_memory, lambda *_: 1 << 60 if both else 0
    try:
        yield
    finally:
        patcher.get_free_memory = real


def with_patch(put: Callable[[Any], None], model: Any) -> Any:
    clone = model.clone()
    put(clone)
    return clone


def check_variants(it: World) -> None:
    """Models whose blocks are plain are fused, both ways of guidance and without it; all others are as they were."""
    for name, (make, extra, size) in variants().items():
        model = make()
        plain = name in ("t2v", "i2v", "i2v 2.2", "5B", "fun", "context", "odd", "camera")
        for together, cfg in ((True, 3.0), (False, 3.0), (True, 1.0)):
            with batched(together):
                forwards = 3 * (1 if together or cfg == 1 else 2) if plain else 0
                it.same(model, LAYERS * forwards, SIGMAS, extra, what=(name, together, cfg), size=size, cfg=cfg)


def check_frames(it: World) -> None:
    """Frames with timesteps of their own (5B from an image): a row of modulation for each."""
    import torch

    make, _, size = variants()["5B"]
    mask = torch.ones(1, 1, *size[2:])
    mask[:, :, 0] = 0
    it.same(make(), 9, SIGMAS, size=size, noise_mask=mask, latent=rows(*size, seed=4))


def check_rounding(it: World) -> None:
    """In half precision a block is no further from float32 than ComfyUI's own; in float32 it is the same."""
    import torch

    off: dict[Any, list[float]] = {torch.bfloat16: [], torch.float16: []}
    for image, rows_of_e, batch in product((False, True), (0, 1, 3), (1, 2)):
        model = (tiny("WAN21_I2V", in_dim=36) if image else tiny("WAN21_T2V")).model.diffusion_model
        for seed, block in product(range(4), model.blocks):
            args = arguments(model, batch, rows_of_e, seed)
            ours, native, _ = results(it, block, args, torch.float32)
            assert error(ours, native) <= SAME, (image, rows_of_e, batch)
            for dtype, ratios in off.items():
                ours, native, right = results(it, block, args, dtype)
                ratios.append(float((ours - right).norm() / (native - right).norm()))
    means = {dtype: sum(ratios) / len(ratios) for dtype, ratios in off.items()}
    assert max(means.values()) <= 1.0, means


def arguments(model: Any, batch: int, rows_of_e: int, seed: int) -> dict[str, Any]:
    """Arguments of a block for 72 tokens. rows_of_e: of modulation; 0: it has no dimension for them."""
    import torch

    return {
        "img": rows(batch, 72, model.dim, seed=seed),
        "vec": rows(batch, *([rows_of_e] if rows_of_e else []), 6, model.dim, seed=seed + 1) * 0.3,
        "txt": rows(batch, 13, model.dim, seed=seed + 2),
        "pe": model.rope_encode(3, 8, 12, dtype=torch.float32),
        "transformer_options": {},
    }


def results(it: Any, block: Any, args: dict[str, Any], dtype: Any, device: str = "cpu") -> tuple[Any, Any, Any]:
    """What a block gives fused, by ComfyUI and by ComfyUI in float32, with weights and arguments of `dtype`."""
    import torch

    block = deepcopy(block)
    for parameter in block.parameters():
        parameter.data = parameter.data.to(device, dtype)
    args = {name: value.to(device) if name != "transformer_options" else value for name, value in args.items()}
    args |= {name: args[name].to(dtype) for name in ("img", "vec", "txt")}
    before, pe = args["img"].clone(), args["pe"]

    def native(block: Any, wide: Any) -> Any:
        return block(*(args[name].to(wide) for name in ("img", "vec")), pe, args["txt"].to(wide), 7)

    with torch.inference_mode():
        assert it.blocks.fits(args), dtype
        theirs, ours = native(block, dtype), it.real(block, args, pe[0, ..., 0].contiguous(), 7)
        assert (args["img"] == before).all() and ours.dtype == dtype
        return ours.float(), theirs.float(), native(block.float(), torch.float32)


def check_weights(it: World) -> None:
    """LoRAs summed into linears and norms, and what ComfyUI patches in when it casts a weight."""
    import comfy.sd
    import torch

    names = [f"diffusion_model.blocks.1.{one}" for one in ("self_attn.q", "self_attn.o", "cross_attn.k", "ffn.0")]
    model = tiny("WAN21_T2V")
    plain = sample(model, SIGMAS)
    state = model.model.diffusion_model.state_dict()
    lora = {}
    for seed, name in enumerate(names):
        out, wide = state[name.removeprefix("diffusion_model.") + ".weight"].shape
        lora |= {
            f"{name}.lora_A.weight": rows(4, wide, seed=seed),
            f"{name}.lora_B.weight": rows(out, 4, seed=seed + 9),
        }
    for norm in ("self_attn.norm_q", "self_attn.norm_k", "norm3"):
        lora[f"diffusion_model.blocks.2.{norm}.diff"] = rows(48, seed=3)
    patched = comfy.sd.load_lora_for_models(model, None, lora, 0.5, 0)[0]
    assert error(sample(patched, SIGMAS), plain) > 1e-3
    it.same(patched, 9, SIGMAS)
    block, args = model.model.diffusion_model.blocks[1], arguments(model.model.diffusion_model, 1, 1, 0)
    _, plain, _ = results(it, block, args, torch.float32)
    for path in ("self_attn.norm_q", "self_attn.norm_k", "self_attn.q", "self_attn.o", "norm3", "ffn.2"):
        module = block.get_submodule(path)
        module.weight_function = [lambda weight: weight * 3]  # as for a LoRA on a model that is not all in VRAM
        ours, expected, _ = results(it, block, args, torch.float32)
        assert error(ours, expected) <= SAME < SAME * 10 < error(expected, plain), path
        module.weight_function = []


def check_patches_within(it: World) -> None:
    """Patches within blocks, also of kinds to come: such blocks are ComfyUI's, and the report says so, once. Patches
    between blocks are kept."""

    def warmer(block: dict[str, Any]) -> Any:
        return block["x"] * 1.1

    def between(block: dict[str, Any]) -> Any:
        return {**block, "img": block["img"] * 1.1}

    for kind, patch, count in (("attn1_patch", warmer, 0), ("attn2_patch", warmer, 0), ("x_patch", warmer, 0),
                               ("double_block", between, 9)):  # fmt: skip
        model = with_patch(lambda clone, kind=kind, patch=patch: clone.set_model_patch(patch, kind), tiny("WAN21_T2V"))
        it.same(model, count, SIGMAS, what=kind)
        said = f"by ComfyUI, because another node changes blocks within ({kind}: native_blocks.check_patches_within."
        assert (said in it.said[-1]) is (count == 0), it.said[-1]


def check_changed_blocks(it: World) -> None:
    """Blocks that a node pack changed are its own: forwards of instances and of classes, other classes, hooks."""
    import comfy.ldm.wan.model as wan

    def doubled(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) * 1.1

    for path, count in (("", 6), ("self_attn", 6), ("cross_attn", 9), ("ffn", 9), ("self_attn.q", 9), ("norm3", 9)):
        model = tiny("WAN21_T2V")
        module = model.model.diffusion_model.blocks[1].get_submodule(path)
        module.forward = partial(doubled, module.forward)  # what Normalized Attention Guidance does to cross_attn
        it.same(model, count, SIGMAS, what=path)
        model = tiny("WAN21_T2V")
        module = model.model.diffusion_model.blocks[1].get_submodule(path)
        module.register_forward_hook(lambda _, args, out: out * 1.1)
        it.same(model, count, SIGMAS, what=path)

    class Other(wan.WanAttentionBlock):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 1.1

    model = tiny("WAN21_T2V")
    model.model.diffusion_model.blocks[1].__class__ = Other
    it.same(model, 6, SIGMAS, what=Other)
    for kind in (wan.WanAttentionBlock, wan.WanSelfAttention):
        real = kind.forward
        kind.forward = lambda *args, real=real, **kwargs: real(*args, **kwargs) * 1.1
        try:
            it.same(tiny("WAN21_T2V"), 0, SIGMAS, what=kind)
        finally:
            kind.forward = real


def check_blocks_of_a_newer_comfyui(it: World) -> None:
    """Blocks of the same names that compute something else are ComfyUI's."""
    import comfy.ldm.wan.model as wan

    assert it.known
    kind, real = wan.WanAttentionBlock, wan.WanAttentionBlock.forward
    kind.older = real
    newer = types.FunctionType((lambda self, *args, **kwargs: 1.5 * self.older(*args, **kwargs)).__code__, vars(wan))
    model = tiny("WAN21_T2V")
    kind.forward = newer
    try:
        it.blocks.is_known(*it.forwards())  # which computes a fused block itself
        expected, it.fused = sample(model, SIGMAS), 0
        assert error(sample(it(model), SIGMAS), expected) <= SAME and it.fused == 0
        assert it.blocks.NOT_FUSED in it.said[-1] and WORDS not in it.said[-1], it.said[-1]
    finally:
        kind.forward = real


def check_replaced_blocks(it: World) -> None:
    """A pack's replacement of a block stays, and gets the fused one as the original; also one that a wrapper puts there
    in every forward, and Skip Layer Guidance's, which leaves blocks out."""
    from comfy_extras.nodes_slg import SkipLayerGuidanceDiT

    def warmer(args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        kept = args["img"]
        out = extra["original_block"]({**args, "img": args["img"] * 1.1})
        return {"img": out["img"] + kept}

    model = tiny("WAN21_T2V")
    put = lambda clone: clone.set_model_patch_replace(warmer, "dit", "double_block", 1)  # noqa: E731
    it.same(with_patch(put, model), 9, SIGMAS)
    assert error(sample(with_patch(put, it(model)), SIGMAS), sample(with_patch(put, model), SIGMAS)) <= SAME
    it.same(repatched(model, "block", lambda _: True), 9, SIGMAS)
    skipping = SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, "1").result[0]
    assert error(sample(skipping, SIGMAS), sample(model, SIGMAS)) > 1e-3
    it.same(skipping, 9 + 6, SIGMAS)


def check_attention(it: World) -> None:
    """An attention override, and packs that replace the function of ComfyUI's Wan models."""
    import comfy.ldm.wan.model as wan

    def warmer(func: Callable[..., Any], q: Any, *args: Any, **kwargs: Any) -> Any:
        return func(q * 1.5, *args, **kwargs)

    model = tiny("WAN21_T2V")
    plain, other = sample(model, SIGMAS), model.clone()
    other.model_options["transformer_options"]["optimized_attention_override"] = warmer
    assert error(sample(other, SIGMAS), plain) > 1e-3
    it.same(other, 9, SIGMAS)
    real = wan.optimized_attention
    wan.optimized_attention = partial(warmer, real)
    try:
        assert it.blocks.is_known(*it.forwards())
        assert error(sample(model, SIGMAS), plain) > 1e-3
        it.same(model, 9, SIGMAS)
        asked: list[Any] = []

        def recording(*args: Any, preferred_attention: Any = None, **kwargs: Any) -> Any:
            asked.append(preferred_attention)
            return real(*args, **kwargs)

        wan.optimized_attention = recording
        for block in model.model.diffusion_model.blocks:
            block.self_attn.comfy_attention = "as the file asks"  # what ComfyUI 0.37 and newer hand to it
        sample(it(model), SIGMAS)
        assert asked.count("as the file asks") == 9, asked
    finally:
        wan.optimized_attention = real


def check_step_cache(it: World) -> None:
    """A step cache keeps and skips as it does with ComfyUI's blocks, and its tokens are not overwritten."""
    for name in ("t2v", "fun"):
        make, extra, size = variants()[name]
        model = make()
        it.blocks.runs_kernel = lambda _: False
        expected = sample(it(model, **every_second()), EULER, extra, size=size)
        assert it.fused == 0
        it.blocks.runs_kernel = lambda _: True
        found = sample(it(model, **every_second()), EULER, extra, size=size)
        words, plain = (said.replace(f"; {WORDS}", "") for said in reversed(it.said[-2:]))
        assert error(found, expected) <= SAME and f"{it.fused} self-attention, as chosen" in words, (it.fused, it.said)
        assert words.split("step cache")[1] == plain.split("step cache")[1]
        it.fused = 0


def check_compared_step(it: World) -> None:
    """The step that is compared, models that are compiled, and training are ComfyUI's own."""
    import torch
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    model = tiny("WAN21_T2V")
    sample(it(model, compare="on"), SIGMAS)
    assert it.fused == 6, it.fused
    it.same(with_patch(lambda clone: set_torch_compile_wrapper(clone, backend="eager"), model), 0, SIGMAS)
    block, args = model.model.diffusion_model.blocks[0], dict.fromkeys(it.blocks.ARGUMENTS)
    args |= {"img": rows(1, 8, 48), "vec": rows(1, 1, 6, 48), "pe": rows(1, 8, 1, 12, 2, 2), "transformer_options": {}}
    with torch.no_grad():
        assert it.blocks.can_fuse(block) and it.blocks.fits(args) and not it.blocks.fits({**args, "more": 1})
        assert not it.blocks.fits({**args, "vec": rows(1, 3, 6, 48)})  # rows that divide no tokens
    assert not it.blocks.fits(args)
