"""Sound and hostile LoRA files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from random import Random

import torch
from torch import Tensor

from tools.hostile.changes import damaged, edited
from tools.hostile.checkpoints import (
    described,
    empty_tensors,
    grown_names,
    joined,
    many_tensors,
    split,
    stored,
)
from wan_core.models.wan.config import DiTConfig


@cache
def lora_state() -> dict[str, Tensor]:
    """A bit of everything, for `LORA_MODEL`."""
    torch.manual_seed(0)

    def pair(name: str, n: int, k: int) -> dict[str, Tensor]:
        return {f"{name}.lora_down.weight": torch.randn(2, k), f"{name}.lora_up.weight": torch.randn(n, 2)}

    return {
        **pair("diffusion_model.blocks.0.self_attn.q", 8, 8),
        "diffusion_model.blocks.0.self_attn.q.alpha": torch.tensor(2.0),
        **pair("diffusion_model.blocks.1.ffn.0", 16, 8),
        "diffusion_model.blocks.1.ffn.0.dora_scale": torch.rand(16, 1),
        "diffusion_model.blocks.0.ffn.2.diff": torch.randn(8, 16),
        "diffusion_model.blocks.0.ffn.2.diff_b": torch.randn(8),
        "diffusion_model.blocks.1.diff_m": torch.randn(1, 6, 8),
        "lora_unet_blocks_1_cross_attn_k.hada_w1_a": torch.randn(8, 1),
        "lora_unet_blocks_1_cross_attn_k.hada_w1_b": torch.randn(1, 8),
        "lora_unet_blocks_1_cross_attn_k.hada_w2_a": torch.randn(8, 2),
        "lora_unet_blocks_1_cross_attn_k.hada_w2_b": torch.randn(2, 8),
        "lora_unet_blocks_1_cross_attn_v.lokr_w1": torch.randn(2, 4),
        "lora_unet_blocks_1_cross_attn_v.lokr_w2_a": torch.randn(4, 1),
        "lora_unet_blocks_1_cross_attn_v.lokr_w2_b": torch.randn(1, 2),
    }


LORA_MODEL = DiTConfig(
    in_channels=2, out_channels=2, dim=8, ffn_dim=16, num_heads=2, num_layers=2, text_dim=4, freq_dim=4
)


@cache
def base_lora() -> bytes:
    return stored(lora_state(), {"format": "pt"})


def mixed_up_lora(random: Random) -> bytes:
    """A sound container of the wrong tensors."""
    state = dict(lora_state())
    for _ in range(random.randint(1, 5)):
        name, other = random.choice(sorted(state)), random.choice(sorted(state))
        what = random.choice(("drop", "rename", "shape", "dtype", "swap", "value"))
        if what == "drop" and len(state) > 1:
            del state[name]
        elif what == "rename":
            new = "".join(random.choices("ab._01loraupdwnkh", k=random.randint(1, 20))) + name[random.randrange(30) :]
            state[new] = state.pop(name)
        elif what == "shape":
            state[name] = torch.zeros([random.randint(0, 9) for _ in range(random.randint(0, 4))])
        elif what == "dtype":
            state[name] = state[name].to(random.choice((torch.int64, torch.uint8, torch.bool, torch.float16)))
        elif what == "swap":
            state[name], state[other] = state[other], state[name]
        else:
            state[name] = torch.full_like(state[name].float(), random.choice((math.nan, math.inf, -1e38, 0.0)))
    settings = json.dumps(edited(random, {"transformer.lora_alpha": 8, "transformer.alpha_pattern": {"q": 2}}))
    return stored(state, {"lora_adapter_metadata": settings} if random.random() < 0.3 else {})


def lora(random: Random) -> bytes:
    what = random.random()
    if what < 0.35:
        return damaged(random, base_lora())
    if what < 0.7:
        return mixed_up_lora(random)
    if what < 0.75:
        return stored(described(random, lora_state(), "diffusion_model."), {})
    header, values = split(base_lora())
    return joined(edited(random, header, random.choice((1, 2, 3))), values)


def _wide_lora(rank: int) -> bytes:
    """Factors that would make a weight of `rank` x `rank`, in a file of a few bytes for each row."""
    name = "lora_unet_blocks_0_ffn_0"
    return stored(
        {
            f"{name}.lokr_w1": torch.zeros(1, 1),
            f"{name}.lokr_w2_a": torch.zeros(rank, 1),
            f"{name}.lokr_w2_b": torch.zeros(1, rank),
        },
        {},
    )


_ALPHAS = {"a.alpha_pattern": dict.fromkeys(map(str, range(300_000)), 1)}

LORA_BOMBS: tuple[Callable[[], bytes], ...] = (
    lambda: _wide_lora(2_000_000),
    lambda: many_tensors(20_000),
    lambda: empty_tensors(f"blocks.{n}.self_attn.q.lora_down.weight" for n in range(19_000)),
    lambda: stored(lora_state(), {"lora_adapter_metadata": json.dumps(_ALPHAS)}),
    lambda: stored({"lora_unet_" * 90 + ".lora_up.weight": torch.zeros(1, 1)}, {}),
    *(
        lambda word=word: empty_tensors(grown_names(word, ".lora_up.weight"))
        for word in ("lora_unet_", "lora_", ".", "lora_up.", "transformer.")
    ),
)  # fmt: skip
