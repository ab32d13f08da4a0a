"""Parses tensor names of LoRA files to the model's module and the tensor's role.

A name has the form `PREFIX MODULE . ROLE`. All forms in use are read:

| prefix | module | written by |
|---|---|---|
| `diffusion_model.` | official | ComfyUI, diffusion-pipe, LightX2V |
| `lora_unet_` (`lycoris_`) | official, dots as underscores | kohya, musubi-tuner, LyCORIS |
| `transformer.` (`base_model.model.`) | Diffusers | Diffusers, PEFT, ai-toolkit |
| none | official | the official repository, LightX2V, DiffSynth |

Names of wrapped modules (`_orig_mod` of a compiled model, FSDP's) are taken off wherever they stand. Roles, and what
each of them changes: `wan_core.checkpoint.lora.merge`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from wan_core.checkpoint.layouts import unwrapped
from wan_core.models.wan.families import FAMILIES

# Removed from the front, one after the other, until a module of the model is left.
PREFIXES = (
    "base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer_2.", "transformer.", "pipe.dit.",
    "dit.", "unet.", "generator.", "module.", "model.", "lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_",
    "lora_",
)  # fmt: skip
_ROLES = {
    "lora_A": "down",
    "lora_down": "down",
    "lora.down": "down",
    "lora_B": "up",
    "lora_up": "up",
    "lora.up": "up",
    "alpha": "alpha",
    "dora_scale": "dora",
    "lora_magnitude_vector": "dora",
    "diff": "diff",
    "w_norm": "diff",
    "diff_b": "diff_b",
    "b_norm": "diff_b",
    "diff_m": "diff_m",
    **{name: name for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")},
    **{name: name for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
}
GLORA = ("a1", "a2", "b1", "b2")
# Kinds that are not applied, so that messages can name them: role -> kind.
NOT_APPLIED = {
    **dict.fromkeys(("lora_mid", "hada_t1", "hada_t2", "lokr_t1", "lokr_t2"), "Tucker decomposition"),
    **dict.fromkeys(("oft_blocks", "oft_diag", "oft_R", "boft_R", "boft_s", "rescale"), "OFT"),
    **dict.fromkeys(GLORA, "GLoRA"),
    "set_weight": "weights in place of the model's",
}
_ROLES |= dict.fromkeys(NOT_APPLIED, "other")
_PREFIX = re.compile("|".join(map(re.escape, PREFIXES)))
MAX_PREFIXES = 4  # of a name; files have up to three
# What follows the module: a role, one word more at most (the adapter's), and the kind of parameter.
_TAIL = re.compile(
    rf"(?P<role>{'|'.join(map(re.escape, sorted(_ROLES, key=len, reverse=True)))})"
    r"(\.(?!(weight|bias)$)[^.]+)?(\.(?P<kind>weight|bias))?"
)
_LONGEST_TAIL = 4  # words: `lora.down.default.weight`
_TEXT = re.compile(r"(lora_)?(te\d?|text_encoder(_\d)?|text_model|clip_[lgh]|t5xxl|umt5)[._]")
_LOW, _HIGH = "transformer_2.", "transformer."  # prefixes of files with both experts (Diffusers' names)

# Why a tensor of a file has no effect.
UNKNOWN_FORM = "of no known form"
UNKNOWN_MODULE = "of modules that this model does not have"
TEXT_ENCODER = "for the text encoder, which is not changed"
OTHER_EXPERT = "for the other expert"
WRONG_SHAPE = "of another shape than this model's"
APPLY_ELSEWHERE = (
    "LoRA, LoHa, LoKr, DoRA and differences are applied. Merge this file into the model in ComfyUI (Load LoRA, then "
    "ModelSave) and give the model that it saved."
)


@dataclass(frozen=True)
class Name:
    module: str  # with its prefix, as in the file
    role: str  # "up", "down", "alpha", "hada_w1_a", ...; "other" if it is not supported
    spelled: str  # the role as in the file


def parse_name(name: str) -> Name | None:
    """The parts of `name`; None if it is not the name of a LoRA's tensor."""
    name_parts = name.rsplit(".", _LONGEST_TAIL)
    for count in range(1, len(name_parts)):
        module, match = ".".join(name_parts[:count]), _TAIL.fullmatch(".".join(name_parts[count:]))
        if match is not None and module:
            role = _ROLES[match["role"]]
            if match["kind"] == "bias":
                role = "up_bias" if role == "up" else "other"
            return Name(module, role, match["role"])
    return None


def not_applied(name: Name) -> str:
    """Why a tensor of the role "other" has no effect."""
    kind = NOT_APPLIED.get(name.spelled)
    return f"a bias of {name.spelled}, which is not applied" if kind is None else f"{kind}, which is not applied"


def for_text_encoder(name: str) -> bool:
    return _TEXT.match(name) is not None


def is_lora(names: Collection[str]) -> bool:
    """Whether a file with these tensor names is a LoRA, or another kind that changes a model, and not a model."""
    parsed = [one for one in map(parse_name, names) if one is not None]
    if any(one.spelled not in ("alpha", "rescale", *GLORA) for one in parsed):
        return True
    modules = ({one.module for one in parsed if one.spelled == role} for role in GLORA)
    return bool(set.intersection(*modules))


def told_experts(names: Collection[str]) -> tuple[str, ...]:
    """The experts that these tensor names distinguish; empty if they do not name an expert."""
    if not any(name.startswith(_LOW) for name in names):
        return ()
    return ("high", "low") if any(name.startswith(_HIGH) for name in names) else ("low",)


def for_other_expert(names: Collection[str], expert: str | None) -> frozenset[str]:
    """The `names` that are not for `expert`, "high" or "low"; empty for None."""
    experts = told_experts(names)
    if expert is None or not experts or (expert == "low" and experts == ("low",)):
        return frozenset()
    return frozenset(name for name in names if name.startswith(_LOW) != (expert == "low"))


class Finder:
    """Maps a file's module names to official ones: with dots or underscores, official or Diffusers."""

    def __init__(self, parameters: Collection[str]) -> None:
        modules = {name.rpartition(".")[0] for name in parameters}
        modules |= {name for name in parameters if name.endswith("modulation")}  # a parameter without a module
        modules |= {name.rpartition(".")[0] for name in modules if name.endswith("modulation")}
        layers = 1 + max((int(m[1]) for n in modules if (m := re.match(r"blocks\.(\d+)\.", n))), default=-1)
        spelled = [pair for family in FAMILIES.values() for pair in family.lora_modules(layers).items()]
        theirs = {name: ours for name, ours in spelled if ours in modules}
        dotted = {**theirs, **{name: name for name in modules}}
        self.modules = {name.replace(".", "_"): ours for name, ours in dotted.items()} | dotted

    def module(self, name: str) -> str | None:
        """The official module, or the parameter if it has no module; None if the model has none of that name."""
        return _without_prefixes(name, self.modules)[0]

    def prefix(self, name: str) -> str:
        """The prefix before the module's name; `-` if there is none."""
        return _without_prefixes(name, self.modules)[1] or "-"


def _without_prefixes(name: str, known: Mapping[str, str]) -> tuple[str | None, str]:
    """What `known` has for `name` without its prefixes, and these."""
    name = inner = unwrapped(name)
    for _ in range(MAX_PREFIXES + 1):
        match_name = known.get(inner)
        if match_name is not None:
            return match_name, name[: len(name) - len(inner)]
        prefix = _PREFIX.match(inner)
        if prefix is None:
            break
        inner = inner[prefix.end() :]
    return None, ""


def spelling_words(spellings: Collection[str]) -> str:
    """`diffusion_model., lora_down/lora_up/diff` for entries `PREFIX ROLE`; entries of alphas have no role."""
    entries = [entry.partition(" ") for entry in spellings]
    prefixes = dict.fromkeys(prefix if space else "" for prefix, space, _ in entries)
    roles = dict.fromkeys(role or prefix for prefix, _, role in entries if role)
    return f"{'/'.join(p if p != '-' else 'no prefix' for p in prefixes if p) or 'no prefix'}, {'/'.join(roles)}"
