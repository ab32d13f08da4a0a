"""Parts that several workflows have: notes, loaders, a prompt, sampling, decoding, a drawn picture."""

from __future__ import annotations

from typing import Any

from tools.page_form import ROOT, Node, Output, Workflow
from wan_lab.shapes import PALETTE

NOTES = ROOT / "tools" / "notes"
FPS = 8.0  # of the embedded model
TINY, TINY_I2V, TINY_DRIVEN = "tiny (embedded)", "tiny i2v (embedded)", "tiny animate 2 (embedded)"
SIZE = {"width": 96, "height": 96, "frames": 17}  # what the embedded model was trained at
WIDE, NARROW = 360, 300  # columns
STEP = WIDE + 60
BELOW = 1320  # the second row of columns


def add_note(flow: Workflow) -> None:
    flow.note((NOTES / f"{flow.name}.md").read_text(encoding="utf-8").rstrip())


def add_loaders(flow: Workflow, x: int, name: str, y: int = 0, **workers: Output) -> tuple[Node, Node, Node]:
    flow.column("Models", x, WIDE, y=y)
    model = flow.add("WanCoreModelLoader", high=name, low=name, space=180, **workers)
    clip = flow.add("WanCoreTextEncoderLoader", space=60, **workers)
    return model, clip, flow.add("WanCoreVAELoader", space=60, **workers)


def add_prompt(flow: Workflow, clip: Node, positive: str) -> Node:
    return flow.add("WanCoreTextEncode", clip=clip["clip"], positive=positive, negative="")


def add_sampler(
    flow: Workflow, model: Output, positive: Output, negative: Output, latent: Output, **numbers: Any
) -> Node:
    return flow.add(
        "WanCoreSampler",
        model=model,
        positive=positive,
        negative=negative,
        latent=latent,
        **numbers,
        space=300,  # the plan in words, and the preview
    )


def add_decode(flow: Workflow, vae: Node, sampler: Node) -> Node:
    return flow.add("WanCoreVAEDecode", vae=vae["vae"], latent=sampler["latent"], report=sampler["report"], space=40)


def add_video(flow: Workflow, images: Output, prefix: str, fps: float = FPS) -> None:
    video = flow.add("CreateVideo", images=images, fps=fps, space=24)  # newer ones have a widget more
    _save(flow, video["VIDEO"], prefix)


def add_decoded_video(flow: Workflow, vae: Node, sampler: Node, prefix: str, fps: float = FPS) -> Node:
    """Where no other node takes the frames: they are encoded while later ones are decoded."""
    latent = {"latent": sampler["latent"], "report": sampler["report"]}
    decode = flow.add("WanCoreDecodeToVideo", vae=vae["vae"], **latent, fps=fps, space=40)
    _save(flow, decode["video"], prefix)
    return decode


def _save(flow: Workflow, video: Output, prefix: str) -> None:
    flow.add("SaveVideo", video=video, filename_prefix=prefix, space=290)


def add_drawing(
    flow: Workflow, colour: str, background: str, left: int, top: int, side: int = 32, title: str = "First frame"
) -> Node:
    """A square on a plain background, in the embedded model's colours."""
    plain = flow.add("EmptyImage", title="Background", width=96, height=96, color=colour_number(background))
    square = flow.add("EmptyImage", title="Square", width=side, height=side, color=colour_number(colour))
    return flow.add(
        "ImageCompositeMasked", title=title, destination=plain["IMAGE"], source=square["IMAGE"], x=left, y=top
    )


def colour_number(colour: str) -> int:
    red, green, blue = PALETTE[colour]
    return red << 16 | green << 8 | blue
