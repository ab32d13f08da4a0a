"""ComfyUI's own Wan 2.2 template for two experts as an API graph, with native nodes and with ours.

Node ids are words, so that events, errors and times can be read: `loaders.*`, `text`, `image`, `samplers.*`, `decode`,
`save.*`. What stands before the dot is the column of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.comfy_files import EXPERTS, IMAGE, TEXT, VAE, expert_file, lora_file
from benchmarks.comfyui import Graph, node

NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留"
)
PROMPT = "The white dragon warrior stands still, eyes full of determination. The camera slowly circles around it."


@dataclass(frozen=True)
class Job:
    """What the template makes. four_steps: its switch."""

    width: int = 640
    height: int = 640
    frames: int = 81
    four_steps: bool = True
    layers: int | None = None
    seed: int = 1
    prompt: str = PROMPT
    image: str = IMAGE
    steps: int | None = None  # of both samplers; None: the template's

    @property
    def total_steps(self) -> int:
        return self.steps or (4 if self.four_steps else 20)

    @property
    def guidance(self) -> float:
        return 1.0 if self.four_steps else 3.5

    @property
    def shift(self) -> float:
        return 5.0

    @property
    def size(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"


def native_graph(
    job: Job,
    attention: str | None = None,
    accelerate: dict[str, Any] | None = None,
    gpus: int = 1,
    patch: tuple[str, Mapping[str, Any]] | None = None,
) -> Graph:
    """The template. attention: of ComfyUI's node ModelAttentionBackend. accelerate: inputs of our node for native
    models, behind each loader chain; links in it are ids of nodes in the same graph. gpus: of ComfyUI's
    node MultiGPU CFG Split, which must come after nodes that change the model. patch: class and inputs of one more node
    that changes the model."""
    graph: Graph = {}
    steps, half = job.total_steps, job.total_steps // 2
    for expert in EXPERTS:
        file = expert_file("i2v", expert, job.layers)
        graph[f"loaders.{expert}"] = node("UNETLoader", unet_name=file, weight_dtype="default")
        model: list[Any] = [f"loaders.{expert}", 0]
        if job.four_steps:
            inputs = {"lora_name": lora_file("i2v", expert), "strength_model": 1.0, "model": model}
            graph[f"loaders.lora_{expert}"] = node("LoraLoaderModelOnly", **inputs)
            model = [f"loaders.lora_{expert}", 0]
        if attention is not None:
            graph[f"loaders.attention_{expert}"] = node("ModelAttentionBackend", model=model, attention=attention)
            model = [f"loaders.attention_{expert}", 0]
        if patch is not None:
            graph[f"loaders.patch_{expert}"] = node(patch[0], model=model, **patch[1])
            model = [f"loaders.patch_{expert}", 0]
        graph[f"loaders.shift_{expert}"] = node("ModelSamplingSD3", model=model, shift=job.shift)
        if accelerate is not None:
            model = [f"loaders.shift_{expert}", 0]
            graph[f"loaders.accelerate_{expert}"] = node("WanCoreAccelerate", model=model, **accelerate)
        if gpus > 1:
            model = [f"loaders.shift_{expert}", 0]
            graph[f"loaders.gpus_{expert}"] = node("MultiGPU_WorkUnits", model=model, max_gpus=gpus)
    last = "gpus" if gpus > 1 else "shift" if accelerate is None else "accelerate"
    graph |= native_conditioning(job)
    both = {
        "noise_seed": job.seed,
        "steps": steps,
        "cfg": job.guidance,
        "sampler_name": "euler",
        "scheduler": "simple",
        "positive": ["image", 0],
        "negative": ["image", 1],
    }
    graph["samplers.high"] = node(
        "KSamplerAdvanced",
        **both,
        model=[f"loaders.{last}_high", 0],
        latent_image=["image", 2],
        add_noise="enable",
        start_at_step=0,
        end_at_step=half,
        return_with_leftover_noise="enable",
    )
    graph["samplers.low"] = node(
        "KSamplerAdvanced",
        **both,
        model=[f"loaders.{last}_low", 0],
        latent_image=["samplers.high", 0],
        add_noise="disable",
        start_at_step=half,
        end_at_step=10000,
        return_with_leftover_noise="disable",
    )
    graph["decode"] = node("VAEDecode", samples=["samplers.low", 0], vae=["loaders.vae", 0])
    graph["save.create"] = node("CreateVideo", images=["decode", 0], fps=16.0)
    save = node("SaveVideo", video=["save.create", 0], filename_prefix="native", format="auto", codec="auto")
    return graph | {"save": save}


def accelerated_graph(job: Job, attention: str, speed: str = "exact") -> Graph:
    """The template as the page's command changes it: our node for native models behind each loader chain, and our
    decoder in the place of VAE Decode and Create Video."""
    graph = native_graph(job, accelerate={"speed": "exact", "attention": attention, "compare": "off"})
    created, decoded = graph.pop("save.create")["inputs"], graph["decode"]["inputs"]
    graph["decode"] = node(
        "WanCoreDecodeToVideo",
        vae=decoded["vae"],
        latent=decoded["samples"],
        fps=created["fps"],
        encoder="all cores",
    )
    graph["save"]["inputs"]["video"] = ["decode", 0]
    return graph


def native_conditioning(job: Job) -> Graph:
    graph: Graph = {
        "loaders.text": node("CLIPLoader", clip_name=TEXT, type="wan", device="default"),
        "loaders.vae": node("VAELoader", vae_name=VAE),
        "text": node("CLIPTextEncode", text=job.prompt, clip=["loaders.text", 0]),
        "text.negative": node("CLIPTextEncode", text=NEGATIVE, clip=["loaders.text", 0]),
    }
    size = {"width": job.width, "height": job.height, "length": job.frames, "batch_size": 1}
    graph["image.load"] = node("LoadImage", image=job.image)
    graph["image"] = node(
        "WanImageToVideo",
        **size,
        positive=["text", 0],
        negative=["text.negative", 0],
        vae=["loaders.vae", 0],
        start_image=["image.load", 0],
    )
    return graph


def our_graph(
    job: Job,
    attention: str = "auto",
    lora_mode: str = "auto",
    devices: str | None = None,
    **sampler: Any,
) -> Graph:
    """The same video with our nodes. devices: of WanCore Launcher; None: there is none. sampler: more inputs of the
    sampler."""
    both = {expert: expert_file("i2v", expert, job.layers) for expert in EXPERTS}
    graph: Graph = {
        "loaders.model": node(
            "WanCoreModelLoader",
            **both,
            precision="checkpoint",
            attention=attention,
            residency="auto",
            compile="off",
            keep_blocks=0,
            lora_mode=lora_mode,
        ),
        "loaders.text": node("WanCoreTextEncoderLoader", text_encoder=TEXT, precision="checkpoint"),
        "loaders.vae": node("WanCoreVAELoader", vae=VAE, precision="auto"),
        "text": node("WanCoreTextEncode", positive=job.prompt, negative=NEGATIVE, clip=["loaders.text", 0]),
    }
    if devices is not None:
        for name in ("model", "text", "vae"):
            graph[f"loaders.{name}"]["inputs"]["workers"] = ["loaders.workers", 0]
        graph["loaders.workers"] = node("WanCoreLauncher", devices=devices)
    model = ["loaders.model", 0]
    if job.four_steps:
        loras = {expert: lora_file("i2v", expert) for expert in EXPERTS}
        graph["loaders.lora"] = node("WanCoreLoRA", **loras, strength_high=1.0, strength_low=1.0, model=model)
        model = ["loaders.lora", 0]
    size = {"width": job.width, "height": job.height, "frames": job.frames}
    graph["image.load"] = node("LoadImage", image=job.image)
    graph["image"] = node(
        "WanCoreImageToVideo",
        **size,
        positive=["text", 0],
        negative=["text", 1],
        vae=["loaders.vae", 0],
        first_image=["image.load", 0],
    )
    graph["samplers"] = node(
        "WanCoreSampler",
        seed=job.seed,
        steps=job.total_steps,
        shift=job.shift,
        boundary=middle(job),
        guidance_high=job.guidance,
        guidance_low=job.guidance,
        solver="euler",
        guidance_mode="auto",
        preset="none",
        model=model,
        positive=["image", 0],
        negative=["image", 1],
        latent=["image", 2],
        **sampler,
    )
    graph["decode"] = node(
        "WanCoreDecodeToVideo", vae=["loaders.vae", 0], latent=["samplers", 0], fps=16.0, encoder="as Save Video"
    )
    return graph | {"save": node("SaveVideo", video=["decode", 0], filename_prefix="ours", format="auto", codec="auto")}


def with_latents(graph: Graph) -> Graph:
    """The graph, which saves what it decodes too, as `save.latent`."""
    samples = graph["decode"]["inputs"].get("samples") or graph["decode"]["inputs"]["latent"]
    return graph | {"save.latent": node("SaveLatent", samples=samples, filename_prefix="latents")}


def with_defaults(graph: Graph, kinds: Mapping[str, Any]) -> Graph:
    """The graph with the default of every input that it leaves out. kinds: what a server says of its nodes."""
    filled: Graph = {}
    for name, entry in graph.items():
        inputs = dict(entry["inputs"])
        known = kinds.get(entry["class_type"], {"input": {}})  # a note or a primitive is the page's own
        for key, (what, *rest) in known["input"].get("required", {}).items():
            if key not in inputs and rest and "default" in rest[0]:
                inputs[key] = rest[0]["default"]
            elif key not in inputs and isinstance(what, list):
                inputs[key] = what[0]
        filled[name] = {"class_type": entry["class_type"], "inputs": inputs}
    return filled


def middle(job: Job) -> float:
    """The boundary that gives each expert half of the steps, as the template does."""

    def sigma(step: int) -> float:
        u = 1 - step / job.total_steps
        return job.shift * u / (1 + (job.shift - 1) * u)

    half = job.total_steps // 2
    return round((sigma(half - 1) + sigma(half)) / 2, 4)
