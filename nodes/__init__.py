"""The nodes: widgets -> dataclasses -> one engine call. No arithmetic on tensors here; what is missing goes into the
engine. From the first release on, ids, inputs, their order, defaults and sockets are frozen
(`tests/nodes/node_schemas.json`): only ever append.

What constants alone show to be wrong is refused before a prompt runs: `validate_inputs` gets None for what comes
through a link, which is checked when the node runs, and raises. ComfyUI's page shows the sentence of an exception at
once and a single time; one that is returned it hides behind two clicks, once for each input that is named. ComfyUI
leaves the limits of the inputs that `validate_inputs` names to it."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from wan_core.config.printing import plain_logs

from . import (
    accelerate,
    animate,
    card,
    conditioning,
    control,
    from_model,
    host,
    lora,
    model_loader,
    part_loaders,
    prompts,
    report,
    sampling,
    skipping,
    sound,
    video,
    workers,
)
from .schema import CATEGORIES, checked

plain_logs()
MODULES = (model_loader, part_loaders, conditioning, sampling, report, video, skipping, card, lora, workers, accelerate)
MODULES += (from_model, animate, sound, control, prompts)
NODES: list[type[io.ComfyNode]] = [
    checked(node)
    for module in MODULES
    for name, node in vars(module).items()
    if name in CATEGORIES and node.__module__ == module.__name__
]


class WanCoreExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        host.prepare_when_up()
        return NODES
