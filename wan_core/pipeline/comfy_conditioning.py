"""ComfyUI's CONDITIONING and LATENT as the engine's `Conditioning` and plan. What would have no effect is refused.

Legend: B batch, C latent channels, T/Y/X latent frames, rows, columns, S text rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from wan_core.config import OptionError
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import NAG, NEUTRAL, PROMPTS, TIMES, check_keys, check_sparse, family_of
from wan_core.models.wan.families.family import Family
from wan_core.pipeline.model_parts import Parts
from wan_core.sampling.conditioning import Conditioning, penalty_rows
from wan_core.sampling.control import Scales, drive_by_text, scale_by_text, with_nag, with_passes
from wan_core.sampling.plan import Plan
from wan_core.sampling.steps import Step, averaged
from wan_core.sampling.texts import WHOLE, TextRange, TimedText, assign_ranges, check_reuse, first_latent

CONDITIONING: TypeAlias = "list[list[Any]]"
"""[[rows [1, S, text_dim], {...}], ...]"""


class Joined(NamedTuple):
    """What sockets carry, for a run. `plan`: the one given, with the text of each step. `seconds`: that encoding the
    text took. `notes`: for the report. `latents`: un-normalised, that the run begins with; None for noise. `prompts`:
    those of `positive` whose encoder says what it encoded."""

    plan: Plan
    conditioning: Conditioning
    seconds: float
    notes: list[str]
    latents: Tensor | None
    prompts: list[str]


class Texts(NamedTuple):
    """One CONDITIONING: its texts, where in the run each is used, and what else it carries."""

    rows: list[Tensor]  # each once
    entries: list[int]  # of each entry, which of the rows it has
    ranges: list[TextRange]
    extras: Mapping[str, Any]
    seconds: float
    notes: list[str]
    strengths: list[Scales]  # of the control videos, with each entry; nothing where they do not change
    driven: list[bool]  # whether each entry comes with a driving video
    prompts: list[str]  # as far as their encoder says what it encoded


def join(
    positive: CONDITIONING,
    negative: CONDITIONING,
    latent: Mapping[str, Any],
    experts: Parts,
    plan: Plan,
    range_shift: float | None = None,
) -> Joined:
    """What the sampler needs of its sockets. range_shift: of a MODEL of ComfyUI, with which ranges of texts are sigmas;
    None: that of the plan. Raises OptionError for what does not fit the model, and for what it would not see."""
    task, dit = experts.task, experts.dit
    family = family_of(task)
    if plan.sparse is not None:
        check_sparse(task)
    check_latents(latent["samples"].shape, dit, task.name)
    sockets = (positive, "positive"), (negative, "negative")
    for entries, name in sockets:
        for _, extras in entries:
            check_keys(family, name, extras)
    cond, uncond = (read_texts(*one, dit, family) for one in sockets)
    for key in sorted(family.conditioning_keys - family.branch_keys):
        check_same(key, [cond.extras.get(key), uncond.extras.get(key)], "`positive` and `negative`")
    if plan.reads_negative:
        check_not_alone(family.conditioning_keys, cond.extras, uncond.extras)
    guided = plan.guided
    if uncond.extras.get(NAG) is not None:  # before texts, of which its steps also take a negative one
        plan = with_nag(plan, uncond.extras[NAG])
    plan, cond, uncond = plan_texts(plan, cond, uncond, family, range_shift)
    inputs = family.read_conditioning(task, experts.vae, cond.extras, latent)
    if family.driving_keys:
        plan = with_passes(plan, own=family.own_driving_inputs <= inputs["inputs"].keys())
    own = {key: uncond.extras.get(key) for key in family.branch_keys}
    if guided and not all(_equal(cond.extras.get(key), value) for key, value in own.items()):
        other = family.read_conditioning(task, experts.vae, {**cond.extras, **own}, latent)["inputs"]
        if lacking := inputs["inputs"].keys() ^ other.keys():
            raise OptionError(
                f"only one of `positive` and `negative` has {', '.join(sorted(lacking))}: connect both outputs of the "
                "node that makes them"
            )
        inputs = {**inputs, "uncond_inputs": other}
    latents = first_latents(plan, latent["samples"], inputs["known"].shape[2] if "known" in inputs else 0)
    conditioning = Conditioning(
        cond=cond.rows[0],
        uncond=uncond.rows[0] if plan.reads_negative else None,
        later_cond=tuple(cond.rows[1:]),
        later_uncond=tuple(uncond.rows[1:]) if plan.reads_negative else (),
        separate=plan.reads_negative and len({dit.text_rows(one.shape[1]) for one in (*cond.rows, *uncond.rows)}) > 1,
        penalty=penalty_of(plan, cond, latent["samples"].shape[2]),
        **inputs,
    )
    notes = [*cond.notes, *(uncond.notes if plan.reads_negative else ())]
    return Joined(plan, conditioning, cond.seconds or uncond.seconds, notes, latents, cond.prompts)


def prompt_starts(positive: CONDITIONING) -> tuple[int, ...]:
    """The frames at which prompts of parts of the video begin; () where one holds for all frames."""
    starts = [extras[PROMPTS]["starts"] for _, extras in positive if extras.get(PROMPTS) is not None]
    return tuple(starts[0]) if starts else ()


def penalty_of(plan: Plan, cond: Texts, frames: int) -> Tensor | None:
    """`Conditioning.penalty` of a prompt with parts, for latents of so many frames; None for others. Raises OptionError
    where texts change in another way too."""
    prompts = cond.extras.get(PROMPTS)
    if prompts is None or len(prompts["starts"]) < 2:
        return None
    if len(cond.rows) > 1:
        raise OptionError("`positive` has prompts over time, and texts that change with the step: use one of them")
    starts = tuple(first_latent(frame) for frame in prompts["starts"])
    text = TimedText("", ("",) * len(starts), starts)
    return penalty_rows(text, prompts["tokens"], frames, cond.rows[0].shape[1])[None]


def plan_texts(
    plan: Plan, cond: Texts, uncond: Texts, family: Family, shift: float | None
) -> tuple[Plan, Texts, Texts]:
    """`plan` with the texts of each step. Where strengths of control videos change with texts, each step has these,
    too, and both prompts have 1; where only some entries have a driving video, the other steps do not read it. shift:
    as for `assign_ranges`. Raises OptionError."""
    changing = family.strength_key
    if (cond.ranges, uncond.ranges) != ([WHOLE], [WHOLE]):
        plan = assign_ranges(plan, cond.ranges, uncond.ranges, shift)
    if family.driving_keys:
        plan = drive_by_text(plan, cond.driven, uncond.driven, family.driving_keys[0])
    if cond.strengths or uncond.strengths:
        both = [
            one.strengths or [tuple(one.extras.get(changing) or (1.0,))] * len(one.entries) for one in (cond, uncond)
        ]
        plan = scale_by_text(plan, *both)
        ones = {changing: [1.0] * len(both[0][0])}
        cond, uncond = (one._replace(extras={**one.extras, **ones}) for one in (cond, uncond))

    def of_rows(step: Step) -> Step:
        return replace(step, texts=(cond.entries[step.texts[0]], uncond.entries[step.texts[1]]))

    steps = tuple(averaged([of_rows(one) for one in step.conditions]) for step in plan.steps)
    if plan.unskipped is not None:
        more = sum(step.unskipped - step.conditions[0].unskipped for step in steps)
        plan = replace(plan, unskipped=plan.unskipped + more)
    return check_reuse(replace(plan, steps=steps)), cond, uncond


def read_texts(conditioning: CONDITIONING, name: str, dit: DiTConfig, family: Family) -> Texts:
    """The texts of a CONDITIONING called `name`, for a model of a family. Raises OptionError."""
    if not conditioning:
        raise OptionError(f"`{name}` has no text: connect a text encode node, an empty text is allowed")
    rows, everything = [one[0] for one in conditioning], [one[1] for one in conditioning]
    for one in rows:
        if one.ndim != 3 or one.shape[2] != dit.text_dim or not one.shape[1]:
            raise OptionError(
                f"`{name}` has text of {list(one.shape)}; this model takes [1, {dit.text_len}, {dit.text_dim}]: encode "
                "it with the text encoder that belongs to the model (UMT5)"
            )
    # Rows of zeros behind those that the model was trained with fill the text of another length.
    rows = [one if one[:, dit.text_len :].any() else one[:, : dit.text_len] for one in rows]
    ranges = [TextRange.of(extras) for extras in everything]
    if len(rows) > 1 and any(len(one) != 1 for one in rows):
        raise OptionError(f"`{name}` changes its text during the run, and has several texts at once: encode one each")
    changing, driving = family.strength_key, family.driving_keys
    strengths = [tuple(extras.get(changing) or ()) for extras in everything]
    changes = len(set(strengths)) > 1
    driven = [bool(driving) and extras.get(driving[0]) is not None for extras in everything]
    own = {key for extras in everything for key in extras} - {*NEUTRAL, *TIMES} - ({changing} if changes else set())
    for key in sorted(own):
        some = [extras for extras, has in zip(everything, driven, strict=True) if has or key not in driving]
        check_same(key, [extras.get(key) for extras in some], f"the texts of `{name}`", missing=True)
    seconds = max((e.get("wancore_seconds") or 0.0 for e in everything), default=0.0)
    notes = [note for e in everything for note in e.get("wancore_notes") or ()]
    first = [next(n for n, other in enumerate(rows) if _equal(one, other)) for one in rows]
    each = sorted(set(first))
    return Texts(
        rows=[rows[n] for n in each],
        entries=[each.index(n) for n in first],
        ranges=ranges,
        extras=everything[driven.index(True) if any(driven) else 0],
        seconds=seconds,
        notes=list(dict.fromkeys(notes)),
        strengths=strengths if changes else [],
        driven=driven,
        prompts=[e["wancore_prompt"] for e in everything if e.get("wancore_prompt") is not None],
    )


def check_same(key: str, values: Sequence[Any], where: str, missing: bool = False) -> None:
    """Raise OptionError where the values of a key differ. missing: whether a value that is not there differs."""
    compared = values if missing else [value for value in values if value is not None]
    for value in compared[1:]:
        if not _equal(compared[0], value):
            raise OptionError(
                f"{where} carry different values of {key}; a run takes one: add it to all of them, or none"
            )


def check_not_alone(keys: Collection[str], positive: Mapping[str, Any], negative: Mapping[str, Any]) -> None:
    """Raise OptionError for what the negative prompt alone carries: both branches take what the prompt has."""
    alone = sorted(key for key in keys if negative.get(key) is not None and positive.get(key) is None)
    if alone:
        raise OptionError(
            f"`negative` carries {', '.join(alone)}, and `positive` does not: connect both outputs of the node that "
            "makes them"
        )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.shape == other.shape and bool(torch.equal(one, other.to(one))))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, bool | int | float | str) and isinstance(other, bool | int | float | str):
        return one == other
    return one is other


def check_latents(shape: Sequence[int], dit: DiTConfig, task: str) -> None:
    """Raise OptionError unless these are latents of the model's channels that patches fill."""
    if len(shape) != 5 or shape[1] != dit.out_channels:
        raise OptionError(
            f"latents of {list(shape)} given; {task} needs [batch, {dit.out_channels}, frames, rows, columns]: "
            "choose the latent type and the VAE that belong to the model"
        )
    if any(size % patch for size, patch in zip(shape[2:], dit.patch_size, strict=True)):
        raise OptionError(
            f"latents of {list(shape)} given; {task} takes frames, rows and columns that are multiples of "
            f"{' x '.join(map(str, dit.patch_size))}: choose a width and a height that WanCore Empty Latent takes"
        )


def first_latents(plan: Plan, samples: Tensor, known_frames: int) -> Tensor | None:
    """The latents that `plan` begins with, None where that is noise, or where latents are empty after their first
    `known_frames`: 0, or in ComfyUI's Wan22ImageToVideoLatent the mean of each channel. Raises OptionError for a video
    that the run would not see."""
    new = samples[:, :, known_frames:]
    empty = not new.numel() or bool((new == new[:, :, :1, :1, :1]).all())
    if not empty and not plan.from_latents:
        raise OptionError(
            "`latent` holds a video, and the sampler starts from noise alone: lower denoise for video to video (fewer "
            "steps need a lower one), or raise start_step; otherwise connect an empty latent (WanCore Empty Latent), "
            "or WanCore Image to Video to start from an image"
        )
    return None if empty else samples
