"""ComfyUI's own templates of Wan 2.2 with WanCore's nodes in place of its loaders and samplers.

Files, sizes, prompts and numbers are those of the templates (package comfyui-workflow-templates-json:
video_wan2_2_14B_i2v, video_wan2_2_14B_t2v, video_wan2_2_14B_flf2v, video_wan2_2_5B_ti2v). One switch chooses the model
with or without the four-step LoRAs; the sampler's preset `template` follows it.
"""

from __future__ import annotations

from tools.page_form import Node, Output, Workflow
from tools.workflow_parts import NARROW, STEP, WIDE, add_decoded_video, add_note, add_sampler

SIZE = {"width": 640, "height": 640, "frames": 81}
TEXT_ENCODER, VAE = "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors"
EXPERTS = "wan2.2_{task}_{expert}_noise_14B_fp8_scaled.safetensors"
LORAS = "wan2.2_{task}_lightx2v_4steps_lora_v{version}_{expert}_noise.safetensors"
NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)


def wan22_image_to_video(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = _models(flow, "i2v")
    flow.column("First frame", -500, 460, y=560)
    picture = flow.add("LoadImage", image="example.png", space=330)
    chosen = _four_steps(flow, model, "i2v", "1")
    flow.column("What to show", 2 * STEP, WIDE)
    text = _prompts(
        flow,
        clip,
        "The white dragon warrior stands still, eyes full of determination and strength. The camera slowly moves "
        "closer or circles around the warrior, highlighting the powerful presence and heroic spirit of the character.",
    )
    known = _image_to_video(flow, text, vae, first_image=picture["IMAGE"])
    _sample_and_save(flow, chosen, known, vae, preset="template")


def wan22_text_to_video(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = _models(flow, "t2v")
    chosen = _four_steps(flow, model, "t2v", "1.1")
    flow.column("What to show", 2 * STEP, WIDE)
    text = _prompts(
        flow,
        clip,
        "Beautiful young European woman with honey blonde hair gracefully turning her head back over shoulder, gentle "
        "smile, bright eyes looking at camera. Hair flowing in slow motion as she turns. Soft natural lighting, clean "
        "background, cinematic slow-motion portrait.",
    )
    latent = flow.add("WanCoreEmptyLatent", **SIZE)["latent"]
    given = {"positive": text["positive"], "negative": text["negative"], "latent": latent}
    _sample_and_save(flow, chosen, given, vae, preset="template")


def wan22_first_last_frame(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = _models(flow, "i2v")
    flow.column("First and last frame", -500, 460, y=560)
    first = flow.add("LoadImage", title="First frame", image="example.png", space=330)
    last = flow.add("LoadImage", title="Last frame", image="example.png", space=330)
    flow.column("What to show", 2 * STEP, WIDE)
    text = _prompts(
        flow,
        clip,
        "A kitten made of ice crystals is startled awake. Angry, it raises its head and slowly grows coloured fur, "
        "becoming a huge beast that bares its teeth and opens its eyes wide, as if it had found danger.",
    )
    known = _image_to_video(flow, text, vae, first_image=first["IMAGE"], last_image=last["IMAGE"])
    numbers = {"steps": 20, "shift": 8.0, "guidance_high": 4.0, "guidance_low": 4.0, "solver": "euler"}
    _sample_and_save(flow, model["model"], known, vae, **numbers)


def wan22_5b(flow: Workflow) -> None:
    add_note(flow)
    flow.column("Models", 0, WIDE)
    model = flow.add("WanCoreModelLoader", high="wan2.2_ti2v_5B_fp16.safetensors", low="none", space=180)
    clip = flow.add("WanCoreTextEncoderLoader", text_encoder=TEXT_ENCODER, space=60)
    vae = flow.add("WanCoreVAELoader", vae="wan2.2_vae.safetensors", space=60)
    flow.column("What to show", 2 * STEP, WIDE)
    text = _prompts(
        flow,
        clip,
        "Low contrast. In a retro 1970s-style subway station, a street musician plays in dim colors and rough "
        "textures. He wears an old jacket, playing guitar with focus. Commuters hurry by, and a small crowd gathers "
        "to listen. The camera slowly moves right, capturing the blend of music and city noise, with old subway "
        "signs and mottled walls in the background.",
    )
    size = {"width": 1280, "height": 704, "frames": 121}
    latent = flow.add("WanCoreEmptyLatent", **size, latent_type="Wan 2.2 VAE (TI2V-5B)")["latent"]
    given = {"positive": text["positive"], "negative": text["negative"], "latent": latent}
    numbers = {"steps": 20, "shift": 8.0, "guidance_high": 5.0, "solver": "unipc"}
    _sample_and_save(flow, model["model"], given, vae, fps=24.0, **numbers)


# --------------------------------------------------------------------------------------------------------------- parts


def _models(flow: Workflow, task: str) -> tuple[Node, Node, Node]:
    flow.column("Models", 0, WIDE)
    files = {expert: EXPERTS.format(task=task, expert=expert) for expert in ("high", "low")}
    model = flow.add("WanCoreModelLoader", **files, space=180)
    clip = flow.add("WanCoreTextEncoderLoader", text_encoder=TEXT_ENCODER, space=60)
    return model, clip, flow.add("WanCoreVAELoader", vae=VAE, space=60)


def _four_steps(flow: Workflow, model: Node, task: str, version: str) -> Output:
    """The model with four-step LoRAs where the switch is on, and without where it is off."""
    flow.column("Four steps?", STEP, WIDE)
    files = {expert: LORAS.format(task=task, version=version, expert=expert) for expert in ("high", "low")}
    fast = flow.add("WanCoreLoRA", model=model["model"], **files, space=100)
    return flow.add(
        "ComfySwitchNode", title="Four-step LoRAs", switch=False, on_false=model["model"], on_true=fast["model"]
    )["output"]


def _prompts(flow: Workflow, clip: Node, positive: str) -> Node:
    return flow.add("WanCoreTextEncode", clip=clip["clip"], positive=positive, negative=NEGATIVE)


def _image_to_video(flow: Workflow, text: Node, vae: Node, **images: Output) -> dict[str, Output]:
    known = flow.add(
        "WanCoreImageToVideo", positive=text["positive"], negative=text["negative"], vae=vae["vae"], **SIZE, **images
    )
    return {name: known[name] for name in ("positive", "negative", "latent")}


def _sample_and_save(
    flow: Workflow, model: Output, given: dict[str, Output], vae: Node, fps: float = 16.0, **numbers: object
) -> None:
    flow.column("Sampling", 3 * STEP, WIDE)
    sampler = add_sampler(flow, model, **given, seed=1, **numbers)
    flow.column("Video", 4 * STEP, NARROW)
    add_decoded_video(flow, vae, sampler, f"WanCore/{flow.name}", fps=fps)
