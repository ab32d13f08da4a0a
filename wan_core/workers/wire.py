"""Plans, requests and reports as JSON for the control channel, and back.

Nothing is rounded: JSON keeps all digits of a float.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from wan_core.config import (
    AdaptiveOptions,
    ControlOptions,
    GuidanceOptions,
    LoadOptions,
    MagCacheOptions,
    NagOptions,
    PatternOptions,
    Request,
    SkipOptions,
    SparseOptions,
    StageOptions,
    TaylorSeerOptions,
    WindowOptions,
)
from wan_core.execution.report import Phase, Report
from wan_core.sampling.plan import Plan, Step
from wan_core.sampling.start import Leftover, Start

LEFT = "leftover."  # names of the tensors of a `Leftover`
SKIPS = {
    "magcache": MagCacheOptions,
    "taylorseer": TaylorSeerOptions,
    "adaptive": AdaptiveOptions,
    "pattern": PatternOptions,
    "guidance": GuidanceOptions,
    "sparse": SparseOptions,
}


def plan_from(data: Mapping[str, Any]) -> Plan:
    """The inverse of `dataclasses.asdict`, after JSON turned tuples into lists."""
    steps = tuple(
        Step(
            **{
                **step,
                "branches": tuple(step["branches"]),
                "skipped": tuple(step["skipped"]),
                "texts": tuple(step["texts"]),
                "control": None if step["control"] is None else tuple(step["control"]),
                "windows": tuple(tuple(window) for window in step["windows"]),
            }
        )
        for step in data["steps"]
    )
    adaptive = None if data["adaptive"] is None else AdaptiveOptions(**data["adaptive"])
    sparse = None if data["sparse"] is None else SparseOptions(**data["sparse"])
    keeps = tuple((expert, tuple(shares)) for expert, shares in data["keeps"])
    nag = None if data["nag"] is None else NagOptions(**data["nag"])
    stages = tuple(StageOptions(**stage) for stage in data["stages"])
    made = {"steps": steps, "notes": tuple(data["notes"]), "adaptive": adaptive, "sparse": sparse, "keeps": keeps}
    made |= {"nag": nag, "before": tuple(data["before"]), "stages": stages}
    made["context_windows"] = windows_from(data["context_windows"])
    return Plan(**{**data, **made})


def request_from(data: Mapping[str, Any]) -> Request:
    """Likewise."""
    skip = data["skip"]
    if skip is not None:
        given = {name: one for name, one in skip.items() if one is not None}
        skip = SkipOptions(**{name: SKIPS[name](**one) if name in SKIPS else one for name, one in given.items()})
    nag = None if data["nag"] is None else NagOptions(**data["nag"])
    control = None if data["control"] is None else ControlOptions(**data["control"])
    given = {"skip": skip, "nag": nag, "control": control, "windows": windows_from(data["windows"])}
    return Request(**{**data, **given})


def windows_from(data: Mapping[str, Any] | None) -> WindowOptions | None:
    return None if data is None else WindowOptions(**data)


def start_data(start: Start) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a run begins with, as the fields of a header and tensors."""
    fields: dict[str, Any] = {"shape": list(start.shape), "seed": start.seed, "add_noise": start.add_noise}
    fields["batch_index"] = None if start.batch_index is None else list(start.batch_index)
    left, tensors = start.leftover, {} if start.latents is None else {"latents": start.latents}
    fields["leftover"] = None if left is None else left.as_dict()
    return fields, tensors | ({} if left is None else prefixed(left.tensors(), LEFT))


def start_from(fields: Mapping[str, Any], tensors: dict[str, Tensor]) -> Start:
    """The inverse of `start_data`. Takes its tensors out of `tensors`."""
    left = {name.removeprefix(LEFT): tensors.pop(name) for name in list(tensors) if name.startswith(LEFT)}
    return Start(
        shape=tuple(fields["shape"]),
        seed=fields["seed"],
        add_noise=fields["add_noise"],
        batch_index=None if fields["batch_index"] is None else tuple(fields["batch_index"]),
        latents=tensors.pop("latents", None),
        leftover=Leftover.from_tensors(fields["leftover"], left) if fields["leftover"] else None,
    )


def prefixed(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def load_options_from(data: Mapping[str, Any], device: torch.device) -> LoadOptions:
    """With the rank's own device instead of the requested one."""
    return LoadOptions(**{**data, "device": str(device)})


def report_data(report: Report) -> dict[str, Any]:
    """What `report_from` needs, with the name of the device."""
    return {
        "device": report.as_dict()["device"],
        "settings": report.settings,
        "phases": {name: asdict(phase) for name, phase in report.phases.items()},
        "notes": report.notes,
        "warnings": report.warnings,
    }


def report_from(data: Mapping[str, Any]) -> Report:
    """A report that the ranks sent. It continues with the clock of this process and uses no GPU."""
    phases = {name: Phase(**phase) for name, phase in data["phases"].items()}
    notes, warnings = list(data["notes"]), list(data["warnings"])
    return Report(torch.device("cpu"), dict(data["settings"]), phases, notes, data["device"], warnings)
