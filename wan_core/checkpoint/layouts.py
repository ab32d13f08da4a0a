"""Key tables: which file name means which official name.

A layout is a function `names -> {file name: official name} | None`: None when the names are not in this layout,
otherwise every name that it knows. Names it leaves out are reported by `detect` as unexpected, official names it
leaves unreached as missing. Official names are those of the Wan 2.2 repository, which are also the parameter names of
our modules.

`LAYOUTS` is tried in order. A prefix common to all names (`model.diffusion_model.`, `vae.`) is taken off before, for
any kind. Source: Wan2.2/wan/modules/*.py; diffusers transformer_wan.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, TypeAlias

from wan_core.checkpoint.layouts_text import gguf_text_names, hf_text_names
from wan_core.checkpoint.layouts_vae import diffusers_vae_names

# ------------------------------------------------------------------------------------------------------------------ DiT

# Official module -> Diffusers module. The norms are swapped: official norm3 (affine, before cross-attention) is
# Diffusers norm2; official norm1 and norm2 have no parameters.
_DIT_TOP = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
}
_PROJECTIONS = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_DIT_BLOCK = {
    **{f"self_attn.{ours}": f"attn1.{theirs}" for ours, theirs in _PROJECTIONS.items()},
    **{f"cross_attn.{ours}": f"attn2.{theirs}" for ours, theirs in _PROJECTIONS.items()},
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
_DIT_BLOCK_NORMS = {
    "self_attn.norm_q": "attn1.norm_q",
    "self_attn.norm_k": "attn1.norm_k",
    "cross_attn.norm_q": "attn2.norm_q",
    "cross_attn.norm_k": "attn2.norm_k",
}


def _parameters(modules: dict[str, str], *kinds: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in kinds}


_DIT_TOP_PARAMETERS = {**_parameters(_DIT_TOP, "weight", "bias"), "head.modulation": "scale_shift_table"}
_DIT_BLOCK_PARAMETERS = {
    **_parameters(_DIT_BLOCK, "weight", "bias"),
    **_parameters(_DIT_BLOCK_NORMS, "weight"),
    "modulation": "scale_shift_table",
}
_BLOCK = re.compile(r"blocks\.(0|[1-9]\d{0,5})\.(.+)")


def dit_names(num_layers: int) -> list[str]:
    """Every official parameter name of a transformer of `num_layers` blocks."""
    return [*_DIT_TOP_PARAMETERS, *(f"blocks.{n}.{name}" for n in range(num_layers) for name in _DIT_BLOCK_PARAMETERS)]


def official_dit_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout: the identity on the names it knows."""
    return _dit_names(names, {n: n for n in _DIT_TOP_PARAMETERS}, {n: n for n in _DIT_BLOCK_PARAMETERS})


def diffusers_dit_names(names: Collection[str]) -> dict[str, str] | None:
    """Diffusers' `WanTransformer3DModel`."""
    top = {theirs: ours for ours, theirs in _DIT_TOP_PARAMETERS.items()}
    return _dit_names(names, top, {theirs: ours for ours, theirs in _DIT_BLOCK_PARAMETERS.items()})


def diffusers_dit_modules(num_layers: int) -> dict[str, str]:
    """Diffusers module -> official module of a transformer of `num_layers` blocks, with the parameters that belong to
    none: what LoRAs name."""
    found = {theirs: ours for ours, theirs in _DIT_TOP.items()} | {"scale_shift_table": "head.modulation"}
    block = {
        theirs: ours for ours, theirs in {**_DIT_BLOCK, **_DIT_BLOCK_NORMS, "modulation": "scale_shift_table"}.items()
    }
    return found | {
        f"blocks.{n}.{theirs}": f"blocks.{n}.{ours}" for n in range(num_layers) for theirs, ours in block.items()
    }


def _dit_names(names: Collection[str], top: dict[str, str], block: dict[str, str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for name in names:
        if name in top:
            found[name] = top[name]
        elif (match := _BLOCK.fullmatch(name)) and match[2] in block:
            found[name] = f"blocks.{match[1]}.{block[match[2]]}"
    return found if 2 * len(found) > len(names) else None


def block_count(names: Collection[str]) -> int:
    """One more than the highest block number among official names."""
    return max((int(match[1]) + 1 for name in names if (match := _BLOCK.fullmatch(name))), default=0)


# ---------------------------------------------------------------------------------------- official text encoder and VAE

_TEXT = re.compile(
    r"(token_embedding|norm|blocks\.\d{1,6}\.(norm1|norm2|attn\.[qkvo]|ffn\.(gate\.0|fc1|fc2)|pos_embedding\.embedding))\.weight"
)
_VAE = re.compile(r"conv[12]\.(weight|bias)|(encoder|decoder)\.(conv1|downsamples|upsamples|middle|head)\..+")


def official_text_names(names: Collection[str]) -> dict[str, str] | None:
    """The official `models_t5_umt5-xxl-enc-bf16.pth`."""
    return _identity(names, _TEXT)


def official_vae_names(names: Collection[str]) -> dict[str, str] | None:
    """The official `Wan2.1_VAE.pth` and `Wan2.2_VAE.pth`."""
    return _identity(names, _VAE)


def _identity(names: Collection[str], pattern: re.Pattern[str]) -> dict[str, str] | None:
    found = {name: name for name in names if pattern.fullmatch(name)}
    return found if 2 * len(found) > len(names) else None


# ------------------------------------------------------------------------------------------------------------ the table


Kind: TypeAlias = Literal["dit", "text_encoder", "vae"]


class Layout(NamedTuple):
    kind: Kind
    name: str
    names: Callable[[Collection[str]], dict[str, str] | None]


LAYOUTS = (
    Layout("dit", "official", official_dit_names),
    Layout("dit", "diffusers", diffusers_dit_names),
    Layout("text_encoder", "official", official_text_names),
    Layout("text_encoder", "huggingface", hf_text_names),
    Layout("text_encoder", "llama.cpp", gguf_text_names),
    Layout("vae", "official", official_vae_names),
    Layout("vae", "diffusers", diffusers_vae_names),
)
