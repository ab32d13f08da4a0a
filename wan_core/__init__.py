"""WanCore's engine: video generation with Wan 2.2, planned before it runs.

A whole video, from a prompt:

    from wan_core import LoadOptions, Pipeline, Request

    pipe = Pipeline.load(LoadOptions(model="tiny"))
    result = pipe.generate(Request(prompt="a red circle moving right on a blue background"))
    print(result.frames.shape, result.report.text())

`model` is "tiny" or the folder of a release; single files go into `high`, `low`, `text_encoder` and `vae`.
`result.frames` is uint8 [F, H, W, 3], `result.latents` un-normalised float32 [1, C, T, Y, X].

The parts, each usable alone; `path` is a file, a folder or a state dict in any known layout, told by its contents:

    dit = load_dit(path, device="cuda", dtype=torch.bfloat16)
    velocity = dit(x, timestep, context)

x [B, C, T, Y, X], timestep [B] or [B, T] in 0..1000, context [B, L, 4096] -> float32 [B, C_out, T, Y, X].

    rows = load_text_encoder(path).encode(["a prompt"])
    vae = load_vae(path)
    latents = vae.encode(video)
    video = vae.decode(latents)

rows [B, L, 4096]; video [B, 3, F, H, W] in -1..1; latents un-normalised.

    plan = make_plan(task="t2v-A14B", steps=40)
    print(plan.table())

Every step's timestep, expert, guidance and branches, as numbers.

A file that is something else raises `CheckpointError`, a number out of range `OptionError`. Both are ValueErrors with a
message for people, raised before work starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wan_core.checkpoint import CheckpointError, load_dit, load_text_encoder, load_vae
    from wan_core.config import LoadOptions, OptionError, Request
    from wan_core.pipeline.pipeline import Pipeline, Result
    from wan_core.sampling.plan import Plan, make_plan
    from wan_core.sampling.steps import Step

__version__ = "0.2.0"
__all__ = [
    "CheckpointError",
    "LoadOptions",
    "OptionError",
    "Pipeline",
    "Plan",
    "Request",
    "Result",
    "Step",
    "load_dit",
    "load_text_encoder",
    "load_vae",
    "make_plan",
]

_HOME = {
    "CheckpointError": "checkpoint",
    "LoadOptions": "config",
    "OptionError": "config",
    "Pipeline": "pipeline.pipeline",
    "Plan": "sampling.plan",
    "Request": "config",
    "Result": "pipeline.pipeline",
    "Step": "sampling.plan",
    "load_dit": "checkpoint",
    "load_text_encoder": "checkpoint",
    "load_vae": "checkpoint",
    "make_plan": "sampling.plan",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `plan` and `--help` need no torch."""
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
