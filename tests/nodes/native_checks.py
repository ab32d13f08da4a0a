"""Run by ComfyUI's Python: the checks (`check_...`) of a module of this folder, each with a new `World`, which the
module defines or imports. Prints one JSON object on its last line, by check: "" or what was wrong.

    python native_checks.py COMFYUI_PATH MODULE [CHECK ...]
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor

import native_models as world


def main(checkout: str, name: str, *wanted: str) -> None:
    faults, usual = {}, world.conditions
    pack = world.set_up(checkout)
    module = importlib.import_module(name)
    names = [check.removeprefix("check_") for check in vars(module) if check.startswith("check_")]
    with ThreadPoolExecutor(1) as thread:
        for one in wanted or names:
            world.conditions = usual
            fault = thread.submit(getattr(module, f"check_{one}"), module.World(pack)).exception()
            faults[one] = "" if fault is None else "".join(traceback.format_exception(fault))[-3000:]
    print(json.dumps(faults))


if __name__ == "__main__":
    main(*sys.argv[1:])
