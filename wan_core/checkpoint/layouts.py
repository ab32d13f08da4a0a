"""Key tables: which file name means which official name.

A layout is a function `names -> {file name: official name} | None`: None when the names are not in this layout,
otherwise every name that it knows. Names it leaves out are reported by `detect` as unexpected, official names it
leaves unreached as missing. Official names are those of the Wan 2.2 repository, which are also the parameter names of
our modules. The tables of transformers are their families' (`wan_core.models.wan.families`).

`LAYOUTS` is tried in order. A prefix common to all names (`model.diffusion_model.`, `vae.`) is taken off before, for
any kind. Source: Wan2.2/wan/modules/*.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, TypeAlias

from wan_core.checkpoint.layouts_text import gguf_text_names, hf_text_names
from wan_core.checkpoint.layouts_vae import diffusers_vae_names
from wan_core.models.wan.families import FAMILIES

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
    family: str = ""  # of a transformer


LAYOUTS = (
    *(Layout("dit", name, names, family.name) for family in FAMILIES.values() for name, names in family.layouts),
    Layout("text_encoder", "official", official_text_names),
    Layout("text_encoder", "huggingface", hf_text_names),
    Layout("text_encoder", "llama.cpp", gguf_text_names),
    Layout("vae", "official", official_vae_names),
    Layout("vae", "diffusers", diffusers_vae_names),
)
