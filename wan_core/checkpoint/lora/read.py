"""Read a LoRA file and match it with a model (`read_lora`): the tensors of each module are paired, checked and made
`Change`s of.

An incomplete pair or a damaged tensor is an error; tensors that do not fit this model are ignored and reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from wan_core.checkpoint.lora.merge import Change
from wan_core.checkpoint.lora.names import (
    APPLY_ELSEWHERE,
    OTHER_EXPERT,
    TEXT_ENCODER,
    UNKNOWN_FORM,
    UNKNOWN_MODULE,
    WRONG_SHAPE,
    Finder,
    for_other_expert,
    for_text_encoder,
    is_lora,
    not_applied,
    parse_name,
    spelling_words,
)
from wan_core.checkpoint.opened import Checkpoint, CheckpointError, listing, naming
from wan_core.checkpoint.reader import Source, open_checkpoint
from wan_core.config.limits import MAX_JSON

Shapes = Mapping[str, tuple[int, ...]]

MAX_RANK = 4096
METADATA_KEY = "lora_adapter_metadata"


class PeftSettings:
    """PEFT's configuration, which Diffusers writes into the metadata of a LoRA: the alphas, where tensors have none."""

    def __init__(self, metadata: Mapping[str, str]) -> None:
        text = metadata.get(METADATA_KEY, "{}")
        self.values: Any = None  # what is no JSON is an error only where an alpha is looked for
        with suppress(ValueError, RecursionError):
            self.values = json.loads(text) if len(text) <= MAX_JSON else None
        self.patterns: dict[str, dict[str, tuple[int, Any]]] = {}  # prefix -> module -> (place in the list, alpha)

    def scale(self, name: str, rank: int) -> float:
        """alpha / rank of the pair that tensor `name` is of; 1 where nothing is said. Raises CheckpointError."""
        prefix, _, inner = name.partition(".")
        name_parts = inner.rpartition(".lora_")[0].split(".")
        try:
            pattern = self._pattern(prefix)
            ends = (pattern.get(".".join(name_parts[n:])) for n in range(len(name_parts)))
            longest = max((one for one in ends if one is not None), key=lambda one: one[0], default=None)
            alpha = self.values.get(f"{prefix}.lora_alpha") if longest is None else longest[1]
            if alpha is None:
                return 1.0
            scale = float(alpha) / (math.sqrt(rank) if self.values.get(f"{prefix}.use_rslora") else rank)
        except (ValueError, TypeError, AttributeError, OverflowError):
            scale = math.nan
        if not math.isfinite(scale):
            raise CheckpointError(f"its metadata {METADATA_KEY} has no valid alpha. Save it again.")
        return scale

    def _pattern(self, prefix: str) -> dict[str, tuple[int, Any]]:
        """Modules, or the ends of their names, with an alpha of their own; the last that fits counts."""
        if prefix not in self.patterns:
            stored = (self.values.get(f"{prefix}.alpha_pattern") or {}).items()
            self.patterns[prefix] = {module: (position, alpha) for position, (module, alpha) in enumerate(stored)}
        return self.patterns[prefix]


class ModuleParts:
    """The tensors that a file has for `module`; `changes` returns the changes that they make.

    roles: role -> name in the file; shapes: official parameter -> its shape; ignored: reason -> names, extended here.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: PeftSettings,
        module: str,
        roles: dict[str, str],
        shapes: Shapes,
        ignored: dict[str, list[str]],
    ) -> None:
        self.checkpoint, self.settings = checkpoint, settings
        self.module, self.roles, self.shapes, self.ignored = module, roles, shapes, ignored
        self.weight = module if module in shapes else f"{module}.weight"
        self.alpha = self._alpha(roles["alpha"]) if "alpha" in roles else None
        self.pairs: list[tuple[str, Change]] = []

    def changes(self) -> list[tuple[str, Change]]:
        """(official parameter, change), in order. Raises `CheckpointError` for an incomplete pair."""
        roles = self.roles
        if "up" in roles or "down" in roles:
            self._lora()
        if any(role.startswith("hada") for role in roles):
            self._hadamard()
        if any(role.startswith("lokr") for role in roles):
            self._kronecker()
        if "diff" in roles:
            self._add(self.weight, "difference", "diff")
        if "diff_b" in roles:
            self._add(f"{self.module}.bias", "difference", "diff_b")
        if "diff_m" in roles:
            self._add(f"{self.module}.modulation", "difference", "diff_m")
        if not self.pairs and not any(name in names for names in self.ignored.values() for name in roles.values()):
            raise CheckpointError(f"{listing(list(roles.values()), 2)} have no factors: the file is incomplete.")
        return self.pairs

    # ----------------------------------------------------------------------------------------------- LoRA, LoHa, LoKr

    def _lora(self) -> None:
        up, down = self._pair("up", "down")
        scale = self.settings.scale(self.roles["up"], up[1]) if self.alpha is None else self.alpha / up[1]
        self._add(self.weight, "LoRA", "up", "down", scale=scale, fits=self._is_matrix(up[0], down[1]))
        if "up_bias" in self.roles:
            self._add(f"{self.module}.bias", "difference", "up_bias", scale=scale)

    def _hadamard(self) -> None:
        (n, rank), (_, k) = self._pair("hada_w1_a", "hada_w1_b")
        same = self._pair("hada_w2_a", "hada_w2_b")
        fits = self._is_matrix(n, k) and (same[0][0], same[1][1]) == (n, k)
        scale = 1.0 if self.alpha is None else self.alpha / rank
        self._add(self.weight, "LoHa", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", scale=scale, fits=fits)

    def _kronecker(self) -> None:
        """Each factor is a matrix or a product of two. alpha / rank applies only if a factor is a product."""
        roles, sizes, rank = self.roles, [], None
        for half in ("lokr_w1", "lokr_w2"):
            if half in roles:
                sizes.append(self.checkpoint.tensors[roles[half]].shape)
            else:
                (n, rank), (_, k) = self._pair(f"{half}_a", f"{half}_b")
                sizes.append((n, k))
        shape = self.shapes.get(self.weight, ())
        product = tuple(a * b for a, b in zip(*sizes, strict=False))
        dora = self._factor(roles["dora"]) if "dora" in roles else None
        lengths = dora is None or _lengths_fit(tuple(dora.shape), shape)
        if any(len(size) != 2 for size in sizes) or product != shape or not lengths:
            used = [name for role, name in roles.items() if role.startswith("lokr") or role == "dora"]
            self.ignored.setdefault(WRONG_SHAPE, []).extend(used)
            return
        halves: list[Tensor] = []
        for half in ("lokr_w1", "lokr_w2"):
            if half in roles:
                halves.append(self._factor(roles[half]))
            else:
                first, second = (self._factor(roles[f"{half}_{side}"]) for side in "ab")
                halves.append(first.float().flatten(1) @ second.float().flatten(1))  # small compared with the weight
        scale = 1.0 if self.alpha is None or rank is None else self.alpha / rank
        self.pairs.append(
            (self.weight, Change(kind="LoKr", shape=shape, factors=tuple(halves), scale=scale, dora=dora))
        )

    # ------------------------------------------------------------------------------------------------- checks of shapes

    def _add(self, parameter: str, kind: str, *parts: str, scale: float = 1.0, fits: bool | None = None) -> None:
        """Add a change of `parameter` by the roles `parts`, or ignore it if the shape differs from the model's. fits:
        whether it does not differ; None: compare the first part's shape."""
        roles, shape = self.roles, self.shapes.get(parameter)
        if shape is None:
            self.ignored.setdefault(UNKNOWN_MODULE, []).extend(roles[p] for p in parts)
            return
        factors = tuple(self._factor(roles[part]) for part in parts)
        dora = None
        if "dora" in roles and parameter == self.weight and kind != "difference":
            dora = self._factor(roles["dora"])
            fits = fits is not False and _lengths_fit(tuple(dora.shape), shape)
        if fits is None:
            fits = math.prod(factors[0].shape) == math.prod(shape) and _squeezed(factors[0].shape) == _squeezed(shape)
        if not fits:
            used = (*parts, *(["dora"] if dora is not None else []))
            self.ignored.setdefault(WRONG_SHAPE, []).extend(roles[p] for p in used)
            return
        self.pairs.append((parameter, Change(kind=kind, shape=shape, factors=factors, scale=scale, dora=dora)))

    def _pair(self, first: str, second: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes [N, R] and [R, K] of two factors, kernels counted into K."""
        roles = self.roles
        missing = [part for part in (first, second) if part not in roles]
        if missing:
            there = next((roles[part] for part in (first, second) if part in roles), next(iter(roles.values())))
            raise CheckpointError(f"{there} has no counterpart ({missing[0]} is missing). Download it again.")
        up, down = (self.checkpoint.tensors[roles[part]].shape for part in (first, second))
        if len(up) < 2 or len(down) < 2 or up[1] != down[0] or math.prod(up[2:]) != 1 or not 0 < up[1] <= MAX_RANK:
            raise CheckpointError(
                f"{roles[first]} {list(up)} and {roles[second]} {list(down)} do not match. Download it again."
            )
        return up[:2], (down[0], math.prod(down[1:]))

    def _is_matrix(self, n: int, k: int) -> bool:
        """Whether the weight is [n, k], kernels counted into k."""
        shape = self.shapes.get(self.weight, ())
        return len(shape) >= 2 and (n, k) == (shape[0], math.prod(shape[1:]))

    # ----------------------------------------------------------------------------------------------- values of the file

    def _factor(self, name: str) -> Tensor:
        info = self.checkpoint.tensors[name]
        if not info.dtype.is_floating_point or 0 in info.shape:
            raise CheckpointError(
                f"{name} is {info.dtype} {list(info.shape)}, but it must be floating point. Download it again."
            )
        return self.checkpoint.read(name)

    def _alpha(self, name: str) -> float:
        info = self.checkpoint.tensors[name]
        value = float(self.checkpoint.read(name).float()) if math.prod(info.shape) == 1 else math.nan
        if not math.isfinite(value):
            raise CheckpointError(f"{name} must be one number, the alpha, but it is not. Download it again.")
        return value


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _lengths_fit(lengths: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether DoRA's lengths are those of the rows ([N], [N, 1], ...) or columns ([1, K]) of a weight."""
    if len(shape) < 2 or not lengths:
        return False
    rows = lengths[0] == shape[0] and math.prod(lengths[1:]) == 1
    return rows or (len(shape) == 2 and lengths == (1, shape[1]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Lora:
    """A LoRA file, matched with a model. `changes`: official parameter name -> its changes, in order. `ignored`: reason
    -> names of tensors that have no effect."""

    where: str
    spelling: str  # "diffusion_model., lora_down/lora_up"
    changes: Mapping[str, tuple[Change, ...]]
    ignored: Mapping[str, tuple[str, ...]]
    metadata: Mapping[str, str]

    @cached_property
    def kinds(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for change in (c for changes in self.changes.values() for c in changes):
            counts[change.words] = counts.get(change.words, 0) + 1
        return counts

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({c.rank for changes in self.changes.values() for c in changes if c.rank is not None}))

    def words(self) -> str:
        """One line: the changes, and the ignored tensors with the reason."""
        ranks = f" of rank {'/'.join(map(str, self.ranks))}" if self.ranks else ""
        kinds = ", ".join(
            f"{count} {kind}{ranks if kind.startswith('LoRA') else ''}" for kind, count in self.kinds.items()
        )
        ignored = "; ".join(
            f"{len(names)} tensors ignored, {why} ({listing(names, 2)})" for why, names in self.ignored.items()
        )
        changed = f"{kinds} on {len(self.changes)} parameters ({self.spelling})"
        rows = any(c.dora is not None and not c.of_columns for changes in self.changes.values() for c in changes)
        dora = (
            "DoRA divides by the lengths of the changed rows, as in training (ComfyUI: of the rows before)"
            if rows
            else ""
        )
        return "; ".join(part for part in (changed, dora, ignored) if part)


def read_lora(source: Source, shapes: Shapes, expert: str | None = None) -> Lora:
    """The LoRA in `source`, for a model with the official parameters `shapes`; its values are mapped, not read.

    expert: "high" or "low", needed if one file has changes for both. Tensors that do not fit are in `ignored`. Raises
    `CheckpointError` if the file is no LoRA, is damaged, or changes nothing in this model.
    """
    checkpoint = open_checkpoint(source)
    with naming(checkpoint.where):
        return _read(checkpoint, shapes, expert)


def _read(checkpoint: Checkpoint, shapes: Shapes, expert: str | None) -> Lora:
    find = Finder(shapes)
    ignored: dict[str, list[str]] = {}
    modules: dict[str, dict[str, str]] = {}  # official module -> role -> name in the file
    others = for_other_expert(checkpoint.tensors, expert)
    unsupported: dict[str, str] = {}  # module with a tensor that gives the others a different meaning -> why
    spellings: dict[str, None] = {}
    for name in checkpoint.tensors:
        parsed = parse_name(name)
        module = None if parsed is None else find.module(parsed.module)
        if name in others:
            ignored.setdefault(OTHER_EXPERT, []).append(name)
        elif for_text_encoder(name):
            ignored.setdefault(TEXT_ENCODER, []).append(name)
        elif parsed is None:
            ignored.setdefault(UNKNOWN_FORM, []).append(name)
        elif module is None:
            ignored.setdefault(UNKNOWN_MODULE, []).append(name)
        elif parsed.role == "other":
            unsupported[module] = not_applied(parsed)
            ignored.setdefault(unsupported[module], []).append(name)
        else:
            twin = modules.setdefault(module, {}).setdefault(parsed.role, name)
            if twin != name:
                raise CheckpointError(f"{twin} and {name} both change {module}. Download it again.")
            spelled = parsed.spelled if parsed.role != "alpha" else ""
            spellings.setdefault(f"{find.prefix(parsed.module)} {spelled}".strip())
    settings = PeftSettings(checkpoint.metadata)
    changes: dict[str, tuple[Change, ...]] = {}
    for module, roles in modules.items():
        if module in unsupported:
            ignored[unsupported[module]] += roles.values()
            continue
        for parameter, change in ModuleParts(checkpoint, settings, module, roles, shapes, ignored).changes():
            changes[parameter] = (*changes.get(parameter, ()), change)
    if not changes:
        check_lora(checkpoint)
        reasons = "; ".join(f"{len(names)} are {why} ({listing(names, 2)})" for why, names in ignored.items())
        advice = APPLY_ELSEWHERE if unsupported else "It was made for another model."
        raise CheckpointError(f"it changes nothing in this model: {reasons or 'it is empty'}. {advice}")
    return Lora(
        where=checkpoint.where,
        spelling=spelling_words(spellings),
        changes=changes,
        ignored={why: tuple(names) for why, names in ignored.items()},
        metadata=checkpoint.metadata,
    )


def check_lora(checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for a file of anything else, by its tensors' names."""
    if not is_lora(checkpoint.tensors):
        fault = f"not a LoRA: its tensors are {listing(sorted(checkpoint.tensors), 3)}. Give the file of a LoRA."
        raise CheckpointError(fault, where=checkpoint.where)
