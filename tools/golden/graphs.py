"""Graphs in API form: the nodes that a task needs, and one graph for each way in which ComfyUI takes an option set."""

from __future__ import annotations

from typing import Any

from tools.golden.comfyui import Graph, Link, node
from tools.golden.commands import PROMPT
from tools.golden.options import MODELS, TINY, OptionSet, Row

NATIVE_SAMPLERS = {"unipc": "uni_pc", "dpm++": "dpmpp_2m"}
CHAINED = [f"WanCore{name}" for name in ("MagCache", "TaylorSeer", "AdaptiveCache", "SpeedPreset", "SparseAttention",
                                         "GuidanceSchedule", "ResolutionSchedule")]  # fmt: skip
NUMBERS = {"steps": 0, "shift": 0.0, "boundary": 0.0, "guidance_high": 0.0, "guidance_low": 0.0, "solver": "unipc"}
SIZE = {"width": 64, "height": 64, "frames": 5}


def parts(task: str, size: dict[str, int], control: dict[str, Any] | None = None) -> tuple[Graph, list[Link]]:
    """Loaders, texts and media of a task; the links of positive, negative and latent."""
    model = MODELS[task]
    large = any("ti2v" in name for name in model.files)
    vae = "vae22.safetensors" if large else TINY if "tiny" in task else "vae21.safetensors"
    graph = {
        "model": node("WanCoreModelLoader", high=model.files[0], low=[*model.files, "none"][1], precision="checkpoint",
                      attention="auto", residency="auto"),
        "encoder": node("WanCoreTextEncoderLoader", text_encoder=TINY, precision="checkpoint"),
        "vae": node("WanCoreVAELoader", vae=vae, precision="auto"),
        "text": node("WanCoreTextEncode", clip=["encoder", 0], positive=PROMPT, negative=""),
        "picture": node("LoadImage", image="start.png"),
        "file": node("LoadVideo", file="video.avi"),
        "video": node("GetVideoComponents", video=["file", 0]),
        "vision": node("WanCoreVisionLoader", clip_vision=TINY if "tiny" in task else "vision.safetensors"),
        "seen": node("CLIPVisionEncode", clip_vision=["vision", 0], image=["picture", 0], crop="none"),
    }  # fmt: skip
    given: dict[str, Any] = {"positive": ["text", 0], "negative": ["text", 1], "vae": ["vae", 0], **size}
    picture, video, seen = ["picture", 0], ["video", 0], {"clip_vision_output": ["seen", 0]}
    native = {name: value for name, value in given.items() if name != "frames"}
    native |= {"length": size["frames"], "batch_size": 1}
    driven = {**given, "reference_image": picture, "pose_video": video, **seen}
    if model.media in ("none", "5B"):
        kind = "Wan 2.2 VAE (TI2V-5B)" if large else "Wan 2.1 VAE (A14B, tiny)"
        graph["size"] = node("WanCoreEmptyLatent", **size, latent_type=kind)
        return graph, [["text", 0], ["text", 1], ["size", 0]]
    if model.media == "camera":
        graph["camera"] = node("WanCoreCamera", camera="zoom-in", **size)
    if model.media == "sound":
        graph["states"] = node("GoldenSound", samples=16000)
    graph["size"] = {
        "image": node("WanCoreImageToVideo", **given, first_image=picture, **(seen if "480P" in task else {})),
        "animate": node("WanCoreAnimate", **driven),
        "animate2": node("WanCoreAnimate2", **driven),
        "sound": node("WanCoreSoundToVideo", **given, audio_encoder_output=["states", 0], reference_image=picture),
        "vace": node("WanCoreVACE", **{**given, "strength": 1.0, "control_video": video, **(control or {})}),
        "fun": node("Wan22FunControlToVideo", **native, control_video=video),
        "camera": node("WanCameraImageToVideo", **native, camera_conditions=["camera", 0], start_image=picture),
    }[model.media]
    return graph, [["size", 0], ["size", 1], ["size", 2]]


def needed(graph: Graph, ends: list[str]) -> Graph:
    """The nodes that `ends` depend on."""
    wanted, waiting = set(), list(ends)
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += [value[0] for value in graph[name]["inputs"].values() if isinstance(value, list)]
    return {name: one for name, one in graph.items() if name in wanted}


def chained(graph: Graph, rows: tuple[Row, ...]) -> Link | None:
    """Add the nodes of SKIPPING, each connected to the one before; the link of the last."""
    last: Link | None = None
    for number, row in enumerate(row for row in rows if row.kind in CHAINED):
        inputs = dict(row.inputs)
        if row.kind == "WanCoreSpeedPreset":
            if last is not None:  # it takes no other settings
                raise LookupError
            inputs["preset"] = {"mine": "mine.preset.json"}.get(inputs["preset"], inputs["preset"])
        graph[f"skip {number}"] = node(str(row.kind), **inputs, **({} if last is None else {"skipping": last}))
        last = [f"skip {number}", 0]
    return last


def door(name: str, one: OptionSet, info: dict[str, Any]) -> Graph | None:
    """The graph for `sampler`, `preview`, `calibrate` or `native`; None where it cannot express the set. info: what
    /object_info says."""
    kinds = {row.kind for row in one.rows}
    try:
        if name == "native":
            return native_graph(one, kinds)
        return own_graph(name, one, kinds, info)
    except LookupError:
        return None


def own_graph(name: str, one: OptionSet, kinds: set[str | None], info: dict[str, Any]) -> Graph:
    """Raises LookupError where a row has no place in it."""
    kind = {"sampler": "WanCoreSampler", "preview": "WanCorePlanPreview", "calibrate": "WanCoreCalibrate"}[name]
    offered = {key for group in info[kind]["input"].values() for key in group}
    size, inputs, control = dict(SIZE), dict(NUMBERS), None
    for row in one.rows:
        if row.kind == "plan" and offered.issuperset(row.inputs):
            inputs |= row.inputs
        elif row.kind == "size" and (name != "preview" or "frames" in row.inputs):
            size |= row.inputs
        elif row.kind == "clips" and name == "preview":
            inputs |= row.inputs
        elif row.kind == "WanCoreVACE" and MODELS[one.task].media == "vace" and name == "sampler":
            control = row.inputs
        elif row.kind not in (*CHAINED, "WanCoreContextWindows", "WanCoreLoRA") and not (
            row.kind == "WanCoreNAG" and name == "sampler"
        ):
            raise LookupError(row.name)
    graph, (positive, negative, latent) = parts(one.task, size, control)
    skipping = chained(graph, one.rows)
    if skipping is not None and "skipping" not in offered:
        raise LookupError("skipping")
    model: Link = ["model", 0]
    for row in one.rows:
        if row.kind == "WanCoreNAG":
            graph["nag"] = node(row.kind, negative=negative, **row.inputs)
            negative = ["nag", 0]
        if row.kind in ("WanCoreContextWindows", "WanCoreLoRA"):
            graph[row.kind] = node(row.kind, model=model, **row.inputs)
            model = [row.kind, 0]
    from_latents = inputs.get("denoise", 1.0) < 1 or inputs.get("start_step", 0) > 0
    if from_latents and MODELS[one.task].media in ("none", "5B"):
        graph["clip"] = node("ImageFromBatch", image=["video", 0], batch_index=0, length=size["frames"])
        graph["resized"] = node("ImageScale", image=["clip", 0], upscale_method="area", width=size["width"],
                                height=size["height"], crop="disabled")  # fmt: skip
        graph["size"] = node("WanCoreVAEEncode", vae=["vae", 0], image=["resized", 0])
    if skipping is not None:
        inputs["skipping"] = skipping
    if name == "preview":
        if "size" in kinds:
            inputs.setdefault("frames", size["frames"])
        graph["door"] = node(kind, model=model, **inputs, seconds_per_forward=1.0)
        graph["show"] = node("PreviewAny", source=["door", 1])
        return needed(graph, ["show"])
    links = {"model": model, "positive": positive, "negative": negative, "latent": latent}
    if name == "calibrate":
        graph["door"] = node(kind, **links, **inputs, seed=0, videos=1, keep="only show")
        graph["show"] = node("PreviewAny", source=["door", 2])
        return needed(graph, ["show"])
    graph["door"] = node(kind, **links, **inputs, seed=0, guidance_mode="auto")
    return kept(graph)


def kept(graph: Graph) -> Graph:
    """The sampler `door`, with its latents saved and its report shown."""
    graph["report"] = node("WanCoreReport", report=["door", 1])
    graph["show"] = node("PreviewAny", source=["report", 1])
    graph["save"] = node("SaveLatent", samples=["door", 0], filename_prefix="golden")
    return needed(graph, ["door", "show", "save"])


def native_graph(one: OptionSet, kinds: set[str | None]) -> Graph:
    """ComfyUI's own loader, WanCore Accelerate and WanCore Plan for KSampler. Raises LookupError where a row has no
    place in it, or the model no file."""
    files = MODELS[one.task].files
    if "(" in files[0] or not MODELS[one.task].native or kinds - {"plan", "size", *CHAINED}:
        raise LookupError(one.name)
    inputs: dict[str, Any] = {"steps": 12, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    size, shift, graph = dict(SIZE), None, Graph()
    for row in one.rows:
        if row.kind == "size":
            size |= row.inputs
            continue
        for name, value in row.inputs.items() if row.kind == "plan" else ():
            if name == "solver":
                inputs["sampler_name"] = NATIVE_SAMPLERS.get(value, value)
            elif name == "shift":
                shift = value
            elif name in ("steps", "denoise"):
                inputs[name] = value
            elif name in ("guidance_high", "guidance_low"):
                inputs["cfg" if name == "guidance_high" or len(files) == 1 else "cfg_low"] = value
            else:
                raise LookupError(name)
    skipping = chained(graph, one.rows)
    more = {} if skipping is None else {"skipping": skipping}
    for number, file in enumerate(files):
        graph[f"load {number}"] = node("UNETLoader", unet_name=file, weight_dtype="default")
        model: Link = [f"load {number}", 0]
        if shift is not None:
            graph[f"shift {number}"] = node("ModelSamplingSD3", model=model, shift=shift)
            model = [f"shift {number}", 0]
        graph[f"fast {number}"] = node("WanCoreAccelerate", model=model, attention="auto", sparse="off", **more)
        inputs["model_low" if number else "model"] = [f"fast {number}", 0]
    if len(files) == 2:
        inputs["split_step"] = max(1, inputs["steps"] // 2)
    kind = "Wan 2.2 VAE (TI2V-5B)" if one.task == "ti2v-5B" else "Wan 2.1 VAE (A14B, tiny)"
    graph["size"] = node("WanCoreEmptyLatent", **size, latent_type=kind)
    graph["door"] = node("WanCoreNativePlan", **inputs, seconds_per_forward=1.0, latent=["size", 0])
    graph["show"] = node("PreviewAny", source=["door", 1])
    return graph
