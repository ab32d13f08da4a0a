"""A picture moves as somebody in a video does: Wan2.2-Animate-14B and Wan-Animate-2.

Files and numbers are those of ComfyUI's templates (package comfyui-workflow-templates-json: video_wan2_2_14B_animate in
0.3.52 of media-video, video_wan_animate2).
"""

from __future__ import annotations

from tools.page_form import Node, Output, Workflow
from tools.template_workflows import NEGATIVE, TEXT_ENCODER, VAE
from tools.workflow_parts import (
    BELOW,
    NARROW,
    SIZE,
    STEP,
    TINY,
    TINY_DRIVEN,
    WIDE,
    add_decode,
    add_drawing,
    add_loaders,
    add_note,
    add_prompt,
    add_sampler,
    add_video,
)

PROMPT = (
    "Character appearance description: a stylish designer toy figure of a male street dancer, vibrant red hoodie, neon "
    "yellow cargo pants, sneakers. Background description: a rainy neon street."
)
LORA = "lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors"


def embedded_driven(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = add_loaders(flow, 0, TINY)
    flow.column("1  A video that drives", STEP, WIDE)
    text = add_prompt(flow, clip, "a red circle moving right on a blue background")
    size = flow.add("WanCoreEmptyLatent", **SIZE)
    flow.column("Sampling", 2 * STEP, WIDE)
    sampler = add_sampler(flow, model["model"], text["positive"], text["negative"], size["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW)
    decode = add_decode(flow, vae, sampler)
    add_video(flow, decode["image"], "WanCore/driving")

    below = BELOW
    flow.column("Its model", 0, WIDE, y=below)
    driven = flow.add("WanCoreModelLoader", high=TINY_DRIVEN, low="none", space=180)
    vision = flow.add("WanCoreVisionLoader", space=60)
    flow.column("2  A picture that moves", -500, 460, y=below)
    picture = add_drawing(flow, "green", "white", left=34, top=20, title="Reference")
    seen = flow.add("CLIPVisionEncode", clip_vision=vision["clip_vision"], image=picture["IMAGE"], crop="none")
    flow.column("What to show", STEP, WIDE, y=below)
    silent = add_prompt(flow, clip, "")
    first = flow.add("ImageFromBatch", image=decode["image"], batch_index=0, length=1)
    seen_first = flow.add("CLIPVisionEncode", clip_vision=vision["clip_vision"], image=first["IMAGE"], crop="none")
    given = flow.add(
        "WanCoreAnimate2",
        positive=silent["positive"],
        negative=silent["negative"],
        vae=vae["vae"],
        **SIZE,
        reference_image=picture["IMAGE"],
        pose_video=decode["image"],
        clip_vision_output=seen["CLIP_VISION_OUTPUT"],
        clip_vision_output_pose=seen_first["CLIP_VISION_OUTPUT"],
    )
    flow.column("Sampling", 2 * STEP, WIDE, y=below)
    again = add_sampler(flow, driven["model"], given["positive"], given["negative"], given["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW, y=below)
    trimmed = flow.add("TrimVideoLatent", samples=again["latent"], trim_amount=given["trim_latent"])
    images = flow.add("WanCoreVAEDecode", vae=vae["vae"], latent=trimmed["LATENT"], report=again["report"], space=40)
    add_video(flow, images["image"], "WanCore/driven")


def wan22_animate_14b(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae, picture, seen = _beginning(flow, "Wan2_2-Animate-14B_fp8_scaled_e4m3fn_KJ_v2.safetensors")
    flow.column("Drawn poses, face", 2 * STEP, WIDE)
    poses, face = (_video(flow, title) for title in ("Pose video", "Face video"))
    flow.column("What to show", 3 * STEP, WIDE)
    text = flow.add("WanCoreTextEncode", clip=clip["clip"], positive="the character is dancing", negative=NEGATIVE)
    driven = flow.add(
        "WanCoreAnimate",
        positive=text["positive"],
        negative=text["negative"],
        vae=vae["vae"],
        width=640,
        height=640,
        reference_image=picture["IMAGE"],
        pose_video=poses["images"],
        face_video=face["images"],
        clip_vision_output=seen,
    )
    _ending(flow, model["model"], driven, vae, poses["fps"], steps=6, shift=8.0, guidance_high=1.0, solver="euler")


def wan22_animate_2(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae, picture, seen = _beginning(flow, "wan_animate_2_int8_convrot.safetensors")
    flow.column("Motion", 2 * STEP, WIDE)
    motion = _video(flow, "Driving video")
    flow.column("What to show", 3 * STEP, WIDE)
    text = flow.add(
        "WanCoreTextEncode",
        clip=clip["clip"],
        positive=PROMPT,
        negative=NEGATIVE,
    )
    driven = flow.add(
        "WanCoreAnimate2",
        positive=text["positive"],
        negative=text["negative"],
        vae=vae["vae"],
        width=480,
        height=832,
        reference_image=picture["IMAGE"],
        pose_video=motion["images"],
        clip_vision_output=seen,
    )
    _ending(flow, model["model"], driven, vae, motion["fps"], steps=6, shift=5.0, guidance_high=1.0, solver="lcm")


def wan22_animate_2_loop(flow: Workflow) -> None:
    """A video of any length, clip by clip in ComfyUI's loop: all frames that were made go from pass to pass."""
    add_note(flow)
    model, clip, vae, picture, seen = _beginning(flow, "wan_animate_2_int8_convrot.safetensors")
    flow.column("Motion", 2 * STEP, WIDE)
    motion = _video(flow, "Driving video")
    count = flow.add("GetImageSize", image=motion["images"], space=60)
    flow.column("Clips", 3 * STEP, WIDE)
    frames = flow.add("PrimitiveInt", title="Frames of a clip", value=81)
    sizes = {"values.a": count["batch_size"], "values.b": frames["INT"]}
    # Each clip but the first begins with the last frame of the one before.
    passes = flow.add("ComfyMathExpression", title="Clips", expression="floor((a - 2) / (b - 1)) + 1", **sizes)
    rest = "4 * ceil((a - (b - 1) * (c - 1) - 1) / 4) + 1"
    last = flow.add(
        "ComfyMathExpression", title="Frames of the last", expression=rest, **sizes, **{"values.c": passes["INT"]}
    )
    loop = flow.add("StartLoop", **{"mode.num_iterations": passes["INT"]}, space=40)
    length = flow.add("ComfySwitchNode", switch=loop["is_last"], on_false=frames["INT"], on_true=last["INT"])
    flow.column("What to show", 4 * STEP, WIDE)
    text = flow.add("WanCoreTextEncode", clip=clip["clip"], positive=PROMPT, negative=NEGATIVE)
    made = loop["current_iteration_value"]
    driven = flow.add(
        "WanCoreAnimate2",
        positive=text["positive"],
        negative=text["negative"],
        vae=vae["vae"],
        width=480,
        height=832,
        frames=length["output"],
        reference_image=picture["IMAGE"],
        pose_video=motion["images"],
        clip_vision_output=seen,
        previous_frames=made,
    )
    flow.column("Sampling", 5 * STEP, WIDE)
    given = {name: driven[name] for name in ("positive", "negative", "latent")}
    numbers = {"steps": 6, "shift": 5.0, "guidance_high": 1.0, "solver": "lcm"}
    sampler = add_sampler(flow, model["model"], **given, seed=1, **numbers)
    flow.column("All frames so far", 6 * STEP, WIDE)
    trimmed = flow.add("TrimVideoLatent", samples=sampler["latent"], trim_amount=driven["trim_latent"])
    decode = flow.add("WanCoreVAEDecode", vae=vae["vae"], latent=trimmed["LATENT"], report=sampler["report"], space=40)
    new = flow.add("ImageFromBatch", image=decode["image"], batch_index=driven["trim_image"], length=4096)
    both = flow.add("ImageBatch", image1=made, image2=new["IMAGE"])
    whole = flow.add("ComfySwitchNode", switch=loop["is_first"], on_false=both["IMAGE"], on_true=decode["image"])
    end = flow.add("EndLoop", output_value=whole["output"], next_iteration_value=whole["output"])
    flow.column("Video", 7 * STEP, NARROW)
    exact = flow.add("ImageFromBatch", image=end["outputs"], batch_index=0, length=count["batch_size"])
    video = flow.add("CreateVideo", images=exact["IMAGE"], audio=motion["audio"], fps=motion["fps"], space=24)
    flow.add("SaveVideo", video=video["VIDEO"], filename_prefix=f"WanCore/{flow.name}", space=290)


def _beginning(flow: Workflow, file: str) -> tuple[Node, Node, Node, Node, Output]:
    """The model with its LoRA, text encoder, VAE, reference picture, and what CLIP sees in it."""
    flow.column("Models", 0, WIDE)
    model = flow.add("WanCoreModelLoader", high=file, low="none", space=180)
    clip = flow.add("WanCoreTextEncoderLoader", text_encoder=TEXT_ENCODER, space=60)
    vae = flow.add("WanCoreVAELoader", vae=VAE, space=60)
    fast = flow.add("WanCoreLoRA", model=model["model"], high=LORA, space=100)
    flow.column("Reference", STEP, WIDE)
    picture = flow.add("LoadImage", title="Reference image", image="example.png", space=330)
    vision = flow.add("CLIPVisionLoader", clip_name="clip_vision_h.safetensors")
    seen = flow.add("CLIPVisionEncode", clip_vision=vision["CLIP_VISION"], image=picture["IMAGE"], crop="none")
    return fast, clip, vae, picture, seen["CLIP_VISION_OUTPUT"]


def _video(flow: Workflow, title: str) -> Node:
    video = flow.add("LoadVideo", title=title, file="example.mp4", space=290)
    return flow.add("GetVideoComponents", video=video["VIDEO"])


def _ending(flow: Workflow, model: Output, driven: Node, vae: Node, fps: Output, **numbers: object) -> None:
    """Sampling, the reference's latent frame removed, decoding, and a file."""
    flow.column("Sampling", 4 * STEP, WIDE)
    given = {name: driven[name] for name in ("positive", "negative", "latent")}
    sampler = add_sampler(flow, model, **given, seed=1, **numbers)
    flow.column("Video", 5 * STEP, NARROW)
    trimmed = flow.add("TrimVideoLatent", samples=sampler["latent"], trim_amount=driven["trim_latent"])
    decode = flow.add("WanCoreVAEDecode", vae=vae["vae"], latent=trimmed["LATENT"], report=sampler["report"], space=40)
    video = flow.add("CreateVideo", images=decode["image"], fps=fps, space=24)
    flow.add("SaveVideo", video=video["VIDEO"], filename_prefix=f"WanCore/{flow.name}", space=290)
