"""Run by ComfyUI's Python: the plans that the sampler node and the plan preview make of option sets, or what they
refuse. Prints one JSON list on its last line.

    python doors.py COMFYUI_PATH FILE      # a JSON list of (task, values of the widgets, options, frames)
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import native_models as world


def answer(plan_of: Any, task: str, values: dict, skip: dict | None, length: dict, files: dict) -> Any:
    """The plan, or what is refused. files: of the experts and their LoRAs."""
    from wan_core.config import SkipOptions, UserError
    from wan_core.models.wan.families import TASKS
    from wan_core.sampling.build import ModelFacts
    from wan_core.workers.wire import unpack

    paths = {name: Path(path) for name, path in files.items() if name != "loras"}
    paths |= {"loras": tuple(map(Path, files["loras"])), "all_files": True}
    facts = ModelFacts(task=TASKS[task], dit=TASKS[task].full_size, vae=TASKS[task].vae, **paths)
    try:
        model = SimpleNamespace(facts=facts, shift=None)
        options = unpack(SkipOptions, skip)
        return plan_of(model, values, options, **length).as_dict()
    except UserError as fault:
        return str(fault)


def main(checkout: str, sets: str) -> None:
    world.set_up(checkout)
    plan_of = importlib.import_module("pack.nodes.plan_inputs").plan_of
    print(json.dumps([answer(plan_of, *one) for one in json.loads(Path(sets).read_text())]))


if __name__ == "__main__":
    main(*sys.argv[1:])
