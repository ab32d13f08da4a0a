"""Plans, requests and reports as JSON for the control channel, and back.

Nothing is rounded: JSON keeps all digits of a float.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from wan_core.config import (
    AdaptiveOptions,
    GuidanceOptions,
    LoadOptions,
    MagCacheOptions,
    Request,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
)
from wan_core.execution.report import Phase, Report
from wan_core.sampling.plan import Plan, Step

SKIPS = {
    "magcache": MagCacheOptions,
    "taylorseer": TaylorSeerOptions,
    "adaptive": AdaptiveOptions,
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
            }
        )
        for step in data["steps"]
    )
    adaptive = None if data["adaptive"] is None else AdaptiveOptions(**data["adaptive"])
    sparse = None if data["sparse"] is None else SparseOptions(**data["sparse"])
    keeps = tuple((expert, tuple(shares)) for expert, shares in data["keeps"])
    made = {"steps": steps, "notes": tuple(data["notes"]), "adaptive": adaptive, "sparse": sparse, "keeps": keeps}
    return Plan(**{**data, **made})


def request_from(data: Mapping[str, Any]) -> Request:
    """Likewise."""
    skip = data["skip"]
    if skip is not None:
        skip = SkipOptions(**{name: SKIPS[name](**given) for name, given in skip.items() if given is not None})
    return Request(**{**data, "skip": skip})


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
    }


def report_from(data: Mapping[str, Any]) -> Report:
    """A report that the ranks sent. It continues with the clock of this process and uses no GPU."""
    phases = {name: Phase(**phase) for name, phase in data["phases"].items()}
    return Report(torch.device("cpu"), dict(data["settings"]), phases, list(data["notes"]), data["device"])
