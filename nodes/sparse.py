"""Attention over a part of the keys."""

from __future__ import annotations

from dataclasses import replace

from comfy_api.latest import io

from wan_core.config import SPARSE_KERNELS, SkipOptions, SparseOptions
from wan_core.sampling.sparsity.schedule import PRESETS

from .skipping import CUSTOM, joined, skipping_input, skipping_output


class WanCoreSparseAttention(io.ComfyNode):
    """Self-attention over a part of the keys."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanCoreSparseAttention",
            display_name="WanCore Sparse Attention",
            category="WanCore",
            description="Reads only the blocks of tokens that matter, chosen anew in every layer. Most of the time at "
            "720p is attention; small videos gain nothing. The plan preview shows what every step reads.",
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=[*PRESETS, CUSTOM],
                    default="balanced",
                    tooltip="quality, balanced or fast; custom takes the numbers below, which count only then.",
                ),
                io.Float.Input(
                    "sparsity",
                    default=0.75,
                    min=0.0,
                    max=0.99,
                    step=0.05,
                    round=0.0001,
                    tooltip="For custom: the share of the video that a step's attention leaves out. quality has "
                    "0.5, balanced 0.8125, fast 0.875.",
                ),
                io.Float.Input(
                    "dense_steps",
                    default=0.05,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=0.001,
                    tooltip="For custom: share of the steps, from the first on, that read everything. They decide "
                    "where things are. quality has 0.1, balanced and fast 0.",
                ),
                io.Float.Input(
                    "ramp",
                    default=0.3,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=0.001,
                    tooltip="For custom: share of the steps, from the first on, that read twice as much as later ones, "
                    "half at most. Needs a sparsity above 0.5. The presets have 0.3.",
                ),
                io.Int.Input(
                    "dense_layers",
                    default=0,
                    min=0,
                    max=100,
                    tooltip="For custom: so many of the first layers always read everything.",
                ),
                io.Float.Input(
                    "mass",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=0.001,
                    tooltip="For custom: stop reading where this share of attention is covered, as estimated; at most "
                    "what sparsity says. 0: the same amount for every token. Not with FP8 attention.",
                ),
                io.Boolean.Input(
                    "pooled",
                    default=True,
                    tooltip="For custom: what is left out stands in by its mean. Costs little and keeps quality.",
                ),
                io.Int.Input(
                    "reuse",
                    default=1,
                    min=1,
                    max=50,
                    tooltip="For custom: how many computed steps use one choice of blocks. 1 chooses in every step.",
                ),
                io.Combo.Input(
                    "kernel",
                    options=list(SPARSE_KERNELS),
                    default="auto",
                    tooltip="auto takes the fastest that runs: FP8 where the attention of the loader is FP8 (Hopper).",
                ),
                skipping_input(),
            ],
            outputs=[skipping_output()],
        )

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
    ) -> io.NodeOutput:
        own = SparseOptions(
            sparsity=sparsity,
            dense_steps=dense_steps,
            ramp=ramp,
            dense_layers=dense_layers,
            mass=mass or None,
            pooled=pooled,
            reuse=reuse,
        )
        return joined(skipping, sparse=replace(own if preset == CUSTOM else PRESETS[preset], kernel=kernel))
