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

from . import host
from .accelerate import WanCoreAccelerate
from .animate import WanCoreAnimate, WanCoreAnimate2
from .card import WanCoreCompare, WanCoreReportCard
from .conditioning import WanCoreEmptyLatent, WanCoreImageToVideo, WanCoreNAG, WanCoreTextEncode
from .control import WanCoreCamera, WanCoreVACE
from .from_model import WanCoreFromModel
from .lora import WanCoreLoRA
from .model_loader import WanCoreModelLoader
from .part_loaders import WanCoreTextEncoderLoader, WanCoreVAELoader, WanCoreVisionLoader
from .prompts import WanCorePromptsOverTime
from .report import WanCorePlanPreview, WanCoreReport
from .sampling import WanCoreSampler
from .schema import checked
from .skipping import (
    WanCoreMagCache,
    WanCoreSparseAttention,
    WanCoreTaylorSeer,
)
from .sound import WanCoreSoundToVideo
from .video import WanCoreDecodeToVideo, WanCoreVAEDecode
from .workers import WanCoreLauncher

plain_logs()
NODES: list[type[io.ComfyNode]] = [
    checked(node)
    for node in (
        WanCoreModelLoader,
        WanCoreTextEncoderLoader,
        WanCoreVAELoader,
        WanCoreTextEncode,
        WanCoreEmptyLatent,
        WanCoreImageToVideo,
        WanCoreSampler,
        WanCorePlanPreview,
        WanCoreVAEDecode,
        WanCoreReport,
        WanCoreMagCache,
        WanCoreTaylorSeer,
        WanCoreCompare,
        WanCoreLoRA,
        WanCoreSparseAttention,
        WanCoreLauncher,
        WanCoreAccelerate,
        WanCoreFromModel,
        WanCoreNAG,
        WanCoreDecodeToVideo,
        WanCoreAnimate,
        WanCoreAnimate2,
        WanCoreSoundToVideo,
        WanCoreVACE,
        WanCoreCamera,
        WanCoreVisionLoader,
        WanCoreReportCard,
        WanCorePromptsOverTime,
    )
]


class WanCoreExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        host.prepare_when_up()
        return NODES
