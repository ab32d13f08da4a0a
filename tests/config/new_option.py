"""Run in a process of its own by `test_new_option.py`: an option `grain` is added to the source of `RunNumbers`, and
nothing else is changed. Prints one JSON object: what each place that has the options of a run makes of it."""

from __future__ import annotations

import importlib.machinery
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType
from typing import Any

PLACE = b'so\n    that each command, node, worker and report has it."""\n'
FIELD = b"""
    grain: float = option(0.0, low=0, high=1, help="so much", tip="So much.", step=0.1, digits=0.01, added=True)
"""


class WithOption(importlib.machinery.SourceFileLoader):
    """Reads a module with `FIELD` in it."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        assert source.count(PLACE) == 1
        return self.source_to_code(source.replace(PLACE, PLACE + FIELD), self.path)


class Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "wan_core.config.plan_numbers":
            return None
        file = Path(path[0], "plan_numbers.py")
        return importlib.machinery.ModuleSpec(fullname, WithOption(fullname, str(file)), origin=str(file))


def refused(make: Callable[[], object]) -> str:
    """What is said of what `make` would make."""
    from wan_core.config import OptionError

    try:
        return repr(make())
    except OptionError as fault:
        return str(fault)


def main(folder: str) -> None:
    sys.meta_path.insert(0, Finder())
    import torch

    from tools.declared_nodes import without_comfyui
    from wan_core.cli import build_parser
    from wan_core.cli.generate import request_of
    from wan_core.cli.inform import asked_plan
    from wan_core.cli.list_keys import key_of
    from wan_core.cli.prompt_file import read_list
    from wan_core.config import LoadOptions, Request
    from wan_core.pipeline.check import check_request
    from wan_core.sampling.plan import Plan
    from wan_core.workers.wire import unpack

    parse, cpu, tiny = build_parser().parse_args, torch.device("cpu"), LoadOptions(model="tiny")
    request = request_of(parse(["generate", "--prompt", "a", "--grain", "0.25"]))
    job = check_request(tiny, request, cpu).job
    planned = parse(["plan", "--task", "t2v-tiny", "--grain", "0.25"])
    listed = Path(folder, "list.jsonl")
    listed.write_text('{"prompt": "a", "grain": 0.5}\n{"prompt": "a"}\n')
    lines = read_list(listed, parse(["generate", "--prompts", str(listed), "--out", f"{folder}/a.mp4"]), tiny)
    with without_comfyui() as nodes:
        from nodes.plan_inputs import numbers_of

        defined = {node.define_schema().node_id: node.define_schema() for node in nodes.NODES}
        entered = [numbers_of({"grain": value}).grain for value in (0.25, None)]  # type: ignore[attr-defined]
    found = {
        "request": request.grain,  # type: ignore[attr-defined]
        "its JSON": unpack(Request, json.loads(json.dumps(asdict(request)))) == request,
        "plan": job.plan.grain,  # type: ignore[attr-defined]
        "its JSON for workers": unpack(Plan, json.loads(json.dumps(asdict(job.plan)))) == job.plan,
        "plan --json": asked_plan(planned, []).plan.as_dict()["grain"],
        "table of the plan": "grain: 0.25" in job.plan.table().splitlines(),
        "report and video": job.settings()["grain"],
        "list": [one.request.grain for one in lines],  # type: ignore[attr-defined]
        "keys": len({one.key for one in lines}),
        "default": "grain" in str(check_request(tiny, Request(prompt="a"), cpu).job.settings()),
        "last widgets": [defined[name].inputs[-1]["name"] for name in ("WanCoreSampler", "WanCorePlanPreview")],
        "entered": entered,
        "beyond its range": refused(lambda: numbers_of({"grain": 2.0})),
        "key without it": lines[1].key == key_of(Request(prompt="a"), tiny),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
