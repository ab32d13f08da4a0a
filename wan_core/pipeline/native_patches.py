"""LoRAs that another program has already read: the patches of a ComfyUI model as the LoRAs that this engine attaches.

A patch is (strength, value, strength of the weight, offset, function). The value is an adapter with a `name` and its
`weights`, or ("diff", (tensor,)). The tensors get the names that a LoRA's file has, so `read_lora` checks them as it
checks a file. Patches of a kind that is not understood raise an OptionError with their name.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from wan_core.checkpoint.detect import expected_shapes
from wan_core.checkpoint.lora.read import read_lora
from wan_core.checkpoint.opened import Checkpoint, from_state_dict
from wan_core.config import OptionError
from wan_core.models.wan.config import DiTConfig
from wan_core.pipeline.loras import Wanted

Patches = Mapping[str, Sequence[tuple[Any, ...]]]
Tensors = dict[str, Tensor]

# Adapter -> the role of each of its weights in a LoRA's file; None: must be absent.
ADAPTERS: dict[str, tuple[str | None, ...]] = {
    "lora": ("lora_up.weight", "lora_down.weight", "alpha", None, "dora_scale", None),
    "loha": ("hada_w1_a", "hada_w1_b", "alpha", "hada_w2_a", "hada_w2_b", None, None, "dora_scale"),
    "lokr": (
        "lokr_w1", "lokr_w2", "alpha", "lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b", None, "dora_scale",
    ),
}  # fmt: skip
PREFIX = "diffusion_model."
ROLES = {"diff", "diff_b", *(role for roles in ADAPTERS.values() for role in roles if role is not None)}
UNKNOWN = 0  # in place of the identity of a LoRA's file
_SERIALS = WeakIdKeyDictionary()  # tensor -> a number that no other tensor of this process gets
_NEXT = count()
_PROCESS = secrets.token_hex(8)  # another one counts from 0, too, and may write into the same folder


def loras_of_patches(patches: Patches, config: DiTConfig, where: str) -> list[Wanted]:
    """The LoRAs on a transformer, in the order in which they were put on.

    patches: parameter (with `diffusion_model.`) -> its patches. where: what messages call the model. Raises OptionError
    for a patch that cannot be carried, CheckpointError for tensors that do not fit.
    """
    return [
        Wanted(read_lora(checkpoint, expected_shapes(config)), strength, (checkpoint.where, 0, 0))
        for strength, checkpoint in lora_checkpoints(patches, where)
    ]


def lora_checkpoints(patches: Patches, where: str) -> list[tuple[float, Checkpoint]]:
    """(strength, tensors as those of a LoRA's file) for each LoRA. A name tells the same tensors again, until the
    process ends. Raises OptionError."""
    translated = {key: [_translated(key, patch, where) for patch in several] for key, several in patches.items()}
    order = _order([[(group, strength) for group, strength, _ in several] for several in translated.values()])
    files: list[Tensors] = [{} for _ in order]
    for key, several in translated.items():
        at = -1
        for group, strength, tensors in several:
            at = order.index((group, strength), at + 1)
            files[at].update(_named(key, tensors))
    loras = _with_differences([(*one, tensors) for one, tensors in zip(order, files, strict=True)])
    return [
        (strength, from_state_dict(tensors, f"#{number} of {where} ({_identity(tensors)})"))
        for number, (strength, tensors) in enumerate(loras, start=1)
    ]


def _with_differences(files: list[tuple[int, float, Tensors]]) -> list[tuple[float, Tensors]]:
    """(strength, tensors) of each LoRA. Differences do not say which file they come from: they join one of their
    strength, if nothing on the way to it changes the same parameters."""
    joined: set[int] = set()
    for at in (*range(len(files)), *reversed(range(len(files)))):  # twice: one may clear the way for another
        group, strength, tensors = files[at]
        if group != UNKNOWN or at in joined:
            continue
        for home, (other, its_strength, theirs) in enumerate(files):
            passed = range(home, at) if home < at else range(at + 1, home + 1)
            others = (_parameters(files[n][2]) for n in passed if n not in joined)
            clear = not any(one & _parameters(tensors) for one in others)
            if other != UNKNOWN and its_strength == strength and clear:
                theirs.update(tensors)
                joined.add(at)
                break
    return [(strength, tensors) for at, (_, strength, tensors) in enumerate(files) if at not in joined]


def _parameters(tensors: Tensors) -> set[str]:
    return {name if name.endswith(".diff_b") else _module(name) for name in tensors}


def _module(name: str) -> str:
    role = next(role for role in ROLES if name.endswith(f".{role}"))
    return name.removesuffix(f".{role}")


def _translated(key: str, patch: tuple[Any, ...], where: str) -> tuple[int, float, Tensors]:
    """(which file it came from, strength, role -> tensor)."""
    strength, value, of_weight, offset, function = patch
    if not key.startswith(PREFIX):
        raise OptionError(
            f"{where} has a patch on {key}, which is not of its transformer: remove the node that adds it"
        )
    if of_weight != 1.0 or offset is not None or function is not None:
        raise OptionError(f"{where} has a patch on {key} that scales, shifts or converts the weight: not supported")
    if isinstance(value, tuple) and len(value) == 2 and value[0] == "diff" and len(value[1]) == 1:
        role = "diff_b" if key.endswith(".bias") else "diff"
        return UNKNOWN, float(strength), {role: value[1][0]}
    name, weights = getattr(value, "name", None), getattr(value, "weights", None)
    roles = ADAPTERS.get(name) if isinstance(name, str) else None
    if roles is None or not isinstance(weights, tuple | list) or len(weights) != len(roles):
        raise OptionError(
            f"{where} has a patch of kind {_kind(value)} on {key}; LoRA, LoHa, LoKr and differences can be carried: "
            "remove the node that adds it"
        )
    odd = [
        number for number, (role, one) in enumerate(zip(roles, weights, strict=True)) if one is not None and not role
    ]
    if odd:
        raise OptionError(f"{where} has a {name} patch on {key} in Tucker form or with another shape: not supported")
    pairs = zip(roles, weights, strict=True)
    tensors = {role: _tensor(one) for role, one in pairs if role is not None and one is not None}
    return id(getattr(value, "loaded_keys", None)), float(strength), tensors


def _tensor(value: Any) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "'merge of two models'"
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return repr(value[0])
    return repr(getattr(value, "name", type(value).__name__))


def _named(key: str, tensors: Tensors) -> Tensors:
    """The names that a LoRA's file would have for them."""
    module = key.removesuffix(".weight").removesuffix(".bias")
    return {f"{module}.{role}": tensor for role, tensor in tensors.items()}


def _order(sequences: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    """A sequence that has each of `sequences` as a subsequence: which LoRA comes before which."""
    order: list[tuple[int, float]] = []
    for wanted in sorted(sequences, key=len, reverse=True):
        at = 0
        for one in wanted:
            if one in order[at:]:
                at = order.index(one, at) + 1
            else:
                order.insert(at, one)
                at += 1
    return order


def _identity(tensors: Tensors) -> str:
    """The same for the same tensors in this process, and for no others."""
    numbers: list[object] = [_PROCESS]
    for name, tensor in sorted(tensors.items()):
        if tensor.ndim == 0:
            numbers.append((name, float(tensor)))
            continue
        if tensor not in _SERIALS:
            _SERIALS[tensor] = next(_NEXT)
        numbers.append((name, _SERIALS[tensor]))
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:12]
