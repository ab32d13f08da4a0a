"""LoRAs on a model: chained between the loader and the sampler, and changed without loading the model again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from comfy_api.latest import io, ui

from wan_core.checkpoint import open_checkpoint
from wan_core.checkpoint.lora.read import check_lora
from wan_core.config import LoraOptions, OptionError
from wan_core.config.changes import Stamps, stamps, until_changed
from wan_core.execution.report import WARNING
from wan_core.pipeline.loras import notes_of, read_loras
from wan_core.pipeline.sources import TINY_LORAS

from . import host
from .files import locate
from .memory import ModelSocket
from .schema import output, schema
from .sockets import MODEL

NONE, SAME = "none", "the file above"
EMBEDDED = {f"tiny 4-step {expert} (embedded)": path for expert, path in TINY_LORAS.items()}
MAX_STRENGTH = 100.0
_check = until_changed(16)(lambda path: check_lora(open_checkpoint(path)))


def _strength(expert: str) -> io.Float.Input:
    return io.Float.Input(
        f"strength_{expert}",
        default=1.0,
        min=-MAX_STRENGTH,
        max=MAX_STRENGTH,
        step=0.05,
        round=0.001,
        tooltip=f"How strongly it counts for the {expert}-noise expert: 1 as it was made, 0 not at all. Another "
        "strength reads the weights that change again, within seconds, and compiles nothing.",
    )


class WanCoreLoRA(io.ComfyNode):
    """A LoRA for the high-noise expert, the low-noise expert or both."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = [NONE, *EMBEDDED, *host.model_names("loras")]
        return schema(
            "WanCoreLoRA",
            "WanCore LoRA",
            aliases="wan lora, lora loader, lightx2v",
            shows_text=True,
            description="Puts a LoRA on a model: merged into the weights, or beside those that stay packed. Can be "
            "chained.",
            inputs=[
                MODEL.Input("model", tooltip="From the WanCore Model Loader or another WanCore LoRA."),
                io.Combo.Input(
                    "high",
                    options=files,
                    default=NONE,
                    tooltip="The LoRA of the high-noise expert, or of a model with one transformer, in models/loras. "
                    "In any spelling: ComfyUI, kohya and musubi, Diffusers, LightX2V; LoRA, LoHa, LoKr, DoRA.",
                ),
                _strength("high"),
                io.Combo.Input(
                    "low",
                    options=[SAME, *files],
                    default=SAME,
                    tooltip="The LoRA of the low-noise expert. 'the file above': one file for both experts.",
                ),
                _strength("low"),
            ],
            outputs=[
                output(MODEL, "model_out", "The model with the LoRA on it."),
                output(io.String, "info", "What was applied, and what was not and why."),
            ],
        )

    @classmethod
    def validate_inputs(cls, high: str | None = None, low: str | None = None) -> bool:
        for path in _files(high, low).values():
            _check(path)
        return True

    @classmethod
    def fingerprint_inputs(cls, high: str | None = None, low: str | None = None, **_: object) -> Stamps:
        return stamps(_files(high, low).values())

    @classmethod
    async def execute(
        cls,
        model: ModelSocket,
        high: str,
        strength_high: float,
        low: str,
        strength_low: float,
    ) -> io.NodeOutput:
        """`async`, as of every loader: ComfyUI runs such nodes first, and weights are read while others work."""
        files, two = _files(high, low), model.experts.low is not None
        if not two and low not in (SAME, NONE):
            raise OptionError(f"{low} is given for the low-noise expert, and this model has one transformer only")
        strengths = {"high": strength_high, "low": strength_low}
        options = [
            LoraOptions(path=str(path), strength=strengths[expert], expert=expert)
            for expert, path in files.items()
            if two or expert == "high"
        ]
        new_loras = read_loras(options, model.experts.dit, two)
        model.settings.check_loras(new_loras)
        loras = {expert: (*model.loras.get(expert, ()), *expert_loras) for expert, expert_loras in new_loras.items()}
        lines = [*(WARNING + note for note in notes_of(loras)), *model.settings.lora_lines(new_loras)]
        info = "\n".join(lines) or "no LoRA"
        changed = replace(model, loras=loras)
        changed.read_ahead()
        return io.NodeOutput(changed, info, ui=ui.PreviewText(info))


def _files(high: str | None, low: str | None) -> dict[str, Path]:
    """Expert -> the file behind the names of the widgets; None comes through a link, and is known when the node runs.
    Raises OptionError."""
    names = {"high": high, "low": high if low == SAME else low}
    return {expert: locate("loras", name, EMBEDDED) for expert, name in names.items() if name not in (None, NONE)}
