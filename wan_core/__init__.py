"""WanCore's engine: video generation with Wan 2.2, planned before it runs.

    from wan_core import LoadOptions, Pipeline, Request

    pipe = Pipeline.load(LoadOptions(model="tiny"))          # or a release folder, or high=..., low=...,
    text_encoder=..., vae=... result = pipe.generate(Request(prompt="a red circle moving right on a blue background"))
    result.frames                                            # uint8 [F, H, W, 3]

The parts, each usable alone:

    dit = load_dit(path, device="cuda", dtype=torch.bfloat16) dit(x, timestep, context)         # [B, C, T, H, W], [B]
    or [B, T] in 0..1000, [B, L, 4096] -> velocity [B, C_out, T, H, W] load_text_encoder(path).encode(["a prompt"])
    # [B, L, 4096] vae = load_vae(path) vae.encode(video), vae.decode(latents)                   # [B, 3, F, H, W] in
    -1..1 <-> un-normalised latents make_plan(task="t2v-A14B", steps=40).table()             # every step's timestep,
    expert, guidance, as numbers

`path` is a file, a folder or a state dict in any known layout, recognised by its contents. A file that is something
else raises `CheckpointError`, a number out of range `OptionError`, both ValueErrors with a message for people, before
work starts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wan_core.checkpoint import CheckpointError, load_dit, load_text_encoder, load_vae
    from wan_core.config import LoadOptions, OptionError, Request
    from wan_core.pipeline import Pipeline, Result
    from wan_core.plan import Plan, Step, make_plan

__version__ = "0.1.0"
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
    "Pipeline": "pipeline",
    "Plan": "plan",
    "Request": "config",
    "Result": "pipeline",
    "Step": "plan",
    "load_dit": "checkpoint",
    "load_text_encoder": "checkpoint",
    "load_vae": "checkpoint",
    "make_plan": "plan",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `plan` and `--help` need no torch."""
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
