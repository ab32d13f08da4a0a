"""A picture moves as somebody in a video does: Wan2.2-Animate-14B and Wan-Animate-2.

Files and numbers are those of ComfyUI's templates (package comfyui-workflow-templates-json: video_wan2_2_14B_animate in
0.3.52 of media-video, video_wan_animate2).
"""

from __future__ import annotations

from tools.page_form import Node, Output, Workflow
from tools.template_workflows import NEGATIVE, TEXT_ENCODER, VAE
from tools.workflow_parts import NARROW, STEP, WIDE, add_note, add_sampler

LORA = "lightx2v_I2V_14B_480p_cfg_step_distill_rank64_bf16.safetensors"


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
        positive="Character appearance description: a stylish designer toy figure of a male street dancer, vibrant red "
        "hoodie, neon yellow cargo pants, sneakers. Background description: a rainy neon street.",
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
