"""The names of parameters of the family `wan` on disk: which file name means which official name.

Official names are those of the Wan 2.2 repository, which are also the parameter names of our modules. ComfyUI's files
have them too, with a prefix. Source: Wan2.2/wan/modules/model.py; diffusers transformer_wan.py.
"""

from __future__ import annotations

from collections.abc import Collection

from wan_core.models.wan.families.shapes import IN_BLOCK

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

# Of Wan 2.1 image-to-video, beside the others.
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
# Official name -> Diffusers name, of all.
_ALL_TOP = {**_TOP_PARAMETERS, **_IMAGE_TOP_PARAMETERS}
_ALL_BLOCK = {**_BLOCK_PARAMETERS, **_IMAGE_BLOCK_PARAMETERS}


def parameter_names(found: Collection[str], num_layers: int) -> list[str]:
    """Every official parameter name of a transformer of `num_layers` blocks; those of the image features too, where
    `found` has any of them."""
    image = takes_features(found)
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
    """Diffusers' `WanTransformer3DModel`."""
    top = {theirs: ours for ours, theirs in _ALL_TOP.items()}
    return _names(names, top, {theirs: ours for ours, theirs in _ALL_BLOCK.items()})


def diffusers_modules(num_layers: int) -> dict[str, str]:
    """Diffusers module -> official module of a transformer of `num_layers` blocks, with the parameters that belong to
    none: what LoRAs name."""
    found = {theirs: ours for ours, theirs in {**_TOP, **_IMAGE_TOP}.items()} | {"scale_shift_table": "head.modulation"}
    modules = {**_BLOCK, **_BLOCK_NORMS, **_IMAGE_BLOCK, **_IMAGE_BLOCK_NORMS, "modulation": "scale_shift_table"}
    block = {theirs: ours for ours, theirs in modules.items()}
    return found | {
        f"blocks.{n}.{theirs}": f"blocks.{n}.{ours}" for n in range(num_layers) for theirs, ours in block.items()
    }


def _names(names: Collection[str], top: dict[str, str], block: dict[str, str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for name in names:
        if name in top:
            found[name] = top[name]
        elif (match := IN_BLOCK.fullmatch(name)) and match[2] in block:
            found[name] = f"blocks.{match[1]}.{block[match[2]]}"
    return found if 2 * len(found) > len(names) else None
