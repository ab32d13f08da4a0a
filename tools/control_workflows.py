"""Videos after a control video, masks, pictures or the path of a camera: VACE, Fun control, Fun inpaint, Fun camera.

Files, sizes and numbers are those of ComfyUI's templates (package comfyui-workflow-templates-json 0.1.123:
video_wan_vace_14B_v2v, video_wan_vace_inpainting, video_wan_vace_outpainting, video_wan_vace_14B_ref2v,
video_wan_vace_flf2v, video_wan2_2_14B_fun_control, video_wan2_2_14B_fun_inpaint, video_wan2_2_14B_fun_camera).
"""

from __future__ import annotations

from tools.page_form import Node, Output, Workflow
from tools.template_workflows import NEGATIVE, TEXT_ENCODER, VAE
from tools.workflow_parts import NARROW, STEP, WIDE, add_note, add_sampler

VACE = "wan2.1_vace_14B_fp16.safetensors"
CAUSAL = "Wan21_CausVid_14B_T2V_lora_rank32.safetensors"
FUN = "wan2.2_fun_{kind}_{expert}_noise_14B_fp8_scaled.safetensors"
FAST = {"guidance_high": 1.0, "solver": "unipc", "shift": 8.0}
SIZE = {"width": 640, "height": 640, "frames": 81}


def wan21_vace_video_to_video(flow: Workflow) -> None:
    model, clip, vae = _vace(flow, 0.3)
    video = _video(flow, "Control video")
    edges = flow.add("Canny", image=video["images"], low_threshold=0.4, high_threshold=0.8, space=200)
    picture = _picture(flow, "Reference image")
    given = {"control_video": edges["IMAGE"], "reference_images": picture}
    text = _prompts(flow, clip, "The girl is dancing in a sea of flowers, slowly moving her hands.")
    controlled = _controlled(flow, text, vae, width=720, height=720, **given)
    _ending(flow, model, controlled, vae, video["fps"], steps=4, **FAST)


def wan21_vace_inpainting(flow: Workflow) -> None:
    model, clip, vae = _vace(flow, 0.3)
    video = _video(flow, "Video")
    mask = flow.add("ImageToMask", image=_picture(flow, "What is made anew"), channel="red")
    picture = _picture(flow, "Reference image")
    given = {"control_video": video["images"], "control_masks": mask["MASK"], "reference_images": picture}
    text = _prompts(flow, clip, "A little boy and a dog are hiking in the forest. The puppy runs around the boy.")
    controlled = _controlled(flow, text, vae, width=720, height=720, **given)
    _ending(flow, model, controlled, vae, video["fps"], steps=4, **{**FAST, "shift": 5.0})


def wan21_vace_outpainting(flow: Workflow) -> None:
    model, clip, vae = _vace(flow, 0.4)
    video = _video(flow, "Video of 720x640")
    sides = {"left": 120, "top": 120, "right": 120, "bottom": 200, "feathering": 0}
    padded = flow.add("ImagePadForOutpaint", image=video["images"], **sides)
    text = _prompts(flow, clip, "A portrait of a woman with her eyes closed. The camera slowly moves back.")
    given = {"control_video": padded["IMAGE"], "control_masks": padded["MASK"]}
    controlled = _controlled(flow, text, vae, width=960, height=960, **given)
    _ending(flow, model, controlled, vae, video["fps"], steps=3, **FAST)


def wan21_vace_reference(flow: Workflow) -> None:
    model, clip, vae = _vace(flow, 0.3)
    flow.column("Pictures", STEP, WIDE)
    picture = _picture(flow, "Reference image")
    text = _prompts(flow, clip, "An icicle dragon lunges forward, mouth wide open to exhale a stream of icy mist.")
    controlled = _controlled(flow, text, vae, width=768, height=768, reference_images=picture)
    _ending(flow, model, controlled, vae, 16.0, steps=4, **FAST)


def wan21_vace_first_last_frame(flow: Workflow) -> None:
    model, clip, vae = _vace(flow, None)
    flow.column("Pictures", STEP, WIDE)
    given = {"first_image": _picture(flow, "First frame"), "last_image": _picture(flow, "Last frame")}
    text = _prompts(flow, clip, "A girl is dancing in a sea of flowers, slowly stretching her arms.")
    controlled = _controlled(flow, text, vae, width=512, height=512, **given)
    _ending(flow, model, controlled, vae, 16.0, steps=20, guidance_high=6.0, solver="unipc", shift=8.0)


def wan22_fun_control(flow: Workflow) -> None:
    model, clip, vae = _fun(flow, "control")
    video = _video(flow, "Control video")
    edges = flow.add("Canny", image=video["images"], low_threshold=0.1, high_threshold=0.6, space=200)
    picture = _picture(flow, "Reference image")
    text = _prompts(flow, clip, "On a sunny summer day, a girl with white curly double-ponytails is dancing.")
    given = {"ref_image": picture, "control_video": edges["IMAGE"]}
    _fun_ending(flow, model, _native(flow, "Wan22FunControlToVideo", text, vae, **given), vae, video["fps"])


def wan22_fun_inpaint(flow: Workflow) -> None:
    model, clip, vae = _fun(flow, "inpaint")
    flow.column("Pictures", STEP, WIDE)
    given = {"first_image": _picture(flow, "First frame"), "last_image": _picture(flow, "Last frame")}
    text = _prompts(flow, clip, "A dreamy scene where a little cat is sleeping. Zoom in, and the cat opens its eyes.")
    prompts = {name: text[name] for name in ("positive", "negative")}
    known = flow.add("WanCoreImageToVideo", **prompts, vae=vae["vae"], **SIZE, **given)
    _fun_ending(flow, model, known, vae, 16.0)


def wan22_fun_camera(flow: Workflow) -> None:
    model, clip, vae = _fun(flow, "camera")
    flow.column("Picture and camera", STEP, WIDE)
    picture = _picture(flow, "First frame")
    camera = flow.add("WanCoreCamera", camera="zoom-in:0.5+pan-left:0.5", **SIZE)
    text = _prompts(flow, clip, "Two rovers race past, leaving clear tracks. The ship speeds toward a giant planet.")
    given = {"start_image": picture, "camera_conditions": camera["camera_embedding"]}
    _fun_ending(flow, model, _native(flow, "WanCameraImageToVideo", text, vae, **given), vae, 16.0)


# --------------------------------------------------------------------------------------------------------------- parts


def _vace(flow: Workflow, strength: float | None) -> tuple[Output, Node, Node]:
    """The model of VACE, with the LoRA for few steps at a strength, text encoder and VAE."""
    add_note(flow)
    flow.column("Models", 0, WIDE)
    model = flow.add("WanCoreModelLoader", high=VACE, low="none", space=180)
    clip = flow.add("WanCoreTextEncoderLoader", text_encoder=TEXT_ENCODER, space=60)
    vae = flow.add("WanCoreVAELoader", vae=VAE, space=60)
    if strength is None:
        return model["model"], clip, vae
    fast = flow.add("WanCoreLoRA", model=model["model"], high=CAUSAL, strength_high=strength, space=100)
    return fast["model"], clip, vae


def _fun(flow: Workflow, kind: str) -> tuple[Output, Node, Node]:
    add_note(flow)
    flow.column("Models", 0, WIDE)
    files = {expert: FUN.format(kind=kind, expert=expert) for expert in ("high", "low")}
    model = flow.add("WanCoreModelLoader", **files, space=180)
    clip = flow.add("WanCoreTextEncoderLoader", text_encoder=TEXT_ENCODER, space=60)
    return model["model"], clip, flow.add("WanCoreVAELoader", vae=VAE, space=60)


def _video(flow: Workflow, title: str) -> Node:
    flow.column("Video and pictures", STEP, WIDE)
    video = flow.add("LoadVideo", title=title, file="example.mp4", space=290)
    return flow.add("GetVideoComponents", video=video["VIDEO"])


def _picture(flow: Workflow, title: str) -> Output:
    return flow.add("LoadImage", title=title, image="example.png", space=330)["IMAGE"]


def _prompts(flow: Workflow, clip: Node, positive: str) -> Node:
    flow.column("What to show", 2 * STEP, WIDE)
    return flow.add("WanCoreTextEncode", clip=clip["clip"], positive=positive, negative=NEGATIVE)


def _controlled(flow: Workflow, text: Node, vae: Node, **given: object) -> Node:
    prompts = {name: text[name] for name in ("positive", "negative")}
    return flow.add("WanCoreVACE", **prompts, vae=vae["vae"], frames=81, **given)


def _native(flow: Workflow, kind: str, text: Node, vae: Node, **given: Output) -> Node:
    size = {"width": SIZE["width"], "height": SIZE["height"], "length": SIZE["frames"], "batch_size": 1}
    prompts = {name: text[name] for name in ("positive", "negative")}
    return flow.add(kind, **prompts, vae=vae["vae"], **size, **given)


def _fun_ending(flow: Workflow, model: Output, known: Node, vae: Node, fps: Output | float) -> None:
    numbers = {"steps": 20, "guidance_high": 3.5, "guidance_low": 3.5, "solver": "euler", "shift": 8.0}
    _ending(flow, model, known, vae, fps, trimmed=False, **numbers)


def _ending(
    flow: Workflow,
    model: Output,
    known: Node,
    vae: Node,
    fps: Output | float,
    *,
    trimmed: bool = True,
    **numbers: object,
) -> None:
    """Sampling, the frames of references removed, decoding, and a file."""
    flow.column("Sampling", 3 * STEP, WIDE)
    given = {name: known[name] for name in ("positive", "negative", "latent")}
    sampler = add_sampler(flow, model, **given, seed=1, **numbers)
    flow.column("Video", 4 * STEP, NARROW)
    latent = sampler["latent"]
    if trimmed:
        latent = flow.add("TrimVideoLatent", samples=latent, trim_amount=known["trim_latent"])["LATENT"]
    decode = flow.add("WanCoreVAEDecode", vae=vae["vae"], latent=latent, report=sampler["report"], space=40)
    video = flow.add("CreateVideo", images=decode["image"], fps=fps, space=24)
    flow.add("SaveVideo", video=video["VIDEO"], filename_prefix=f"WanCore/{flow.name}", space=290)
