"""Recognises unsupported files by their tensor names, so that an error can say what a file is.

`EXTENDED` is checked before the key tables: these files contain a Wan model with additions that must not be dropped
silently. `OTHERS` is checked if no key table matches, only to tell the user what the file seems to be.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple


class Foreign(NamedTuple):
    pattern: re.Pattern[str]
    is_a: str


def _table(*rows: tuple[str, str]) -> tuple[Foreign, ...]:
    return tuple(Foreign(re.compile(pattern), is_a) for pattern, is_a in rows)


_NOT_YET = "not supported yet by this version. Use the bf16 or the fp8_scaled file of the same model"

_UNSUPPORTED = "which is not supported; T2V and I2V of Wan 2.1 and 2.2, TI2V, Animate, S2V, VACE and Fun are"

EXTENDED = _table(
    (
        r"(^|\.)(lora_(A|B|up|down|unet_.*|te_.*)|lora_[^.]*|diff|diff_b|diff_m|dora_scale|hada_w[12]_[ab]|lokr_w[12](_[ab])?)(\.|$)",
        "a LoRA or another set of differences to a model. Load the model it was made for and give this file as a LoRA",
    ),
    (
        r"(^|\.)(scaled_fp8|scale_weight|weight_scale|weight_scale_inv|weight_scale_2|scale_input|input_scale|comfy_quant)$",
        f"a checkpoint with scaled (quantised) weights, {_NOT_YET}",
    ),
    (
        r"\.(qweight|qzeros|absmax|quant_map|quant_state\..*|_data|SCB)$",
        f"a checkpoint with quantised weights, {_NOT_YET}",
    ),
    (
        r"(^|\.)(zip_motion_out|motioner)(\.|$)",
        f"a Wan S2V transformer with another motion encoder than the released one, {_UNSUPPORTED}",
    ),
    (
        r"(^|\.)(audio_proj|audio_cross_attn|norm_x|audio_encoder)\.",
        f"a Wan transformer with an audio branch (MultiTalk, InfiniteTalk), {_UNSUPPORTED}",
    ),
    (
        r"(^|\.)(local_attn|attn_impl)\.proj_l\.",
        "a step-distilled transformer of TurboDiffusion with sparse-linear attention (SLA), which is not supported. "
        "Use a four-step LoRA with the released transformer",
    ),
    (
        r"(^|\.)to_gate_compress\.",
        "a step-distilled transformer of FastVideo with video sparse attention (VSA), which is not supported. "
        "Use the file called FullAttn, or a LoRA made of it",
    ),
    (
        r"(^|\.)img_in_ref\.",
        f"a Wan Fun transformer of another kind, {_UNSUPPORTED}",
    ),
    (
        r"(^|\.)(img_emb\.emb_pos|condition_embedder\.image_embedder\.pos_embed)$",
        f"a Wan 2.1 first-and-last-frame transformer (FLF2V), {_UNSUPPORTED}",
    ),
)

OTHERS = _table(
    (r"(^|\.)vision_model\.|(^|\.)visual\.(transformer|blocks|patch_embedding)|^log_scale$", "a CLIP vision encoder"),
    (r"(^|\.)text_model\.encoder\.layers\.", "a CLIP text encoder"),
    (r"(^|\.)decoder\.block\.\d+\.layer\.", "a full T5 with its decoder"),
    (r"(^|\.)(encoder\.)?block\.\d+\.layer\.\d\.SelfAttention\.", "a T5 text encoder, but not UMT5"),
    (r"(^|\.)model\.layers\.\d+\.self_attn\.|^layers\.\d+\.self_attn\.", "a language model"),
    (r"(^|\.)(double_blocks|single_blocks)\.", "a Flux or HunyuanVideo transformer"),
    (r"(^|\.)joint_blocks\.", "a Stable Diffusion 3 transformer"),
    (
        r"(^|\.)(transformer_blocks|single_transformer_blocks)\.",
        "a diffusion transformer of another family (Flux, LTX, Qwen, ...)",
    ),
    (r"(^|\.)(input_blocks|output_blocks|middle_block|down_blocks\.\d+\.attentions)\.", "a Stable Diffusion UNet"),
    (
        r"(^|\.)(encoder\.down\.\d+\.block|decoder\.up\.\d+\.block|(encoder|decoder)\.(down|up)_blocks)\.",
        "an image or another video VAE",
    ),
    (r"^(encoder|decoder)\.\d+\.(weight|bias|conv\.)", "a tiny preview VAE (TAESD, TAEHV)"),
    (r"^(encoder|decoder)\.", "an autoencoder of an unknown kind"),
)

# Prefixes of the models in all-in-one files.
_PARTS = {
    "a transformer": ("model.diffusion_model.",),
    "a VAE": ("vae.", "first_stage_model."),
    "a text encoder": ("text_encoders.", "cond_stage_model.", "text_encoder."),
}


def recognise(names: Collection[str], table: Iterable[Foreign]) -> str | None:
    """The description of the first row of `table` that matches one of `names`, with that name; None if none does."""
    for foreign in table:
        evidence = next((name for name in names if foreign.pattern.search(name)), None)
        if evidence is not None:
            return f"{foreign.is_a} (because of {evidence[:120]})"
    return None


def all_in_one(names: Collection[str]) -> str | None:
    """`"a transformer, a VAE"` for a file with several models under prefixes, else None."""
    parts = [part for part, prefixes in _PARTS.items() if any(name.startswith(prefixes) for name in names)]
    return ", ".join(parts) if len(parts) > 1 else None
