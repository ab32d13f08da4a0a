"""Node for block-sparse self-attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comfy_api.latest import io

from wan_core.config import SPARSE_KERNELS, SkipOptions, SparseOptions, check_choice
from wan_core.sampling.sparsity.schedule import PRESETS

from .schema import ADVANCED, newer
from .skipping import CUSTOM, joined, measured_files, skipping_input, skipping_output

UNSELECTED: dict[str, dict[str, Any]] = {
    "means": {},
    "slope": {"slope": True},
    "slope, error": {"slope": True, "score": "error"},
    "parts, slope, error": {"parts": 4, "slope": True, "score": "error"},
    "error": {"score": "error"},
}


def custom_inputs() -> list[Any]:
    """The numbers of the preset `custom`."""
    return [
        io.Float.Input(
            "sparsity",
            default=0.75,
            min=0.0,
            max=0.99,
            step=0.05,
            round=0.0001,
            tooltip="For custom: the share of the key blocks that attention does not read. quality has 0.5, "
            "balanced 0.8125, fast 0.875.",
        ),
        io.Float.Input(
            "dense_steps",
            default=0.05,
            min=0.0,
            max=1.0,
            step=0.05,
            round=0.001,
            tooltip="For custom: share of the steps, from the first one, with dense attention. These steps "
            "fix the layout of the video. quality has 0.1, balanced and fast 0.",
        ),
        io.Float.Input(
            "ramp",
            **ADVANCED,
            default=0.3,
            min=0.0,
            max=1.0,
            step=0.05,
            round=0.001,
            tooltip="For custom: share of the steps, from the first one, that read twice as many blocks as "
            "later steps, at most half of all. Has no effect at a sparsity of 0.5 or less. The presets have "
            "0.3.",
        ),
        io.Int.Input(
            "dense_layers",
            **ADVANCED,
            default=0,
            min=0,
            max=100,
            tooltip="For custom: number of first layers that always use dense attention.",
        ),
        io.Float.Input(
            "mass",
            **ADVANCED,
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.05,
            round=0.001,
            tooltip="For custom: select blocks until this estimated share of attention is covered, up to the "
            "number that sparsity allows. 0: the same number of blocks for all tokens. Not with FP8 attention.",
        ),
        io.Boolean.Input(
            "pooled",
            **ADVANCED,
            default=True,
            tooltip="For custom: unselected blocks are replaced by their mean. Costs little and preserves quality.",
        ),
        io.Int.Input(
            "reuse",
            **ADVANCED,
            default=1,
            min=1,
            max=50,
            tooltip="For custom: number of computed steps that use one selection of blocks. 1 selects in every step.",
        ),
    ]


class WanCoreSparseAttention(io.ComfyNode):
    """Self-attention that reads only selected key blocks."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreSparseAttention",
            display_name="WanCore Sparse Attention",
            category="WanCore",
            **newer("WanCoreSparseAttention"),
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
                *custom_inputs(),
                io.Combo.Input(
                    "kernel",
                    options=list(SPARSE_KERNELS),
                    default="auto",
                    tooltip="auto uses the fastest kernel that runs here: FP8 if the loader's attention is FP8 "
                    "(Hopper).",
                ),
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
        sparsity: float,
        dense_steps: float,
        ramp: float,
        dense_layers: int,
        mass: float,
        pooled: bool,
        reuse: int,
        kernel: str,
        skipping: SkipOptions | None = None,
        unselected: str = "means",
    ) -> io.NodeOutput:
        custom = SparseOptions(
            sparsity=sparsity,
            dense_steps=dense_steps,
            ramp=ramp,
            dense_layers=dense_layers,
            mass=mass or None,
            pooled=pooled,
            reuse=reuse,
        )
        chosen = custom if preset == CUSTOM else PRESETS[preset]
        return joined(skipping, sparse=replace(chosen, kernel=kernel, **UNSELECTED[unselected]))
