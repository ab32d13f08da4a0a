"""The nodes: widgets -> dataclasses -> one engine call. No arithmetic on tensors here; what is missing goes into the
engine. From the first release on, ids, inputs, their order, defaults and sockets are frozen
(`tests/nodes/node_schemas.json`): only ever append.

What constants alone show to be wrong is refused before a prompt runs: `validate_inputs` gets None for what comes
through a link, which is checked when the node runs, and raises. ComfyUI's page shows the sentence of an exception at
once and a single time; one that is returned it hides behind two clicks, once for each input that is named. ComfyUI
leaves the limits of the inputs that `validate_inputs` names to it."""

from __future__ import annotations

import importlib
import pkgutil

from comfy_api.latest import ComfyExtension, io

from wan_core.config.printing import plain_logs

from . import host
from .schema import CATEGORIES, checked

plain_logs()
FOUND = {
    name: node
    for module in (importlib.import_module(f"{__name__}.{one.name}") for one in pkgutil.iter_modules(__path__))
    for name, node in vars(module).items()
    if name in CATEGORIES and node.__module__ == module.__name__
}
NODES: list[type[io.ComfyNode]] = [checked(FOUND[name]) for name in CATEGORIES]


class WanCoreExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        host.prepare_when_up()
        return NODES
