"""A picture speaks or sings what an audio file says: Wan2.2-S2V-14B, in three clips.

Files and numbers are those of ComfyUI's template video_wan2_2_14B_s2v (package comfyui-workflow-templates-json). Clips
are carried on as the reference implementation does it: by the frames that were made, encoded again.
"""

from __future__ import annotations

from tools.page_form import Node, Output, Workflow
from tools.template_workflows import NEGATIVE, TEXT_ENCODER, VAE
from tools.workflow_parts import NARROW, STEP, WIDE, add_note, add_sampler

LORA = "wan2.2_t2v_lightx2v_4steps_lora_v1.1_high_noise.safetensors"
CLIPS = 3
NUMBERS = {"steps": 4, "shift": 8.0, "guidance_high": 1.0, "solver": "unipc"}


def wan22_sound_to_video(flow: Workflow) -> None:
    add_note(flow)
    flow.column("Models", 0, WIDE)
    model = flow.add("WanCoreModelLoader", high="wan2.2_s2v_14B_fp8_scaled.safetensors", low="none", space=180)
    clip = flow.add("WanCoreTextEncoderLoader", text_encoder=TEXT_ENCODER, space=60)
    vae = flow.add("WanCoreVAELoader", vae=VAE, space=60)
    fast = flow.add("WanCoreLoRA", model=model["model"], high=LORA, space=100)
    flow.column("Sound and picture", STEP, WIDE)
    sound = flow.add("LoadAudio", audio="example.mp3", space=60)
    encoder = flow.add("AudioEncoderLoader", audio_encoder_name="wav2vec2_large_english_fp16.safetensors")
    heard = flow.add("AudioEncoderEncode", audio_encoder=encoder["AUDIO_ENCODER"], audio=sound["AUDIO"])
    picture = flow.add("LoadImage", title="Reference image", image="example.png", space=330)
    text = flow.add(
        "WanCoreTextEncode",
        clip=clip["clip"],
        positive="The man is playing the guitar. He looks down at his hands playing the guitar and sings "
        "affectionately and gently.",
        negative=NEGATIVE,
    )
    made: Output | None = None
    for number in range(1, CLIPS + 1):
        flow.column(f"Clip {number}", (number + 1) * STEP, WIDE)
        driven = flow.add(
            "WanCoreSoundToVideo",
            positive=text["positive"],
            negative=text["negative"],
            vae=vae["vae"],
            width=640,
            height=640,
            audio_encoder_output=heard["AUDIO_ENCODER_OUTPUT"],
            reference_image=picture["IMAGE"],
            audio=sound["AUDIO"],
            **({} if made is None else {"previous_frames": made}),
        )
        new = _made(flow, fast["model"], vae, driven, number)
        made = new if made is None else flow.add("ImageBatch", image1=made, image2=new)["IMAGE"]
    flow.column("Video", (CLIPS + 2) * STEP, NARROW)
    video = flow.add("CreateVideo", images=made, fps=16.0, audio=driven["audio"], space=24)
    flow.add("SaveVideo", video=video["VIDEO"], filename_prefix=f"WanCore/{flow.name}", space=290)


def _made(flow: Workflow, model: Output, vae: Node, driven: Node, seed: int) -> Output:
    """The new frames of a clip: sampled, decoded after what was before it, and that cut off."""
    given = {name: driven[name] for name in ("positive", "negative", "latent")}
    sampler = add_sampler(flow, model, **given, seed=seed, **NUMBERS)
    whole = flow.add("LatentConcat", samples1=driven["lead"], samples2=sampler["latent"], dim="t")
    frames = flow.add("WanCoreVAEDecode", vae=vae["vae"], latent=whole["LATENT"], report=sampler["report"], space=40)
    return flow.add(
        "ImageFromBatch", image=frames["image"], batch_index=driven["trim_image"], length=driven["new_frames"]
    )["IMAGE"]
