"""Names in LoRA files: from how a tool spells a tensor to the module of the model and the part that the tensor plays.

A file names a module and what it has for it: `PREFIX MODULE . ROLE`. All spellings in use are read:

| prefix | module | written by |
|---|---|---|
| `diffusion_model.` | official | ComfyUI, diffusion-pipe, LightX2V |
| `lora_unet_` (`lycoris_`) | official, dots as underscores | kohya, musubi-tuner, LyCORIS |
| `transformer.` (`base_model.model.`) | Diffusers | Diffusers, PEFT, ai-toolkit |
| none | official | the official repository, LightX2V, DiffSynth |

Roles, and what each of them changes: `wan_core.checkpoint.lora.change`.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from wan_core.models.wan.families import FAMILIES

# Taken off the front, one after the other, until a module of the model is left.
PREFIXES = (
    "base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer_2.", "transformer.", "pipe.dit.",
    "dit.", "unet.", "module.", "model.", "lora_unet__", "lora_unet_", "lora_transformer_", "lycoris_", "lora_",
)  # fmt: skip
_ROLES = {
    "lora_A": "down", "lora_down": "down", "lora.down": "down",
    "lora_B": "up", "lora_up": "up", "lora.up": "up",
    "alpha": "alpha",
    "dora_scale": "dora", "lora_magnitude_vector": "dora",
    "diff": "diff", "w_norm": "diff", "diff_b": "diff_b", "b_norm": "diff_b", "diff_m": "diff_m",
    **{name: name for name in ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")},
    **{name: name for name in ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")},
    # Known, so that what cannot be applied is said by name.
    **dict.fromkeys(("lora_mid", "hada_t1", "hada_t2", "lokr_t2", "set_weight", "oft_blocks", "oft_diag"), "other"),
    **dict.fromkeys(("a1", "a2", "b1", "b2"), "other"),
}  # fmt: skip
_NAME = re.compile(
    rf"(?P<module>.+?)\.(?P<role>{'|'.join(map(re.escape, sorted(_ROLES, key=len, reverse=True)))})"
    r"(\.(?!(weight|bias)$)[^.]+)?(\.(?P<kind>weight|bias))?"
)
_TEXT = re.compile(r"(lora_)?(te\d?|text_encoder(_\d)?|text_model|clip_[lgh]|t5xxl|umt5)[._]")
_LOW, _HIGH = "transformer_2.", "transformer."  # where one file holds both experts' (Diffusers' name of the second)

# Why a tensor of a file has no effect.
UNKNOWN_FORM = "of no known form"
UNKNOWN_MODULE = "of modules that this model does not have"
TEXT_ENCODER = "for the text encoder, which stays as it is"
OTHER_EXPERT = "for the other expert"
UNSUPPORTED = "of a kind that is not supported (Tucker, OFT, GLoRA)"
WRONG_SHAPE = "of another shape than this model's"


@dataclass(frozen=True)
class Name:
    """A tensor's name, taken apart."""

    module: str  # with its prefix, as the file has it
    role: str  # "up", "down", "alpha", "hada_w1_a", ...; "other" where it cannot be applied
    spelled: str  # the role, as the file has it


def parse_name(name: str) -> Name | None:
    """None where `name` is no LoRA's."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    role = _ROLES[match["role"]]
    if match["kind"] == "bias":
        role = "up_bias" if role == "up" else "other"
    return Name(match["module"], role, match["role"])


def for_text_encoder(name: str) -> bool:
    return _TEXT.match(name) is not None


def is_lora(names: Collection[str]) -> bool:
    """Whether a file with tensors of these names holds changes of a model rather than a model."""
    return any(
        (match := _NAME.fullmatch(name)) and match["role"] not in ("alpha", "a1", "a2", "b1", "b2") for name in names
    )


def told_experts(names: Collection[str]) -> tuple[str, ...]:
    """The experts whose changes a file with tensors of these names tells apart; none where its names are for any."""
    if not any(name.startswith(_LOW) for name in names):
        return ()
    return ("high", "low") if any(name.startswith(_HIGH) for name in names) else ("low",)


def for_other_expert(names: Collection[str], expert: str | None) -> frozenset[str]:
    """Those of a file's `names` that are not for `expert`, "high" or "low"; none for None."""
    told = told_experts(names)
    if expert is None or not told or (expert == "low" and told == ("low",)):
        return frozenset()
    return frozenset(name for name in names if name.startswith(_LOW) != (expert == "low"))


class Finder:
    """From a file's name for a module to the official one: dotted or flattened, official or Diffusers."""

    def __init__(self, parameters: Collection[str]) -> None:
        modules = {name.rpartition(".")[0] for name in parameters}
        modules |= {name for name in parameters if name.endswith("modulation")}  # a parameter without a module
        modules |= {name.rpartition(".")[0] for name in modules if name.endswith("modulation")}
        layers = 1 + max((int(m[1]) for n in modules if (m := re.match(r"blocks\.(\d+)\.", n))), default=-1)
        spelled = [pair for family in FAMILIES.values() for pair in family.lora_modules(layers).items()]
        theirs = {name: ours for name, ours in spelled if ours in modules}
        self.dotted = {**theirs, **{name: name for name in modules}}
        self.flat = {name.replace(".", "_"): ours for name, ours in self.dotted.items()}

    def module(self, name: str) -> str | None:
        """The official module, or parameter without one; None where the model has none of that name."""
        return self._find(name)[0]

    def prefix(self, name: str) -> str:
        """What stands before it; `-` for nothing."""
        return self._find(name)[1] or "-"

    def _find(self, name: str) -> tuple[str | None, str]:
        rest = name
        while rest:
            found = self.dotted.get(rest) or self.flat.get(rest)
            if found is not None:
                return found, name[: len(name) - len(rest)]
            prefix = next((p for p in PREFIXES if rest.startswith(p)), None)
            if prefix is None:
                break
            rest = rest[len(prefix) :]
        return None, ""


def spelling_words(found: Collection[str]) -> str:
    """`diffusion_model., lora_down/lora_up/diff`, of `PREFIX ROLE` in `found`; no role for an alpha's."""
    words = [entry.partition(" ") for entry in found]
    prefixes = dict.fromkeys(prefix if space else "" for prefix, space, _ in words)
    roles = dict.fromkeys(role or prefix for prefix, _, role in words if role)
    return f"{'/'.join(p if p != '-' else 'no prefix' for p in prefixes if p) or 'no prefix'}, {'/'.join(roles)}"
