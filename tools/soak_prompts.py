"""The prompts of `tools.soak`: five workflows on the embedded model with drawn settings, and faults."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.comfyui import Graph
from tools import embedded_graphs
from tools.embedded_graphs import node, write_lora
from wan_core.checkpoint.save import write_safetensors
from wan_core.pipeline.embedded import COLOURS, MOTIONS, SHAPES, parse_caption
from wan_lab.shapes import draw

SIZES = ((48, 48, 5), (32, 32, 5), (64, 32, 5), (48, 48, 9), (96, 96, 17))  # width, height, frames
LONG = 1000  # steps of a prompt that is stopped: it never ends by itself
LAUNCHER = {"devices": "cpu,cpu", "mesh": "auto", "start_timeout": 60, "step_timeout": 60}
TILES = {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}
LATENT_21, LATENT_22 = "Wan 2.1 VAE (A14B, tiny)", "Wan 2.2 VAE (TI2V-5B)"


@dataclass
class Prompt:
    """What is sent and what must come of it."""

    kind: str
    graph: Graph
    size: tuple[int, int, int]
    outcome: str = "completed"  # or interrupted, refused, failed, killed
    words: str = ""  # that the error must contain
    step: int = 1  # of the sampler, when the prompt is interrupted or a worker is killed; 0: before the prompt is sent


def make_files(base: Path) -> None:
    """A picture and a LoRA, and files that are called so and are none; a file that is no model."""
    for folder in ("loras", "diffusion_models"):
        (base / "models" / folder).mkdir(parents=True, exist_ok=True)
    write_lora(base / "models" / "loras" / "style.safetensors", seed=1)
    write_safetensors({"x.weight": torch.zeros(2)}, base / "models" / "loras" / "no_lora.safetensors", {})
    (base / "models" / "diffusion_models" / "broken.safetensors").write_bytes(b"not a model at all")
    first = draw([parse_caption("a red circle moving right on a blue background")], seed=3)[0, :, 0]
    Image.fromarray(((first + 1) * 127.5).byte().permute(1, 2, 0).numpy()).save(base / "input" / "first.png")
    (base / "input" / "damaged.png").write_bytes(b"not a picture at all")


# ----------------------------------------------------------------------------------------------------------- workflows


def text_to_video(draw: random.Random, size: tuple[int, int, int]) -> Graph:
    width, height, frames = size
    numbers = {"steps": draw.randint(2, 8), "seed": draw.getrandbits(32), "solver": draw.choice(("unipc", "euler"))}
    graph = embedded_graphs.text_to_video({"width": width, "height": height, "frames": frames}, **numbers)
    shape, moving, (front, back) = draw.choice(SHAPES), draw.choice(MOTIONS), draw.sample(COLOURS, 2)
    graph["text"]["inputs"]["positive"] = f"a {front} {shape} moving {moving} on a {back} background"
    return graph


def image_to_video(draw: random.Random, size: tuple[int, int, int]) -> Graph:
    width, height, frames = size
    graph, other = text_to_video(draw, size), embedded_graphs.image_to_video()
    graph |= {name: other[name] for name in ("model", "picture", "size")}
    graph["size"]["inputs"] |= {"width": width, "height": height, "frames": frames}
    graph["sampler"]["inputs"] |= {"positive": ["size", 0], "negative": ["size", 1], "latent": ["size", 2]}
    return graph


def lora(draw: random.Random, size: tuple[int, int, int]) -> Graph:
    graph = text_to_video(draw, size)
    strength = {"strength_high": draw.randint(0, 4) / 4, "strength_low": draw.randint(0, 4) / 4}
    files = {"high": "style.safetensors", "low": "the file above"}
    graph["lora"] = node("WanCoreLoRA", model=["model", 0], **files, **strength)
    graph["sampler"]["inputs"]["model"] = ["lora", 0]
    return graph


def numbers(cache: str, sparsity: float = 0.0) -> dict[str, Any]:
    """The inputs of WanCore Step Cache and Sparse Attention."""
    cached = {"cache": cache, "threshold": 0.24, "max_skips": 1, "interval": 2, "order": 2, "retention": 0.1}
    return {
        **cached,
        "sparsity": sparsity,
        "dense_steps": 0.0,
        "ramp": 0.3,
        "slope": True,
        "kernel": "auto",
    }


def skipping(draw: random.Random, size: tuple[int, int, int]) -> Graph:
    policies = (
        node("WanCoreSkipping", **numbers("magcache")),
        node("WanCoreSkipping", **numbers("taylorseer")),
        node("WanCoreSkipping", **numbers("none", sparsity=0.8125)),
    )
    graph = text_to_video(draw, size) | {"skipping": draw.choice(policies)}
    graph["sampler"]["inputs"] |= {"steps": 12, "skipping": ["skipping", 0]}
    return graph


def native_nodes(draw: random.Random, size: tuple[int, int, int]) -> Graph:
    """ComfyUI's own nodes but for the sampler."""
    graph, (width, height, frames) = image_to_video(draw, size), size
    texts = (graph["text"]["inputs"]["positive"], "")
    graph["text"], graph["negative"] = (node("CLIPTextEncode", clip=["encoder", 0], text=text) for text in texts)
    links = {"positive": ["text", 0], "negative": ["negative", 0], "vae": ["vae", 0], "start_image": ["picture", 0]}
    graph["size"] = node("WanImageToVideo", width=width, height=height, length=frames, batch_size=1, **links)
    graph["decode"] = node("VAEDecodeTiled", vae=["vae", 0], samples=["sampler", 0], **TILES)
    return graph


WORKFLOWS: dict[str, Callable[[random.Random, tuple[int, int, int]], Graph]] = {
    "text to video": text_to_video,
    "image to video": image_to_video,
    "LoRA": lora,
    "skipping": skipping,
    "native nodes": native_nodes,
}


def save(graph: Graph, how: str) -> None:
    if how != "video":  # which a graph saves by itself
        del graph["video"]
    if how == "latents":
        graph["save"] = node("SaveLatent", samples=["sampler", 0], filename_prefix="soak/latents")
    if how == "pictures":
        graph["save"] = node("SaveImage", images=["decode", 0], filename_prefix="soak/picture")


FORMS = ("video", "pictures", "latents")

# --------------------------------------------------------------------------------------------------------------- faults

REFUSED = (  # the node, what is wrong there, what the error says
    ("size", {"width": 100}, "The nearest is"),
    ("size", {"frames": 18}, "4n + 1"),
    ("model", {"high": "broken.safetensors"}, "broken.safetensors"),
    ("model", {"low": "gone.safetensors"}, "gone.safetensors"),
    ("model", {"high": "/etc/passwd"}, "is not a model in"),
    ("vae", {"vae": "gone.safetensors"}, "gone.safetensors"),
    ("sampler", {"steps": 5000}, "5000"),
    ("sampler", {"solver": "ddim"}, "ddim"),
)


def refused(draw: random.Random, size: tuple[int, int, int]) -> Prompt:
    graph = text_to_video(draw, size)
    where, inputs, message = draw.choice(REFUSED)
    graph[where]["inputs"] |= inputs
    save(graph, "video")  # which needs every node
    return Prompt(f"{where}: {inputs}", graph, size, "refused", message)


def failed(draw: random.Random, size: tuple[int, int, int]) -> Prompt:
    """What a widget alone does not show."""
    case = draw.randrange(4)
    if case == 0:
        graph, message = text_to_video(draw, size), "latents of [1, 48"
        graph["size"]["inputs"] |= {"latent_type": LATENT_22, "width": 64, "height": 64}
    elif case == 1:
        graph, message = image_to_video(draw, size), "takes no image"
        graph["model"] = embedded_graphs.loaders()["model"]
    elif case == 2:
        graph, message = lora(draw, size), "not a LoRA"
        graph["lora"]["inputs"] |= {"high": "no_lora.safetensors", "strength_high": 1.0}
    else:
        graph, message = image_to_video(draw, size), ""
        graph["picture"]["inputs"]["image"] = "damaged.png"
    save(graph, draw.choice(FORMS))
    outcome = "refused" if case == 2 else "failed"  # a file is looked into before the prompt runs
    return Prompt(f"failing: {message or 'damaged.png'}", graph, size, outcome, message)


def stopped(draw: random.Random, size: tuple[int, int, int], outcome: str) -> Prompt:
    """A long prompt, interrupted or with a killed worker."""
    kind = draw.choice(tuple(WORKFLOWS))
    graph = WORKFLOWS[kind](draw, size)
    graph["sampler"]["inputs"] |= {"steps": LONG, "solver": "euler"}
    save(graph, draw.choice(FORMS))
    return Prompt(kind, graph, size, outcome, "SIGKILL", draw.randint(1, 20))


TURNS = ("interrupted", "refused", "interrupted", "failed")
BROKEN = {"refused": refused, "failed": failed}


def on_workers(graph: Graph) -> Graph:
    graph["launcher"] = node("WanCoreLauncher", **LAUNCHER)
    for loader in ("model", "encoder", "vae"):
        graph[loader]["inputs"]["workers"] = ["launcher", 0]
    return graph


def prompts(count: int, seed: int, workers: bool) -> list[Prompt]:
    """Every tenth is interrupted or wrong in turn; with workers, every second of these loses a worker instead."""
    draw, drawn, kinds = random.Random(seed), list[Prompt](), list(WORKFLOWS)
    for number in range(1, count + 1):
        size = draw.choice(SIZES)
        if number % 10:
            kind = kinds[number % len(kinds)] if number <= len(kinds) else draw.choice(kinds)
            prompt = Prompt(kind, WORKFLOWS[kind](draw, size), size)
            save(prompt.graph, draw.choice(FORMS))
        elif workers and number % 40 == 10:
            prompt = stopped(draw, size, "killed")
        elif workers and number % 40 == 30:
            prompt = Prompt("worker killed between prompts", text_to_video(draw, size), size, "killed", "SIGKILL", 0)
            save(prompt.graph, draw.choice(FORMS))
        else:
            turn = TURNS[number // (20 if workers else 10) % len(TURNS)]
            prompt = stopped(draw, size, turn) if turn == "interrupted" else BROKEN[turn](draw, size)
        if workers:
            on_workers(prompt.graph)
        drawn.append(prompt)
    return drawn
