"""LoRA files: which parameters of a transformer a file changes, and by how much.

A file names a module and what it has for it: `PREFIX MODULE . ROLE`. All spellings in use are read:

| prefix | module | written by |
|---|---|---|
| `diffusion_model.` | official | ComfyUI, diffusion-pipe, LightX2V |
| `lora_unet_` (`lycoris_`) | official, dots as underscores | kohya, musubi-tuner, LyCORIS |
| `transformer.` (`base_model.model.`) | Diffusers | Diffusers, PEFT, ai-toolkit |
| none | official | the official repository, LightX2V, DiffSynth |

| role | change of the weight | |
|---|---|---|
| lora_A, lora_B; lora_down, lora_up | up @ down * alpha / rank | LoRA |
| hada_w1_a .. hada_w2_b | (w1_a @ w1_b) * (w2_a @ w2_b) * alpha / rank | LoHa |
| lokr_w1, lokr_w2 (or _a, _b of either) | kron(w1, w2) * alpha / rank | LoKr |
| diff, w_norm; diff_b, b_norm; diff_m | itself, to weight; bias; modulation | differences in full |
| dora_scale, lora_magnitude_vector | afterwards the rows (or columns) get these lengths | DoRA |

Without an alpha the factor is 1, or what Diffusers notes for the whole file. A LoRA that changes a convolution (the
patch embedding) has kernels for matrices.

Source: Hu et al., arXiv:2106.09685; Hyeon-Woo et al., arXiv:2108.06098 (LoHa); Yeh et al., arXiv:2309.14859 (LoKr);
Liu et al., arXiv:2402.09353 (DoRA). The last three are compared with LyCORIS's own code in the tests.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from wan_core.checkpoint.errors import CheckpointError, listing
from wan_core.checkpoint.layouts import diffusers_dit_modules
from wan_core.checkpoint.opened import Checkpoint
from wan_core.checkpoint.reader import Source, open_checkpoint

Shapes = Mapping[str, tuple[int, ...]]

MAX_RANK = 4096
NOTED = "lora_adapter_metadata"

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

UNKNOWN_FORM = "of no known form"
UNKNOWN_MODULE = "of modules that this model does not have"
TEXT_ENCODER = "for the text encoder, which stays as it is"
OTHER_EXPERT = "for the other expert"
UNSUPPORTED = "of a kind that is not supported (Tucker, OFT, GLoRA)"
WRONG_SHAPE = "of another shape than this model's"


# -------------------------------------------------------------------------------------------------------------- changes


@dataclass(frozen=True, kw_only=True, eq=False)
class Change:
    """What a file does to one parameter of `shape`. `factors` are the file's own tensors, mapped and not read yet;
    `dora` the lengths that rows ([N] or [N, 1]) or columns ([1, K]) have afterwards."""

    kind: str  # "LoRA", "LoHa", "LoKr", "difference"
    shape: tuple[int, ...]
    factors: tuple[Tensor, ...]
    scale: float = 1.0
    dora: Tensor | None = None

    @property
    def rank(self) -> int | None:
        """Of a LoRA; None for other kinds."""
        return self.factors[0].shape[1] if self.kind == "LoRA" else None

    @property
    def words(self) -> str:
        return f"{self.kind}{' with DoRA' if self.dora is not None else ''}"

    def delta(self, device: torch.device) -> Tensor:
        """What strength 1 adds to the parameter before DoRA: float32, of its shape."""
        first, *others = (factor.to(device).float() for factor in self.factors)
        return FORMULAS[self.kind](first * self.scale, *others).reshape(self.shape)

    def apply(self, value: Tensor, strength: float) -> Tensor:
        """float32 `value` of the parameter with this change at `strength`; `value` may be overwritten."""
        if self.dora is None and self.kind == "LoRA":  # without another tensor of the weight's size
            up, down = (factor.to(value.device).float().flatten(1) for factor in self.factors)
            return value.flatten(1).addmm_(up, down, alpha=self.scale * strength).view(self.shape)
        delta = self.delta(value.device)
        if self.dora is None:
            return value.add_(delta, alpha=strength)
        changed = value + delta
        length = self.dora.to(value.device).float().flatten()
        columns = self.dora.shape[0] == 1 and len(length) == value.shape[1] and len(value) != 1
        rows = changed.flatten(1)
        if columns:
            rows *= length / rows.norm(dim=0).clamp(min=1e-12)
        else:
            rows *= (length / rows.norm(dim=1).clamp(min=1e-12))[:, None]
        return value.lerp_(rows.reshape(self.shape), strength)

    @property
    def has_low_rank(self) -> bool:
        """Whether it is, exactly, the product of two factors of a small rank; what is not can only be summed in.

        A product of two low-rank matrices, number by number, has as its rank the product of their ranks.
        """
        if len(self.shape) != 2 or self.dora is not None or self.kind not in ("LoRA", "LoHa"):
            return False
        first, second = self.factors[0].shape[1], self.factors[-2].shape[1]
        return self.kind == "LoRA" or first * second <= min(self.shape) // 4

    @property
    def attached_numbers(self) -> int:
        """How many numbers it holds beside the weights: those of the pair that `low_rank` makes, or of its factors."""
        if not self.has_low_rank:
            return sum(factor.numel() for factor in self.factors)
        rank = self.factors[0].shape[1] * (1 if self.kind == "LoRA" else self.factors[2].shape[1])
        return rank * sum(self.shape)

    def low_rank(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """(up [N, R], down [R, K]) in float32 whose product is the change of a matrix; None where `has_low_rank` is
        not."""
        if not self.has_low_rank:
            return None
        factors = [factor.to(device).float() for factor in self.factors]
        if self.kind == "LoRA":
            return factors[0].flatten(1) * self.scale, factors[1].flatten(1)
        w1_a, w1_b, w2_a, w2_b = factors
        up = (w1_a[:, :, None] * w2_a[:, None, :]).flatten(1)
        down = (w1_b[:, None, :] * w2_b[None, :, :]).flatten(0, 1)
        return up * self.scale, down


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "LoRA": lambda up, down: up.flatten(1) @ down.flatten(1),
    "LoHa": lambda w1_a, w1_b, w2_a, w2_b: (w1_a @ w1_b.flatten(1)) * (w2_a @ w2_b.flatten(1)),
    "LoKr": lambda w1, w2: torch.kron(w1, w2),
    "difference": lambda value: value,
}


# ---------------------------------------------------------------------------------------------------------- whole files


@dataclass(frozen=True, kw_only=True, eq=False)
class Lora:
    """A LoRA file, matched with a model. `changes`: official parameter name -> what happens to it, in order.
    `ignored`: reason -> the file's names that have no effect."""

    where: str
    spelling: str  # "diffusion_model., lora_down/lora_up"
    changes: Mapping[str, tuple[Change, ...]]
    ignored: Mapping[str, tuple[str, ...]]
    metadata: Mapping[str, str]

    @cached_property
    def kinds(self) -> dict[str, int]:
        """How many changes there are of each kind."""
        found: dict[str, int] = {}
        for change in (c for several in self.changes.values() for c in several):
            found[change.words] = found.get(change.words, 0) + 1
        return found

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of its LoRAs, each once."""
        found = {c.rank for several in self.changes.values() for c in several if c.rank is not None}
        return tuple(sorted(found))

    def words(self) -> str:
        """What it changes and what it does not, on one line."""
        ranks = f" of rank {'/'.join(map(str, self.ranks))}" if self.ranks else ""
        kinds = ", ".join(
            f"{count} {kind}{ranks if kind.startswith('LoRA') else ''}" for kind, count in self.kinds.items()
        )
        ignored = "; ".join(
            f"{len(names)} tensors ignored, {why} ({listing(names, 2)})" for why, names in self.ignored.items()
        )
        return f"{kinds} on {len(self.changes)} parameters ({self.spelling}){'; ' + ignored if ignored else ''}"


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


def read_lora(source: Source, shapes: Shapes, expert: str | None = None) -> Lora:
    """The LoRA in `source`, for a model with the official parameters `shapes`; their values are mapped, not read.

    expert: "high" or "low", which matters where one file holds the changes of both. What does not fit is in `ignored`.
    Raises `CheckpointError`: no LoRA, a damaged one, or one that changes nothing of this model.
    """
    checkpoint = open_checkpoint(source)
    try:
        return _read(checkpoint, shapes, expert)
    except CheckpointError as fault:
        raise fault if fault.where else CheckpointError(str(fault), where=checkpoint.describe()) from None


def _read(checkpoint: Checkpoint, shapes: Shapes, expert: str | None) -> Lora:
    find = Finder(shapes)
    ignored: dict[str, list[str]] = {}
    modules: dict[str, dict[str, str]] = {}  # official module -> role -> name in the file
    both = any(name.startswith(_LOW) for name in checkpoint.tensors)
    if both and expert is not None:
        both = any(name.startswith(_HIGH) for name in checkpoint.tensors) or expert == "high"
    spellings: dict[str, None] = {}
    for name in checkpoint.tensors:
        match = _NAME.fullmatch(name)
        module = None if match is None else find.module(match["module"])
        role = None if match is None else _role(match["role"], match["kind"])
        if both and expert is not None and name.startswith(_LOW) != (expert == "low"):
            ignored.setdefault(OTHER_EXPERT, []).append(name)
        elif _TEXT.match(name):
            ignored.setdefault(TEXT_ENCODER, []).append(name)
        elif match is None or role is None:
            ignored.setdefault(UNKNOWN_FORM, []).append(name)
        elif module is None:
            ignored.setdefault(UNKNOWN_MODULE, []).append(name)
        elif role == "other":
            ignored.setdefault(UNSUPPORTED, []).append(name)
        else:
            twin = modules.setdefault(module, {}).setdefault(role, name)
            if twin != name:
                raise CheckpointError(f"{twin} and {name} both change {module}. Download it again.")
            spellings.setdefault(f"{find.prefix(match['module'])} {match['role'] if role != 'alpha' else ''}".strip())
    changes: dict[str, tuple[Change, ...]] = {}
    for module, roles in modules.items():
        unsupported = [n for n in ignored.get(UNSUPPORTED, ()) if find.module(_NAME.fullmatch(n)["module"]) == module]  # type: ignore
        if unsupported:  # a part of it says that the whole means something else
            ignored[UNSUPPORTED] += roles.values()
            continue
        for parameter, change in _changes(checkpoint, module, roles, shapes, ignored):
            changes[parameter] = (*changes.get(parameter, ()), change)
    if not changes:
        raise CheckpointError(_nothing(checkpoint, ignored))
    frozen = {why: tuple(names) for why, names in ignored.items()}
    return Lora(
        where=checkpoint.describe(), spelling=_spelling(spellings), changes=changes, ignored=frozen,
        metadata=checkpoint.metadata,
    )  # fmt: skip


def _nothing(checkpoint: Checkpoint, ignored: Mapping[str, list[str]]) -> str:
    if not is_lora(checkpoint.tensors):
        return f"not a LoRA: its tensors are {listing(sorted(checkpoint.tensors), 3)}. Give the file of a LoRA."
    reasons = "; ".join(f"{len(names)} are {why} ({listing(names, 2)})" for why, names in ignored.items())
    return f"it changes nothing of this model: {reasons or 'it is empty'}. It was made for another one."


def _spelling(found: Collection[str]) -> str:
    """`diffusion_model., lora_down/lora_up/diff`."""
    words = [entry.partition(" ") for entry in found]
    prefixes = dict.fromkeys(prefix if space else "" for prefix, space, _ in words)
    roles = dict.fromkeys(role or prefix for prefix, _, role in words if role)
    return f"{'/'.join(p if p != '-' else 'no prefix' for p in prefixes if p) or 'no prefix'}, {'/'.join(roles)}"


def _role(role: str, kind: str | None) -> str | None:
    found = _ROLES[role]
    if kind == "bias":
        return "up_bias" if found == "up" else "other"
    return found


# ----------------------------------------------------------------------------------------------------- module by module


class Finder:
    """From a file's name for a module to the official one: dotted or flattened, official or Diffusers."""

    def __init__(self, parameters: Collection[str]) -> None:
        modules = {name.rpartition(".")[0] for name in parameters}
        modules |= {name for name in parameters if name.endswith("modulation")}  # a parameter without a module
        modules |= {name.rpartition(".")[0] for name in modules if name.endswith("modulation")}
        layers = 1 + max((int(m[1]) for n in modules if (m := re.match(r"blocks\.(\d+)\.", n))), default=-1)
        theirs = {name: ours for name, ours in diffusers_dit_modules(layers).items() if ours in modules}
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


def _changes(
    checkpoint: Checkpoint, module: str, roles: dict[str, str], shapes: Shapes, ignored: dict[str, list[str]]
) -> list[tuple[str, Change]]:
    """(official parameter, change) for what the file has for `module`. Raises `CheckpointError` for half a pair."""
    weight = module if module in shapes else f"{module}.weight"
    found: list[tuple[str, Change]] = []

    def add(parameter: str, kind: str, *parts: str, scale: float = 1.0, fits: bool | None = None) -> None:
        shape = shapes.get(parameter)
        if shape is None:
            ignored.setdefault(UNKNOWN_MODULE, []).extend(roles[p] for p in parts)
            return
        factors = tuple(_factor(checkpoint, roles[part]) for part in parts)
        dora = None
        if "dora" in roles and parameter == weight and kind != "difference":
            dora = _factor(checkpoint, roles["dora"])
            fits = fits is not False and _lengths_fit(tuple(dora.shape), shape)
        if fits is None:
            fits = math.prod(factors[0].shape) == math.prod(shape) and _squeezed(factors[0].shape) == _squeezed(shape)
        if not fits:
            ignored.setdefault(WRONG_SHAPE, []).extend(
                roles[p] for p in (*parts, *(["dora"] if dora is not None else []))
            )
            return
        found.append((parameter, Change(kind=kind, shape=shape, factors=factors, scale=scale, dora=dora)))

    def pair(first: str, second: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes [N, R] and [R, K] of two factors, kernels counted into K."""
        missing = [part for part in (first, second) if part not in roles]
        if missing:
            there = next((roles[part] for part in (first, second) if part in roles), next(iter(roles.values())))
            raise CheckpointError(f"{there} has no counterpart ({missing[0]} is missing). Download it again.")
        up, down = (checkpoint.tensors[roles[part]].shape for part in (first, second))
        if len(up) < 2 or len(down) < 2 or up[1] != down[0] or math.prod(up[2:]) != 1 or not 0 < up[1] <= MAX_RANK:
            raise CheckpointError(
                f"{roles[first]} {list(up)} and {roles[second]} {list(down)} are no pair of factors. Download it again."
            )
        return up[:2], (down[0], math.prod(down[1:]))

    def fits(n: int, k: int) -> bool:
        shape = shapes.get(weight, ())
        return len(shape) >= 2 and (n, k) == (shape[0], math.prod(shape[1:]))

    alpha = _alpha(checkpoint, roles["alpha"]) if "alpha" in roles else None
    if "up" in roles or "down" in roles:
        up, down = pair("up", "down")
        scale = _noted_scale(checkpoint, roles["up"], up[1]) if alpha is None else alpha / up[1]
        add(weight, "LoRA", "up", "down", scale=scale, fits=fits(up[0], down[1]))
        if "up_bias" in roles:
            add(f"{module}.bias", "difference", "up_bias", scale=scale)
    if any(role.startswith("hada") for role in roles):
        (n, rank), (_, k) = pair("hada_w1_a", "hada_w1_b")
        same = pair("hada_w2_a", "hada_w2_b")
        fit = fits(n, k) and (same[0][0], same[1][1]) == (n, k)
        scale = 1.0 if alpha is None else alpha / rank
        add(weight, "LoHa", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", scale=scale, fits=fit)
    if any(role.startswith("lokr") for role in roles):
        found += _kronecker(checkpoint, weight, roles, shapes, ignored, alpha, pair)
    if "diff" in roles:
        add(weight, "difference", "diff")
    if "diff_b" in roles:
        add(f"{module}.bias", "difference", "diff_b")
    if "diff_m" in roles:
        add(f"{module}.modulation", "difference", "diff_m")
    if not found and not any(name in names for names in ignored.values() for name in roles.values()):
        raise CheckpointError(f"{listing(list(roles.values()), 2)} stand alone: what they belong to is missing.")
    return found


def _kronecker(
    checkpoint: Checkpoint,
    weight: str,
    roles: dict[str, str],
    shapes: Shapes,
    ignored: dict[str, list[str]],
    alpha: float | None,
    pair: Callable[[str, str], tuple[tuple[int, ...], tuple[int, ...]]],
) -> list[tuple[str, Change]]:
    """A LoKr: each half is a matrix or a product of two. alpha / rank counts where a half is a product."""
    sizes: list[tuple[int, ...]] = []
    rank = None
    for half in ("lokr_w1", "lokr_w2"):
        if half in roles:
            sizes.append(checkpoint.tensors[roles[half]].shape)
        else:
            (n, rank), (_, k) = pair(f"{half}_a", f"{half}_b")
            sizes.append((n, k))
    shape = shapes.get(weight, ())
    product = tuple(a * b for a, b in zip(*sizes, strict=False))
    used = [name for role, name in roles.items() if role.startswith("lokr") or role == "dora"]
    dora = _factor(checkpoint, roles["dora"]) if "dora" in roles else None
    lengths = dora is None or _lengths_fit(tuple(dora.shape), shape)
    if any(len(size) != 2 for size in sizes) or product != shape or not lengths:
        ignored.setdefault(WRONG_SHAPE, []).extend(used)
        return []
    halves: list[Tensor] = []
    for half in ("lokr_w1", "lokr_w2"):
        if half in roles:
            halves.append(_factor(checkpoint, roles[half]))
        else:
            first, second = (_factor(checkpoint, roles[f"{half}_{side}"]) for side in "ab")
            halves.append(first.float().flatten(1) @ second.float().flatten(1))  # as small as the root of the weight
    scale = 1.0 if alpha is None or rank is None else alpha / rank
    return [(weight, Change(kind="LoKr", shape=shape, factors=tuple(halves), scale=scale, dora=dora))]


def _factor(checkpoint: Checkpoint, name: str) -> Tensor:
    info = checkpoint.tensors[name]
    if not info.dtype.is_floating_point or 0 in info.shape:
        raise CheckpointError(
            f"{name} is {info.dtype} {list(info.shape)}, and numbers are expected. Download it again."
        )
    return checkpoint.read(name)


def _alpha(checkpoint: Checkpoint, name: str) -> float:
    info = checkpoint.tensors[name]
    value = float(checkpoint.read(name).float()) if math.prod(info.shape) == 1 else math.nan
    if not math.isfinite(value):
        raise CheckpointError(f"{name} is no number, and an alpha is expected. Download it again.")
    return value


def _noted_scale(checkpoint: Checkpoint, name: str, rank: int) -> float:
    """alpha / rank by PEFT's configuration, which Diffusers writes into the file's metadata, for the tensor `name`."""
    prefix, _, rest = name.partition(".")
    try:
        noted = json.loads(checkpoint.metadata.get(NOTED, "{}"))
        alpha = noted.get(f"{prefix}.lora_alpha")
        for module, own in (noted.get(f"{prefix}.alpha_pattern") or {}).items():
            if f".{rest}".rpartition(".lora_")[0].endswith(f".{module}"):
                alpha = own
        if alpha is None:
            return 1.0
        scale = float(alpha) / (math.sqrt(rank) if noted.get(f"{prefix}.use_rslora") else rank)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        scale = math.nan
    if not math.isfinite(scale):
        raise CheckpointError(f"its note {NOTED} gives no alpha that could be used. Save it again.")
    return scale


def _squeezed(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _lengths_fit(lengths: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether DoRA's lengths are those of the rows ([N], [N, 1], ...) or columns ([1, K]) of a weight."""
    if len(shape) < 2 or not lengths:
        return False
    rows = lengths[0] == shape[0] and math.prod(lengths[1:]) == 1
    return rows or (len(shape) == 2 and lengths == (1, shape[1]))
