"""WanCore as a ComfyUI node pack: ComfyUI imports this file and calls `comfy_entrypoint`.

Nothing of ComfyUI is imported before that, so that tests and tools can import this file as well.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

WEB_DIRECTORY = "./web"


def _name_engine() -> None:
    """Make the engine and the lab beside this file importable as `wan_core` and `wan_lab`, the names that their modules
    use for each other.

    ComfyUI imports a pack under a module name that is its path, and a pack's folder on `sys.path` would hide the
    modules of other packs.
    """
    for name in ("wan_core", "wan_lab"):
        if name in sys.modules:
            continue
        root = Path(__file__).resolve().parent / name
        spec = importlib.util.spec_from_file_location(
            name, root / "__init__.py", submodule_search_locations=[str(root)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)


async def comfy_entrypoint() -> Any:
    """The extension that ComfyUI registers."""
    _name_engine()
    from .nodes import WanCoreExtension

    return WanCoreExtension()
