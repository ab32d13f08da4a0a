"""Key tables: which file name means which official name.

A layout is a function `names -> {file name: official name} | None`: None when the names are not in this layout,
otherwise every name that it knows. `detect` reports names it leaves out as unexpected, and official names it
leaves unreached as missing. Official names are those of the Wan 2.2 repository, which are also the parameter names of
our modules. The tables of transformers are their families' (`wan_core.models.wan.families`), those of VAEs and of the
encoders of pictures and sound are `layouts_vae` and `layouts_encoders`. Diffusers folders and ComfyUI's files name a
UMT5 encoder's tensors as Hugging Face's `UMT5EncoderModel` does; they are translated by the tables below.

`LAYOUTS` is tried in order. A prefix common to all names (`model.diffusion_model.`, `vae.`) is taken off before, for
any kind. Source: Wan2.2/wan/modules/*.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from wan_core.checkpoint.layouts_encoders import VISION_LAYOUTS, speech_names, vision_names
from wan_core.checkpoint.layouts_vae import diffusers_vae_names, tiny_vae_names
from wan_core.checkpoint.opened import CheckpointError
from wan_core.models.text.umt5 import TextConfig
from wan_core.models.wan.families import FAMILIES
from wan_core.models.wan.families.plain import Shapes, block_count, number, shape_of

# Modules of a UMT5 encoder: official name, Hugging Face's, and llama.cpp's in GGUF files of the architecture t5encoder.
TEXT_MODULES = (
    ("token_embedding", "shared", "token_embd"),
    ("token_embedding", "encoder.embed_tokens", "token_embd"),
    ("norm", "encoder.final_layer_norm", "enc.output_norm"),
)
TEXT_BLOCK_MODULES = (
    ("norm1", "layer.0.layer_norm", "attn_norm"),
    ("attn.q", "layer.0.SelfAttention.q", "attn_q"),
    ("attn.k", "layer.0.SelfAttention.k", "attn_k"),
    ("attn.v", "layer.0.SelfAttention.v", "attn_v"),
    ("attn.o", "layer.0.SelfAttention.o", "attn_o"),
    ("pos_embedding.embedding", "layer.0.SelfAttention.relative_attention_bias", "attn_rel_b"),
    ("norm2", "layer.1.layer_norm", "ffn_norm"),
    ("ffn.gate.0", "layer.1.DenseReluDense.wi_0", "ffn_gate"),
    ("ffn.fc1", "layer.1.DenseReluDense.wi_1", "ffn_up"),
    ("ffn.fc2", "layer.1.DenseReluDense.wo", "ffn_down"),
)
# Names of modules that torch puts around others: a compiled model, FSDP, checkpointed activations. In LoRAs of kohya's
# form the dots are underscores.
_WRAPPER = "(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)"
_WRAPPERS = re.compile(rf"(?<![A-Za-z0-9]){_WRAPPER}[._]|(?:[._]{_WRAPPER})+$")


def unwrapped(name: str) -> str:
    """A tensor's or module's name without the names of wrappers."""
    return _WRAPPERS.sub("", name) if "_mod" in name else name


_INDEX = "0|[1-9][0-9]{0,3}"
_BLOCK = re.compile(rf"encoder\.block\.({_INDEX})\.(.+)")
_GGUF_BLOCK = re.compile(rf"enc\.blk\.({_INDEX})\.(.+)")

MAX_BUCKETS = 256


def hf_text_names(names: Collection[str]) -> dict[str, str] | None:
    """Name in the file -> official name, of every tensor of a Hugging Face `UMT5EncoderModel`; None if this is another
    layout. Scales and the like are renamed with their weights. Names that belong to no module of the encoder
    (`spiece_model`, `scaled_fp8`, a decoder) have no key.

    `shared.weight` and `encoder.embed_tokens.weight` are the same tensor, stored once or twice: both become
    `token_embedding.weight`. Otherwise the table is one to one."""
    if "encoder.block.0.layer.0.SelfAttention.q.weight" not in names:
        return None
    return _translated(names, _BLOCK, 1)


def gguf_text_names(names: Collection[str]) -> dict[str, str] | None:
    """The official names of the tensors of a T5 encoder in llama.cpp's layout; None if this is another layout."""
    return _translated(names, _GGUF_BLOCK, 2) if "enc.blk.0.attn_q.weight" in names else None


def _translated(names: Collection[str], block: re.Pattern[str], column: int) -> dict[str, str]:
    """Names of a file -> official names; block: how the file names what is in a block. column: of the tables."""
    top, inner = ({row[column]: row[0] for row in table} for table in (TEXT_MODULES, TEXT_BLOCK_MODULES))
    translated: dict[str, str] = {}
    for name in names:
        match = block.fullmatch(name)
        module, _, parameter = (match[2] if match else name).rpartition(".")
        table, prefix = (inner, f"blocks.{match[1]}.") if match else (top, "")
        if module in table:
            translated[name] = f"{prefix}{table[module]}.{parameter}"
    return translated


def text_config(shapes: Shapes, metadata: Mapping[str, str]) -> TextConfig:
    """The architecture that a text encoder's file describes. shapes: official tensor name -> shape, among other names.
    metadata: `relative_attention_max_distance`, a number, is used if present, else 128. Raises UserError for shapes
    that are not those of a UMT5 encoder, with the tensor that shows it."""
    num_layers = block_count(shapes)
    tables = [f"blocks.{n}.pos_embedding.embedding.weight" for n in range(num_layers)]
    lacking = next((name for name in tables if name not in shapes), None)
    if lacking is not None:
        raise CheckpointError(
            f"a T5 encoder, not UMT5: it has no {lacking}. Wan needs umt5-xxl; t5-xxl is another model."
        )
    vocab_size, dim = shape_of(shapes, "token_embedding.weight", 2)
    dim_attn, _ = shape_of(shapes, "blocks.0.attn.q.weight", 2)
    dim_ffn, _ = shape_of(shapes, "blocks.0.ffn.fc1.weight", 2)
    num_buckets, num_heads = shape_of(shapes, "blocks.0.pos_embedding.embedding.weight", 2)
    if dim_attn % num_heads:
        raise CheckpointError(f"not a UMT5 encoder: {dim_attn} attention channels do not split into {num_heads} heads")
    max_distance = int(number(metadata, "relative_attention_max_distance", 128))
    if num_buckets % 4 or num_buckets > MAX_BUCKETS or num_buckets // 4 >= max_distance:
        raise CheckpointError(
            f"not a UMT5 encoder: {num_buckets} position buckets for distances up to {max_distance}; "
            f"a multiple of 4 up to {MAX_BUCKETS} is expected"
        )
    return TextConfig(
        vocab_size=vocab_size,
        dim=dim,
        dim_attn=dim_attn,
        dim_ffn=dim_ffn,
        num_heads=num_heads,
        num_layers=num_layers,
        num_buckets=num_buckets,
        max_distance=max_distance,
    )


# ---------------------------------------------------------------------------------------- official text encoder and VAE

_TEXT = re.compile(
    r"(token_embedding|norm|blocks\.\d{1,6}\.(norm1|norm2|attn\.[qkvo]|ffn\.(gate\.0|fc1|fc2)|pos_embedding\.embedding))\.weight"
)
_VAE = re.compile(r"conv[12]\.(weight|bias)|(encoder|decoder)\.(conv1|downsamples|upsamples|middle|head)\..+")


def _identity(names: Collection[str], pattern: re.Pattern[str]) -> dict[str, str] | None:
    official = {name: name for name in names if pattern.fullmatch(name)}
    return official if 2 * len(official) > len(names) else None


# ------------------------------------------------------------------------------------------------------------ the table


Kind: TypeAlias = Literal["dit", "text_encoder", "vae", "clip_vision", "audio_encoder"]


class Layout(NamedTuple):
    kind: Kind
    name: str
    names: Callable[[Collection[str]], dict[str, str] | None]
    family: str = ""  # of a transformer
    unread: re.Pattern[str] | None = None  # names of tensors that may be there and are not read


_ANY = re.compile(".*", re.DOTALL)
LAYOUTS = (
    *(
        Layout("dit", name, names, family.name, family.constants)
        for family in FAMILIES.values()
        for name, names in family.layouts
    ),
    Layout("text_encoder", "official", partial(_identity, pattern=_TEXT)),  # models_t5_umt5-xxl-enc-bf16.pth
    Layout("text_encoder", "huggingface", hf_text_names),
    Layout("text_encoder", "llama.cpp", gguf_text_names),
    Layout("vae", "official", partial(_identity, pattern=_VAE)),  # Wan2.1_VAE.pth and Wan2.2_VAE.pth
    Layout("vae", "diffusers", diffusers_vae_names),
    Layout("vae", "tiny", tiny_vae_names),
    *(Layout("clip_vision", name, partial(vision_names, layout=name), "", _ANY) for name in VISION_LAYOUTS),
    Layout("audio_encoder", "huggingface", speech_names, "", _ANY),
)
