"""The blocks of ComfyUI's own Wan models with the engine's fused passes between their matrix products.

ComfyUI computes norms, modulation, gates and rotation one by one, and each reads and writes all tokens. Here they are
the passes of `wan_core.ops.kernels.fused`, in the place of a block by ComfyUI's hook `patches_replace`. Modules with
weights are called as ComfyUI calls them: it alone knows where weights are and what is patched into them.

A newer ComfyUI may compute something else in a block of the same name: a tiny one is computed both ways, and if the
results differ, all blocks are ComfyUI's.

Legend: B batch, L tokens, C channels, H heads, D head dim, F rows of modulation (frames with their own timestep, or 1).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from comfy.ldm.wan import model as wan
from comfy.model_management import cast_to
from torch import Tensor, nn

from wan_core.ops.attention.sdpa import sdpa
from wan_core.ops.kernels import fused
from wan_core.ops.kernels.fused import runs_kernel
from wan_core.sampling.native.attention import as_heads, qualified
from wan_core.sampling.native.run import NativeRun

log = logging.getLogger("WanCore")
MODELS = ("WanModel", "CameraWanModel")  # all that their blocks get beside the image's rows is in `ARGUMENTS`
ARGUMENTS = {"img", "txt", "vec", "pe", "transformer_options"}
OUTSIDE = {"double_block"}  # patches that run between blocks. All others, and those to come, may be read by a block
PASSES = "norms, gates and rotations by"
FUSED, NOT_FUSED = f"{PASSES} WanCore", f"{PASSES} ComfyUI, whose blocks are others than those that WanCore knows"
Run = Callable[[dict[str, Any]], dict[str, Any]]
"""The arguments of a block -> {"img": its tokens}."""


def run_fused(
    run: NativeRun,
    executor: Any,
    x: Tensor,
    timestep: Tensor,
    context: Tensor,
    clip_fea: Tensor | None = None,
    time_dim_concat: Tensor | None = None,
    transformer_options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Tensor:
    """A wrapper of DIFFUSION_MODEL: a forward with fused blocks. It must be the innermost one, because every forward
    gets new patches, which a step cache would take for those of another node."""
    options, model = transformer_options or {}, executor.class_obj
    if type(model).__name__ in MODELS and not run.plain and not torch.compiler.is_compiling():
        image_rows = None if clip_fea is None else clip_fea.shape[-2]
        options = FusedForward(run, image_rows).hooked(options, model.blocks)
    return executor(x, timestep, context, clip_fea, time_dim_concat, options, **kwargs)


class FusedForward:
    """One forward. It holds what its blocks share: the table of rotations."""

    def __init__(self, run: NativeRun, image_rows: int | None) -> None:
        """image_rows: of the text, those before it that are an image's (Wan 2.1)."""
        self.run, self.image_rows = run, image_rows
        self.table: tuple[Any, Any] = (None, None)

    def hooked(self, options: dict[str, Any], blocks: nn.ModuleList) -> dict[str, Any]:
        """A copy of transformer_options with fused blocks. What another node put in the place of a block stays there,
        and gets the fused one as the block that it replaces."""
        replaced = options.get("patches_replace", {})
        dit = dict(replaced.get("dit", {}))
        for index, block in enumerate(blocks):
            key = "double_block", index
            if can_fuse(block):
                dit[key] = partial(self.replace, block, dit.get(key))
        return {**options, "patches_replace": {**replaced, "dit": dit}}

    def replace(self, block: Any, there: Any, args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        own = partial(self.compute, block, extra["original_block"])
        return own(args) if there is None else there(args, {**extra, "original_block": own})

    def compute(self, block: Any, original: Run, args: dict[str, Any]) -> dict[str, Any]:
        """A block; `original` computes what cannot be fused."""
        if not fits(args):
            return original(args)
        patch = patch_within(args["transformer_options"])
        if patch is not None:
            self.run.note(f"{PASSES} ComfyUI, because another node changes blocks within ({patch})")
            return original(args)
        if not is_known(wan.WanAttentionBlock.forward, wan.WanSelfAttention.forward, wan.optimized_attention):
            self.run.note(NOT_FUSED)
            return original(args)
        rope = self.table[1] if self.table[0] is args["pe"] else args["pe"][0, ..., 0].contiguous()  # cos and sin
        self.table = args["pe"], rope
        self.run.note(FUSED)
        return {"img": fused_block(block, args, rope, self.image_rows)}


def can_fuse(block: Any) -> bool:
    """Whether a block is ComfyUI's own, which no node has changed."""
    if not unchanged(block, wan.WanAttentionBlock) or not unchanged(block.self_attn, wan.WanSelfAttention):
        return False
    return all(isinstance(norm, nn.RMSNorm) for norm in (block.self_attn.norm_q, block.self_attn.norm_k))


def unchanged(module: Any, kind: type[nn.Module]) -> bool:
    """Whether `module` has the forward of `kind` as ComfyUI wrote it: not of a subclass, an instance or another pack,
    without hooks and not compiled."""
    own = getattr(module.forward, "__func__", None) is kind.forward and kind.forward.__globals__ is vars(wan)
    return own and not module._forward_hooks and not module._forward_pre_hooks


def fits(args: Mapping[str, Any]) -> bool:
    """Whether kernels take the arguments of a block."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or args.keys() != ARGUMENTS:
        return False
    x, e, pe = args["img"], args["vec"], args["pe"]
    if not runs_kernel(x):
        return False
    rows = e.shape[1] if e.ndim == 4 else 1
    shared = len(e) == len(x) and x.shape[1] % rows == 0 and (rows == 1 or x.shape[1] // rows >= 8)
    return shared and pe.shape[:3] == (1, x.shape[1], 1) and pe.dtype == torch.float32


def patch_within(options: Mapping[str, Any]) -> str | None:
    """The name of what another node does within blocks, such as Normalized Attention Guidance; None: nothing."""
    kinds = {kind: added for kind, added in options.get("patches", {}).items() if kind not in OUTSIDE}
    return next((f"{kind}: {', '.join(map(qualified, added))}" for kind, added in kinds.items()), None)


@cache
def is_known(*_: Any) -> bool:
    """Whether `fused_block` gives what a block of this ComfyUI does, for a tiny one with random weights. Arguments:
    what another node may replace in the meantime."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    # torch's layers: ComfyUI's own have no weights before a file is loaded, where it streams them (dynamic VRAM).
    operations = {"operations": nn, "device": torch.device("cpu"), "dtype": torch.float32}
    angles = draw(1, 8, 1, 4)
    rotations = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(-1, (2, 2))
    tokens = {"img": draw(1, 8, 16), "vec": draw(1, 2, 6, 16), "txt": draw(1, 5, 16), "pe": rotations}
    attend = lambda _, *qkv, heads, **__: sdpa(*as_heads(qkv, heads)).flatten(2)  # noqa: E731
    options = {"optimized_attention_override": attend}
    args = {**tokens, "transformer_options": options}
    try:
        block = wan.WanAttentionBlock("t2v_cross_attn", 16, 32, 2, cross_attn_norm=True, operation_settings=operations)
        block.requires_grad_(False)
        for weight in block.parameters():
            weight.data = draw(weight.shape)
        theirs = block(args["img"], args["vec"], args["pe"], args["txt"], transformer_options=options)
        ours = fused_block(block, args, rotations[0, ..., 0].contiguous(), None)
    except Exception as fault:  # noqa: BLE001 a newer ComfyUI, or a node's attention on a CPU, may raise anything
        log.info("WanCore: the blocks of this ComfyUI stay its own (%r)", fault)
        return False
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3 * float(theirs.std()))


def fused_block(block: Any, args: Mapping[str, Any], rope: Tensor, image_rows: int | None) -> Tensor:
    """What `WanAttentionBlock.forward` returns, [B, L, C]. rope: float32 [L, 1, D/2, 2], cosines and sines."""
    x, e, options = args["img"].contiguous(), args["vec"], args["transformer_options"]
    e = e[:, None] if e.ndim == 3 else e  # [B, F, 6, C]
    e = cast_to(block.modulation, dtype=torch.float32, device=x.device) + e.float()
    shift, scale, gate, shift_f, scale_f, gate_f = e.unbind(2)
    y = attended(block.self_attn, fused.norm(x, 1 + scale, shift, block.norm1.eps), rope, options)
    # Not in the memory of x: another node may keep what came in.
    x, y = (t.unflatten(1, (gate.shape[1], -1)) for t in (x, y))  # [B, F, L / F, C]
    x = torch.addcmul(x, y, gate[:, :, None].to(x.dtype)).flatten(1, 2)
    del y
    y = block.cross_attn(block.norm3(x), args["txt"], context_img_len=image_rows, transformer_options=options)
    x, y = fused.residual_norm(x, y, None, 1 + scale_f, shift_f, block.norm2.eps)
    return fused.residual(x, block.ffn(y), gate_f)


def attended(attn: Any, x: Tensor, rope: Tensor, options: dict[str, Any]) -> Tensor:
    """What `WanSelfAttention.forward` returns for x [B, L, C]."""
    ones = x.new_ones(x.shape[-1])  # whose norm is the norm's weight, with everything that is patched into it
    q = fused.head_norm(attn.q(x), attn.norm_q(ones), attn.num_heads, attn.norm_q.eps, rope).flatten(2)
    k = fused.head_norm(attn.k(x), attn.norm_k(ones), attn.num_heads, attn.norm_k.eps, rope).flatten(2)
    v = attn.v(x)
    del x
    # Which attention the model's file asks for (ComfyUI 0.37 and newer).
    wish = {"preferred_attention": attn.comfy_attention} if hasattr(attn, "comfy_attention") else {}
    x = wan.optimized_attention(q, k, v, heads=attn.num_heads, transformer_options=options, **wish)
    del q, k, v
    return attn.o(x)
