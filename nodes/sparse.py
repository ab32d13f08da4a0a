"""Node for block-sparse self-attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from wan_core.config import SkipOptions, SparseOptions, check_choice
from wan_core.sampling.sparsity.schedule import PRESETS

from .schema import ADVANCED, schema, widgets
from .skipping import CUSTOM, joined, measured_files, skipping_input, skipping_output

UNSELECTED: dict[str, dict[str, Any]] = {
    "means": {},
    "slope": {"slope": True},
    "slope, error": {"slope": True, "score": "error"},
    "parts, slope, error": {"parts": 4, "slope": True, "score": "error"},
    "error": {"score": "error"},
}


class WanCoreSparseAttention(io.ComfyNode):
    """Self-attention that reads only selected key blocks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreSparseAttention",
            "WanCore Sparse Attention",
            aliases=("sparse attention", "radial attention", "sage", "wan fast", "sla"),
            shows_text=True,
            description="Block-sparse self-attention: every layer selects the key blocks with the most attention and "
            "reads only those. Saves most at 720p, where attention takes most of the time; small videos gain "
            "nothing. The plan preview shows the share of keys per step.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, CUSTOM],
                    default="balanced",
                    tooltip="quality, balanced or fast; custom uses the numbers below, which have no effect otherwise.",
                ),
                *widgets(SparseOptions),
                skipping_input(),
                io.Combo.Input(
                    "unselected",
                    **ADVANCED,
                    options=list(UNSELECTED),
                    default="means",
                    optional=True,
                    tooltip="What replaces unselected blocks in any preset, and how blocks are selected. means: one "
                    "mean for each. slope: their values follow the scores of their keys to first order. error: blocks "
                    "are selected by the error of replacing them, instead of by their attention. parts: four means "
                    "for each. Of the time of dense attention, error takes 1 % more, slope and parts 8. Not with "
                    "pooled off.",
                ),
            ],
            outputs=[skipping_output()],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> list[tuple[str, int]]:
        return measured_files()

    @classmethod
    def validate_inputs(
        cls,
        preset: str | None = None,
        mass: float | None = None,
        pooled: bool | None = None,
        unselected: str | None = "means",
    ) -> bool:
        if not (preset is None or mass is None or pooled is None or unselected is None):
            check_choice("preset", preset, (*PRESETS, CUSTOM))
            check_choice("unselected", unselected, tuple(UNSELECTED))
            chosen = SparseOptions(sparsity=0.5, mass=mass or None, pooled=pooled)
            replace(chosen if preset == CUSTOM else PRESETS[preset], **UNSELECTED[unselected])
        return True

    @classmethod
    def execute(
        cls,
        preset: str,
        mass: float,
        kernel: str,
        skipping: SkipOptions | None = None,
        unselected: str = "means",
        **numbers: Any,
    ) -> io.NodeOutput:
        custom = SparseOptions(mass=mass or None, **numbers)
        chosen = custom if preset == CUSTOM else PRESETS[preset]
        return joined(skipping, sparse=replace(chosen, kernel=kernel, **UNSELECTED[unselected]))
