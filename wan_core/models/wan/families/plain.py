"""The plain Wan transformer on disk: the names of its parameters in each layout, and its numbers, read from shapes and
metadata. The files of every family hold it, with parameters of their own. Imports no torch.

Official names are those of the Wan 2.2 repository, which are also the parameter names of our modules. ComfyUI's files
have them too, with a prefix. Source: Wan2.2/wan/modules/model.py; diffusers transformer_wan.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from wan_core.config.checks import UserError
from wan_core.config.limits import MAX_JSON
from wan_core.models.wan.config import DiTConfig

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
KeyTable: TypeAlias = Callable[[Collection[str]], "dict[str, str] | None"]
MAX_SIZE = 2**20  # no real model comes near; bounds what a damaged file can make us build

IN_BLOCK = re.compile(r"blocks\.(0|[1-9]\d{0,5})\.(.+)")


def block_count(names: Collection[str]) -> int:
    """One more than the highest block number among official names."""
    return max((int(match[1]) + 1 for name in names if (match := IN_BLOCK.fullmatch(name))), default=0)


def shape_of(shapes: Shapes, name: str, axes: int) -> tuple[int, ...]:
    """The shape of a tensor that must be there. Raises UserError."""
    if name not in shapes:
        raise UserError(f"the tensor {name} is missing. Download it again.")
    if len(shapes[name]) != axes or 0 in shapes[name]:
        raise UserError(f"the tensor {name} has the shape {list(shapes[name])}, and {axes} axes are expected.")
    return shapes[name]


def number(metadata: Mapping[str, str], key: str, default: float) -> float:
    """The positive number that `metadata` has for `key`, itself or in `config`. Raises UserError for anything else."""
    said = metadata.get(key, json.dumps(transformer_settings(metadata).get(key, default)))
    try:
        value = json.loads(said[:40])
    except ValueError:
        value = None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < MAX_SIZE:
        raise UserError(f"the metadata {key} = {said[:40]!r} is not a positive number")
    return value


def transformer_settings(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """What the metadata `config` says of the transformer, as ComfyUI's files have it: JSON {"transformer": {...}}."""
    try:
        config = json.loads(metadata.get("config", "{}")[:MAX_JSON])
    except (ValueError, RecursionError):
        return {}
    settings = config.get("transformer") if isinstance(config, dict) else None
    return settings if isinstance(settings, dict) else {}


def num_heads(dim: int, metadata: Mapping[str, str]) -> int:
    """How many heads a transformer of width `dim` has: of 128 channels each, unless `metadata` says otherwise."""
    if "num_heads" not in {*metadata, *transformer_settings(metadata)} and dim % 128:
        raise UserError(
            f"its width of {dim} is no multiple of 128, so the number of heads cannot be told from the shapes. Add "
            "num_heads to the file's metadata, or keep the model's config.json beside it."
        )
    heads = int(number(metadata, "num_heads", dim // 128))
    if not 0 < heads <= dim:
        raise UserError(f"num_heads = {heads} does not fit a width of {dim}")
    return heads


def read_config(shapes: Shapes, metadata: Mapping[str, str]) -> DiTConfig:
    """The transformer that official `shapes` describe.

    `metadata` may give num_heads, text_len and eps, which shapes do not say. Raises UserError where a tensor that is
    needed is missing or has the wrong number of axes.
    """
    dim, in_channels, *patch = shape_of(shapes, "patch_embedding.weight", 5)
    volume = patch[0] * patch[1] * patch[2]
    head_rows = shape_of(shapes, "head.head.weight", 2)[0]
    if not volume or max(patch) > 16 or head_rows % volume:
        raise UserError(f"its head of {head_rows} rows does not fit patches of {' x '.join(map(str, patch))}")
    return DiTConfig(
        in_channels=in_channels,
        out_channels=head_rows // volume,
        dim=dim,
        ffn_dim=shape_of(shapes, "blocks.0.ffn.0.weight", 2)[0],
        num_heads=num_heads(dim, metadata),
        num_layers=block_count(shapes),
        text_dim=shape_of(shapes, "text_embedding.0.weight", 2)[1],
        text_len=int(number(metadata, "text_len", DiTConfig.text_len)),
        freq_dim=shape_of(shapes, "time_embedding.0.weight", 2)[1],
        patch_size=(patch[0], patch[1], patch[2]),
        eps=number(metadata, "eps", DiTConfig.eps),
        image_dim=shape_of(shapes, "img_emb.proj.1.weight", 2)[1] if takes_features(shapes) else None,
    )


def fields_of(config: DiTConfig) -> dict[str, Any]:
    """The numbers of a plain transformer but for its family, for a configuration that has more of them."""
    names = (field.name for field in dataclasses.fields(DiTConfig))
    return {name: getattr(config, name) for name in names if name != "family"}


# ------------------------------------------------------------------------------------------------- names of parameters

# Official module -> Diffusers module. The norms are swapped: official norm3 (affine, before cross-attention) is
# Diffusers norm2; official norm1 and norm2 have no parameters.
_TOP = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
}
_PROJECTIONS = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0"}
_BLOCK = {
    **{f"self_attn.{ours}": f"attn1.{theirs}" for ours, theirs in _PROJECTIONS.items()},
    **{f"cross_attn.{ours}": f"attn2.{theirs}" for ours, theirs in _PROJECTIONS.items()},
    "norm3": "norm2",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
}
_BLOCK_NORMS = {
    "self_attn.norm_q": "attn1.norm_q",
    "self_attn.norm_k": "attn1.norm_k",
    "cross_attn.norm_q": "attn2.norm_q",
    "cross_attn.norm_k": "attn2.norm_k",
}

# Wan 2.1 image-to-video has these beside the others.
_IMAGE_TOP = {
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
}
_IMAGE_BLOCK = {"cross_attn.k_img": "attn2.add_k_proj", "cross_attn.v_img": "attn2.add_v_proj"}
_IMAGE_BLOCK_NORMS = {"cross_attn.norm_k_img": "attn2.norm_added_k"}


def _parameters(modules: dict[str, str], *kinds: str) -> dict[str, str]:
    return {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in kinds}


_TOP_PARAMETERS = {**_parameters(_TOP, "weight", "bias"), "head.modulation": "scale_shift_table"}
_BLOCK_PARAMETERS = {
    **_parameters(_BLOCK, "weight", "bias"),
    **_parameters(_BLOCK_NORMS, "weight"),
    "modulation": "scale_shift_table",
}
_IMAGE_TOP_PARAMETERS = _parameters(_IMAGE_TOP, "weight", "bias")
_IMAGE_BLOCK_PARAMETERS = {**_parameters(_IMAGE_BLOCK, "weight", "bias"), **_parameters(_IMAGE_BLOCK_NORMS, "weight")}
IMAGE_PARAMETER = "img_emb.proj.0.weight"  # of transformers that take CLIP features alone
# Official name -> Diffusers name, of all.
_ALL_TOP = {**_TOP_PARAMETERS, **_IMAGE_TOP_PARAMETERS}
_ALL_BLOCK = {**_BLOCK_PARAMETERS, **_IMAGE_BLOCK_PARAMETERS}


def with_bias(*modules: str) -> tuple[str, ...]:
    """The weight and the bias of each of these modules."""
    return tuple(f"{module}.{kind}" for module in modules for kind in ("weight", "bias"))


def parameter_names(names: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of `num_layers` blocks; image features too, where `names` has some of theirs."""
    image = takes_features(names)
    top, block = (_ALL_TOP, _ALL_BLOCK) if image else (_TOP_PARAMETERS, _BLOCK_PARAMETERS)
    return [*top, *(f"blocks.{n}.{name}" for n in range(num_layers) for name in block)]


def takes_features(names: Collection[str]) -> bool:
    """Whether official names are those of a transformer that takes CLIP features of an image."""
    return any(
        name in _IMAGE_TOP_PARAMETERS
        or ((match := IN_BLOCK.fullmatch(name)) is not None and match[2] in _IMAGE_BLOCK_PARAMETERS)
        for name in names
    )


def official_names(names: Collection[str]) -> dict[str, str] | None:
    """The official layout: the identity on the names it knows."""
    return _names(names, {n: n for n in _ALL_TOP}, {n: n for n in _ALL_BLOCK})


def diffusers_names(names: Collection[str]) -> dict[str, str] | None:
    top = {theirs: ours for ours, theirs in _ALL_TOP.items()}
    return _names(names, top, {theirs: ours for ours, theirs in _ALL_BLOCK.items()})


def diffusers_modules(num_layers: int) -> dict[str, str]:
    """Diffusers module -> official module of a transformer of `num_layers` blocks, with the parameters that belong to
    none: what LoRAs name."""
    top = {theirs: ours for ours, theirs in {**_TOP, **_IMAGE_TOP}.items()} | {"scale_shift_table": "head.modulation"}
    modules = {**_BLOCK, **_BLOCK_NORMS, **_IMAGE_BLOCK, **_IMAGE_BLOCK_NORMS, "modulation": "scale_shift_table"}
    block = {theirs: ours for ours, theirs in modules.items()}
    return top | {
        f"blocks.{n}.{theirs}": f"blocks.{n}.{ours}" for n in range(num_layers) for theirs, ours in block.items()
    }


def with_own(own: Mapping[str, str], names: Collection[str], table: KeyTable = official_names) -> dict[str, str] | None:
    """The names `own` to a family, with what `table` knows of the other `names`; None where none are its own."""
    others = table([name for name in names if name not in own]) if own else None
    return None if others is None else {**others, **own}


def _names(names: Collection[str], top: dict[str, str], block: dict[str, str]) -> dict[str, str] | None:
    official: dict[str, str] = {}
    for name in names:
        if name in top:
            official[name] = top[name]
        elif (match := IN_BLOCK.fullmatch(name)) and match[2] in block:
            official[name] = f"blocks.{match[1]}.{block[match[2]]}"
    return official if 2 * len(official) > len(names) else None
