"""What needs ComfyUI: features that only nodes have, native models, and the shared workflows."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.golden.comfyui import Graph, Server, node
from tools.golden.commands import Case, normal
from tools.golden.environment import ROOT
from tools.golden.graphs import NUMBERS, SIZE, kept, needed, parts
from tools.golden.options import PAIRS, SPARSE, STAGES, WINDOWS

API = "workflows/**/api/*.json"
# What a file of a workflow is: the first whose key is in its name.
MINIATURES = {
    "clip_vision": "vision", "wav2vec2": "speech", "2.2_vae": "vae22", "vae": "vae21",
    "umt5": "release/text_encoder", "lora": "lora_256", "lightx2v": "lora_256", "animate_2": "animate2",
    "animate": "animate", "vace": "vace", "s2v": "s2v", "ti2v": "ti2v", "wan2.1_i2v": "wan2.1_i2v_480p",
    "fun_control_high": "fun_high_noise", "fun_control_low": "fun_low_noise", "fun_inpaint_high": "i2v_high_noise",
    "fun_inpaint_low": "i2v_low_noise", "camera_high": "camera_high_noise", "camera_low": "camera_low_noise",
    "i2v_high": "i2v_high_noise", "i2v_low": "i2v_low_noise", "t2v_high": "t2v_high_noise", "t2v_low": "t2v_low_noise",
}  # fmt: skip
SMALL = {"width": 64, "height": 64, "frames": 9, "length": 9}


# ------------------------------------------------------------------------------------------------------------- features


def sampled(task: str = "t2v-tiny", size: dict[str, int] | None = None, **inputs: Any) -> Graph:
    graph, (positive, negative, latent) = parts(task, {**SIZE, "frames": 9, **(size or {})})
    links = {"model": ["model", 0], "positive": positive, "negative": negative, "latent": latent}
    graph["door"] = node(
        "WanCoreSampler", **{**links, **NUMBERS, "steps": 4, "seed": 0, "guidance_mode": "auto", **inputs}
    )
    return graph


def changed(graph: Graph, name: str, inputs: dict[str, Any]) -> Graph:
    return {**graph, name: {**graph[name], "inputs": {**graph[name]["inputs"], **inputs}}}


def in_two_samplers(graph: Graph) -> Graph:
    first = changed(graph, "door", {"end_step": 2, "return_with_leftover_noise": "enable"})
    second = {"latent": ["first", 0], "start_step": 2, "add_noise": "disable"}
    return kept({**graph, "first": first["door"], "door": changed(graph, "door", second)["door"]})


def prompt_schedule() -> Graph:
    graph = sampled()
    graph["other"] = changed(graph, "text", {"positive": "a blue square moving left on a black background"})["text"]
    for name, source, start, end in (("early", "text", 0.0, 0.5), ("late", "other", 0.5, 1.0)):
        graph[name] = node("ConditioningSetTimestepRange", conditioning=[source, 0], start=start, end=end)
    graph["both"] = node("ConditioningCombine", conditioning_1=["early", 0], conditioning_2=["late", 0])
    return kept(changed(graph, "door", {"positive": ["both", 0]}))


def native(expert: str = "t2v", steps: int = 4, **accelerate: Any) -> Graph:
    """Two experts in two samplers of ComfyUI, with WanCore Accelerate where `accelerate` is given."""
    task = f"{expert}-A14B"
    graph, (positive, negative, latent) = parts(task, {**SIZE, "frames": 9})
    for number, file in enumerate(PAIRS[expert]):
        graph[f"load {number}"] = node("UNETLoader", unet_name=file, weight_dtype="default")
        graph[f"shift {number}"] = node("ModelSamplingSD3", model=[f"load {number}", 0], shift=8.0)
        if accelerate:
            fast = {"attention": "auto", "sparse": "off", **accelerate}
            graph[f"fast {number}"] = node("WanCoreAccelerate", model=[f"shift {number}", 0], **fast)
        graph[f"sample {number}"] = node(
            "KSamplerAdvanced", model=[f"{'fast' if accelerate else 'shift'} {number}", 0], noise_seed=0, steps=steps,
            cfg=3.0, sampler_name="euler", scheduler="simple", positive=positive, negative=negative,
            latent_image=["sample 0", 0] if number else latent, add_noise="disable" if number else "enable",
            start_at_step=number * steps // 2, end_at_step=(number + 1) * steps // 2,
            return_with_leftover_noise="disable" if number else "enable",
        )  # fmt: skip
    graph["save"] = node("SaveLatent", samples=["sample 1", 0], filename_prefix="golden")
    return graph


def with_skipping(graph: Graph, kind: str, **inputs: Any) -> Graph:
    return {**graph, "skipping": node(kind, **inputs)}


def from_model(**inputs: Any) -> Graph:
    graph = {**native(), **sampled("t2v-A14B")}
    links = {"model": ["shift 0", 0], "low": ["shift 1", 0]}
    options = {"precision": "checkpoint", "attention": "auto", "residency": "auto", **inputs}
    graph["model"] = node("WanCoreFromModel", **links, **options)
    return kept(graph)


def decoded(graph: Graph, kind: str, **inputs: Any) -> Graph:
    graph = {**graph, "decode": node(kind, vae=["vae", 0], latent=["door", 0], **inputs, report=["door", 1])}
    if kind == "WanCoreVAEDecode":
        graph["save"] = node("SaveImage", images=["decode", 0], filename_prefix="golden")
    else:
        graph["save"] = node("SaveVideo", video=["decode", 0], filename_prefix="golden", format="auto", codec="auto")
    return needed(graph, ["save"])


def features() -> dict[str, Graph]:
    skip = {"skipping": ["skipping", 0]}
    windows = {"window": node("WanCoreContextWindows", model=["model", 0], **WINDOWS)}
    long = sampled(size={"frames": 33}, model=["window", 0])
    lora = node("WanCoreLoRA", model=["model", 0], high="lora_256.safetensors", strength_high=0.5, low="the file above",
                strength_low=1.0)  # fmt: skip
    workers = {"workers": node("WanCoreLauncher", devices="cpu,cpu", mesh="2x1x1", start_timeout=300, step_timeout=600)}
    seer = {"interval": 2, "order": 1, "retention": 0.2}
    sparse = {**SPARSE, "sparsity": 0.75, "unselected": "slope, error"}
    motion = node("WanCoreMotionPositions", positive=["size", 0], positions="reference")
    return {
        "one sampler": kept(sampled()),
        "two samplers": in_two_samplers(sampled()),
        "two samplers, solver heun": in_two_samplers(sampled(solver="heun")),
        "a batch of two": kept(changed(sampled(), "size", {"batch_size": 2})),
        "a batch of two from an image": kept(changed(sampled("i2v-tiny"), "size", {"batch_size": 2})),
        "first and last image": kept(changed(sampled("i2v-tiny"), "size", {"last_image": ["picture", 0]})),
        "a prompt schedule": prompt_schedule(),
        "context windows": kept({**long, **windows}),
        "a LoRA on files": kept({**sampled("t2v-A14B", model=["lora", 0]), "lora": lora}),
        "sigmas": kept({**sampled(sigmas=["sigmas", 0]), "sigmas": node("BasicScheduler", model=["load 0", 0],
                        scheduler="simple", steps=4, denoise=1.0), "load 0": native()["load 0"]}),
        "motion positions": kept({**sampled("s2v-14B", positive=["motion", 0]), "motion": motion}),
        "pictures": decoded(sampled(), "WanCoreVAEDecode", tiling="auto"),
        "pictures in tiles": decoded(sampled(size={"width": 128, "height": 128}), "WanCoreVAEDecode", tiling="always"),
        "pictures of 5B": decoded(sampled("ti2v-5B"), "WanCoreVAEDecode", tiling="auto"),
        "a video": decoded(sampled(), "WanCoreDecodeToVideo", fps=8.0, encoder="frame threads", tiling="auto"),
        "native": native(),
        "native, accelerated": native(attention="auto"),
        "native, sparse": with_skipping(native(**skip), "WanCoreSparseAttention", **sparse),
        "native, sparse preset and image": native("i2v", sparse="balanced"),
        "native, TaylorSeer": with_skipping(native(steps=20, **skip), "WanCoreTaylorSeer", **seer),
        "native, MagCache": native(steps=20, cache="fast"),
        "native, stages": with_skipping(native(steps=10, **skip), "WanCoreResolutionSchedule", **STAGES),
        "native, speed preset": with_skipping(native(steps=20, **skip), "WanCoreSpeedPreset", preset="balanced"),
        "from MODEL": from_model(),
        "from MODEL in FP8": from_model(precision="fp8"),
        "two workers": kept({**sampled(), **changed(sampled(), "model", {"workers": ["workers", 0]}), **workers}),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ workflows


def workflows() -> dict[str, Graph]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(ROOT.glob(API))}


def model_names(files: Path) -> dict[str, str]:
    """Name among ComfyUI's models -> the miniature that it is: every miniature, and what the workflows name."""
    found = {path.name: path.name for path in files.iterdir() if path.suffix in (".safetensors", ".gguf")}
    found["mine.preset.json"] = "mine.preset.json"
    for graph in workflows().values():
        for one in graph.values():
            for value in one["inputs"].values():
                if isinstance(value, str) and value.endswith(".safetensors"):
                    part = next(there for part, there in MINIATURES.items() if part in value.lower().replace("-", "_"))
                    found[value] = f"{part}.safetensors"
    return found


def smaller(graph: Graph) -> Graph:
    """At a few steps and pixels, with the loaders of small encoders."""
    made: Graph = {}
    for name, one in graph.items():
        kind, inputs = one["class_type"], dict(one["inputs"])
        if kind != "ImageFromBatch":
            inputs |= {key: value for key, value in SMALL.items() if isinstance(inputs.get(key), int)}
        if isinstance(inputs.get("steps"), int):
            inputs["steps"] = min(inputs["steps"] or 4, 12)
        if kind == "CLIPVisionLoader":
            kind, inputs = "WanCoreVisionLoader", {"clip_vision": inputs["clip_name"]}
        if kind == "AudioEncoderEncode":
            kind, inputs = "GoldenSound", {"samples": 48000}
        inputs.pop("face_video", None)  # the miniature's face has another size
        if kind == "WanCoreLauncher":
            inputs["devices"] = "cpu,cpu"
        made[name] = {"class_type": kind, "inputs": inputs}
    return made


def validated(server: Server) -> dict[str, Case]:
    """What the server says of every workflow as it is, while another prompt keeps it from running them."""
    long = kept(sampled(steps=1000, size={"width": 128, "height": 128}))
    server.post("/prompt", {"prompt": long})
    found = {}
    for name, graph in workflows().items():
        answer = server.post("/prompt", {"prompt": graph})
        accepted = {
            "accepted": {"outputs": sorted(key for key, one in graph.items() if one["class_type"].startswith("Save"))}
        }
        found[name] = accepted if "prompt_id" in answer else {"refused": server.refusal(answer, graph)}
    server.post("/queue", {"clear": True})
    while (queue := server.get("/queue"))["queue_running"] or queue["queue_pending"]:
        server.post("/interrupt", {})
        time.sleep(0.2)
    return found


def schemas(server: Server) -> dict[str, Case]:
    """The schema of every node of the pack; lists of files are those of this machine."""
    info = server.get("/object_info")
    return {
        name: json.loads(normal(json.dumps(one), server.base))
        for name, one in sorted(info.items())
        if name.startswith("WanCore")
    }


def run_nodes(server: Server, wanted: Callable[[str], bool]) -> dict[str, Case]:
    """The groups schemas, workflows and nodes."""
    found = {f"schemas/{name}": one for name, one in schemas(server).items()} if wanted("schemas/") else {}
    if any(wanted(f"workflows/{name}") for name in workflows()):
        found |= {f"workflows/{name}, validated": one for name, one in validated(server).items()}
        for name, graph in workflows().items():
            found[f"workflows/{name}, smaller"] = server.run(smaller(graph))
    for name, graph in features().items():
        if wanted(f"nodes/{name}"):
            found[f"nodes/{name}"] = server.run(graph)
    return found
