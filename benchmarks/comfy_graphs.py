"""ComfyUI's own Wan 2.2 templates for two experts as API graphs, with native nodes and with ours.

Node ids are words, so that events, errors and times can be read: `loaders.*`, `text`, `image`, `samplers.*`, `decode`,
`save.*`. What stands before the dot is the column of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.comfy_files import EXPERTS, IMAGES, TEXT, VAE, expert_file, lora_file
from benchmarks.comfyui import Graph, node
from benchmarks.templates.our_sampler import with_our_sampler
from wan_core.config import EXACT

NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留"
)
PROMPT = "The white dragon warrior stands still, eyes full of determination. The camera slowly circles around it."


@dataclass(frozen=True)
class Job:
    """What the template of `task` (i2v or t2v) makes. four_steps: its switch. wide: its files ask for products in 16
    bits."""

    task: str = "i2v"
    width: int = 640
    height: int = 640
    frames: int = 81
    four_steps: bool = True
    layers: int | None = None
    wide: bool = False
    seed: int = 1
    prompt: str = PROMPT
    image: str = IMAGES[0]
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
    graph, steps, half = native_conditioning(job), job.total_steps, job.total_steps // 2
    both = {"noise_seed": job.seed, "steps": steps, "cfg": job.guidance, "sampler_name": "euler", "scheduler": "simple"}
    conditions, empty = begun(job)
    both |= conditions
    for expert, latent, begin, end in (("high", empty, 0, half), ("low", ["samplers.high", 0], half, 10000)):
        model, first = f"loaders.{expert}", "enable" if expert == "high" else "disable"
        graph[model] = node(
            "UNETLoader", unet_name=expert_file(job.task, expert, job.layers, job.wide), weight_dtype="default"
        )
        lora = {"lora_name": lora_file(job.task, expert), "strength_model": 1.0}
        for name, kind, inputs in (
            ("lora", "LoraLoaderModelOnly", lora if job.four_steps else None),
            ("attention", "ModelAttentionBackend", attention and {"attention": attention}),
            ("patch", *(patch or ("", None))),
            ("shift", "ModelSamplingSD3", {"shift": job.shift}),
            ("accelerate", "WanCoreAccelerate", accelerate),
            ("gpus", "MultiGPU_WorkUnits", {"max_gpus": gpus} if gpus > 1 else None),
        ):
            if inputs is not None:
                graph[f"loaders.{name}_{expert}"] = node(kind, model=[model, 0], **inputs)
                model = f"loaders.{name}_{expert}"
        graph[f"samplers.{expert}"] = node(
            "KSamplerAdvanced", **both, model=[model, 0], latent_image=latent, start_at_step=begin, end_at_step=end,
            add_noise=first, return_with_leftover_noise=first,
        )  # fmt: skip
    graph["decode"] = node("VAEDecode", samples=["samplers.low", 0], vae=["loaders.vae", 0])
    graph["save.create"] = node("CreateVideo", images=["decode", 0], fps=16.0)
    return graph | {"save": save_video(["save.create", 0], "native")}


def save_video(video: list[Any], name: str) -> dict[str, Any]:
    return node("SaveVideo", video=video, filename_prefix=name, format="auto", codec="auto")


def accelerated_graph(job: Job, attention: str, speed: str = EXACT) -> Graph:
    """The template as the page's command changes it: our nodes for native models and their VAE behind the loaders, and
    our decoder in the place of VAE Decode and Create Video."""
    graph = native_graph(job, accelerate={"speed": speed, "attention": attention, "compare": "off"})
    return with_our_vae(graph, ["samplers.low", 0])


def with_our_vae(graph: Graph, latent: list[Any]) -> Graph:
    """The native graph, which decodes `latent` with WanCore Decode to Video and encodes its picture with WanCore
    Accelerate VAE, as the page's commands place them."""
    fps, decoded = graph.pop("save.create")["inputs"]["fps"], graph["decode"]["inputs"]
    graph["decode"] = node("WanCoreDecodeToVideo", vae=decoded["vae"], latent=latent, fps=fps, encoder="all cores")
    graph["save"]["inputs"]["video"] = ["decode", 0]
    if "image" in graph:
        graph["loaders.still"] = node("WanCoreAccelerateVAE", vae=graph["image"]["inputs"]["vae"])
        graph["image"]["inputs"]["vae"] = ["loaders.still", 0]
    return graph


def all_gpus_graph(job: Job, devices: str) -> Graph:
    """The template as the page's command `run this workflow on all GPUs` changes it. devices: of WanCore Launcher."""
    return with_our_vae(with_our_sampler(native_graph(job), devices=devices), ["samplers.low", 0])


def native_conditioning(job: Job) -> Graph:
    size = {"width": job.width, "height": job.height, "length": job.frames, "batch_size": 1}
    graph = {
        "loaders.text": node("CLIPLoader", clip_name=TEXT, type="wan", device="default"),
        "loaders.vae": node("VAELoader", vae_name=VAE),
        "text": node("CLIPTextEncode", text=job.prompt, clip=["loaders.text", 0]),
        "text.negative": node("CLIPTextEncode", text=NEGATIVE, clip=["loaders.text", 0]),
    }
    if job.task == "t2v":
        return graph | {"latent": node("EmptyHunyuanLatentVideo", **size)}
    links = {"positive": ["text", 0], "negative": ["text.negative", 0], "start_image": ["image.load", 0]}
    graph["image.load"] = node("LoadImage", image=job.image)
    return graph | {"image": node("WanImageToVideo", **size, **links, vae=["loaders.vae", 0])}


def begun(job: Job, negative: tuple[str, int] = ("text.negative", 0)) -> tuple[dict[str, list[Any]], list[Any]]:
    """A sampler's conditions, and latents to begin with. negative: where the text for it is, without a picture."""
    if job.task == "t2v":
        return {"positive": ["text", 0], "negative": [*negative]}, ["latent", 0]
    return {"positive": ["image", 0], "negative": ["image", 1]}, ["image", 2]


def our_graph(job: Job, attention: str = "auto", devices: str | None = None, **sampler: Any) -> Graph:
    """The same video with our nodes. devices: of WanCore Launcher; None: there is none. sampler: more inputs of the
    sampler."""
    files = {expert: expert_file(job.task, expert, job.layers, job.wide) for expert in EXPERTS}
    model = {"precision": "checkpoint", "attention": attention, "residency": "auto", "compile": "off", "keep_blocks": 0}
    graph: Graph = {
        "loaders.model": node("WanCoreModelLoader", **files, **model, lora_mode="auto"),
        "loaders.text": node("WanCoreTextEncoderLoader", text_encoder=TEXT, precision="checkpoint"),
        "loaders.vae": node("WanCoreVAELoader", vae=VAE, precision="auto"),
        "text": node("WanCoreTextEncode", positive=job.prompt, negative=NEGATIVE, clip=["loaders.text", 0]),
    }
    if devices is not None:
        for name in ("model", "text", "vae"):
            graph[f"loaders.{name}"]["inputs"]["workers"] = ["loaders.workers", 0]
        graph["loaders.workers"] = node("WanCoreLauncher", devices=devices)
    last = "loaders.model"
    if job.four_steps:
        loras = {expert: lora_file(job.task, expert) for expert in EXPERTS}
        graph["loaders.lora"] = node("WanCoreLoRA", **loras, strength_high=1.0, strength_low=1.0, model=[last, 0])
        last = "loaders.lora"
    size = {"width": job.width, "height": job.height, "frames": job.frames}
    if job.task == "t2v":
        graph["latent"] = node("WanCoreEmptyLatent", **size)
    else:
        links = {"positive": ["text", 0], "negative": ["text", 1], "first_image": ["image.load", 0]}
        graph["image.load"] = node("LoadImage", image=job.image)
        graph["image"] = node("WanCoreImageToVideo", **size, **links, vae=["loaders.vae", 0])
    steps = {"seed": job.seed, "steps": job.total_steps, "shift": job.shift, "boundary": middle(job), "solver": "euler"}
    guidance = {"guidance_high": job.guidance, "guidance_low": job.guidance, "guidance_mode": "auto", "preset": "none"}
    conditions, empty = begun(job, ("text", 1))
    links = {"model": [last, 0], **conditions, "latent": empty}
    graph["samplers"] = node("WanCoreSampler", **steps, **guidance, **links, **sampler)
    links = {"vae": ["loaders.vae", 0], "latent": ["samplers", 0]}
    graph["decode"] = node("WanCoreDecodeToVideo", **links, fps=16.0, encoder="all cores")
    return graph | {"save": save_video(["decode", 0], "ours")}


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
