"""Run by ComfyUI's Python on a machine with an NVIDIA GPU: fused blocks by kernels (`native_checks`)."""

from __future__ import annotations

import importlib
import types
from itertools import product

from native_blocks import arguments, results
from native_models import tiny


class World:
    def __init__(self, pack: types.ModuleType) -> None:
        self.blocks = importlib.import_module("pack.nodes.host.native_blocks")
        self.real = self.blocks.fused_block


def check_kernels(it: World) -> None:
    """In half precision a block is no further from float32 than ComfyUI's own, but for chance."""
    import comfy.ldm.wan.model as wan
    import torch
    from comfy.ldm.modules.attention import attention_pytorch

    wan.optimized_attention = attention_pytorch
    model = tiny("WAN21_T2V", dim=256).model.diffusion_model
    for dtype, rows_of_e, batch in product((torch.float16, torch.bfloat16), (1, 3), (1, 2)):
        args = arguments(model, batch, rows_of_e, seed=0)
        ours, native, right = results(it, model.blocks[0], args, dtype, "cuda")
        off, theirs = (float((one - right).norm() / right.norm()) for one in (ours, native))
        assert off <= 1.05 * theirs, (dtype, rows_of_e, batch, off, theirs)
