"""Write `workflows/` from the descriptions below: `<title>.json` for ComfyUI's page, `api/<name>.json` for its API.

    python tools/make_workflows.py              write the files
    python tools/make_workflows.py --check      exit 1, naming the files, if they are not what this would write
    python tools/make_workflows.py --native http://127.0.0.1:8188
                                                first learn those of ComfyUI's own nodes that are not described yet

Inputs, their order and defaults come from tests/nodes/node_schemas.json and tools/native_nodes.json, the text of the
notes from tools/notes/. ComfyUI's own nodes stay described as the oldest ComfyUI has them: newer ones add inputs and
outputs, and take a graph without them.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.animate_workflows import embedded_driven, wan22_animate_2, wan22_animate_2_loop, wan22_animate_14b
from tools.control_workflows import (
    wan21_vace_first_last_frame,
    wan21_vace_inpainting,
    wan21_vace_outpainting,
    wan21_vace_reference,
    wan21_vace_video_to_video,
    wan22_fun_camera,
    wan22_fun_control,
    wan22_fun_inpaint,
)
from tools.page_form import NATIVE_SCHEMAS, ROOT, Workflow, native_schema, read_schemas, title_of
from tools.sound_workflows import wan22_sound_to_video
from tools.template_workflows import wan22_5b, wan22_first_last_frame, wan22_image_to_video, wan22_text_to_video
from tools.workflow_parts import (
    BELOW,
    NARROW,
    SIZE,
    STEP,
    TINY,
    TINY_I2V,
    WIDE,
    add_decode,
    add_decoded_video,
    add_drawing,
    add_loaders,
    add_note,
    add_prompt,
    add_sampler,
    add_video,
)

WORKFLOWS = ROOT / "workflows"
NATIVE = ("CLIPTextEncode", "CLIPVisionEncode", "CLIPVisionLoader", "ComfySwitchNode", "CreateVideo")
NATIVE += (
    "EmptyHunyuanLatentVideo",
    "EmptyImage",
    "ImageCompositeMasked",
    "ImageFromBatch",
    "LoadImage",
    "PreviewAny",
    "PreviewImage",
)
NATIVE += ("AudioEncoderEncode", "AudioEncoderLoader", "ImageBatch", "LatentConcat", "LoadAudio")
NATIVE += ("GetVideoComponents", "LoadVideo", "SaveVideo", "TrimVideoLatent", "VAEDecode", "WanImageToVideo")
# Of newer versions: loops are in ComfyUI from 0.36 on. Described by hand, as its page saves them.
LOOPS = ("StartLoop", "EndLoop", "ComfyMathExpression", "GetImageSize", "PrimitiveInt")
NATIVE += LOOPS
NATIVE += ("Canny", "ImagePadForOutpaint", "ImageToMask", "Wan22FunControlToVideo", "WanCameraImageToVideo")

# ---------------------------------------------------------------------------------------------------------- workflows


def text_to_video(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = add_loaders(flow, 0, TINY)
    flow.column("What to show", STEP, WIDE)
    text = add_prompt(flow, clip, "a red circle moving right on a blue background")
    size = flow.add("WanCoreEmptyLatent", **SIZE)
    flow.column("Sampling", 2 * STEP, WIDE)
    sampler = add_sampler(flow, model["model"], text["positive"], text["negative"], size["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW)
    add_decoded_video(flow, vae, sampler, "WanCore/text_to_video")


def image_to_video(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = add_loaders(flow, 0, TINY_I2V)
    flow.column("First frame", -500, 460, y=560)
    picture = add_drawing(flow, "green", "white", left=35, top=58)
    flow.column("What to show", STEP, WIDE)
    text = add_prompt(flow, clip, "a green square moving up on a white background")
    known = flow.add(
        "WanCoreImageToVideo",
        positive=text["positive"],
        negative=text["negative"],
        vae=vae["vae"],
        **SIZE,
        first_image=picture["IMAGE"],
    )
    flow.column("Sampling", 2 * STEP, WIDE)
    sampler = add_sampler(flow, model["model"], known["positive"], known["negative"], known["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW)
    add_decoded_video(flow, vae, sampler, "WanCore/image_to_video")


def image_to_video_wan21(flow: Workflow) -> None:
    add_note(flow)
    flow.column("Models", 0, WIDE)
    model = flow.add("WanCoreModelLoader", high="wan2.1_i2v_480p_14B_fp16.safetensors", low="none", space=180)
    clip = flow.add("WanCoreTextEncoderLoader", text_encoder="umt5_xxl_fp16.safetensors", space=60)
    vae = flow.add("WanCoreVAELoader", vae="wan_2.1_vae.safetensors", space=60)
    flow.column("First frame", -500, 460, y=560)
    picture = flow.add("LoadImage", image="example.png", space=330)
    flow.column("What is in it", 0, WIDE, y=1120)
    vision = flow.add("CLIPVisionLoader", clip_name="clip_vision_h.safetensors")
    seen = flow.add("CLIPVisionEncode", clip_vision=vision["CLIP_VISION"], image=picture["IMAGE"], crop="none")
    flow.column("What to show", STEP, WIDE)
    text = flow.add("WanCoreTextEncode", clip=clip["clip"], positive="the camera moves slowly towards it")
    known = flow.add(
        "WanCoreImageToVideo",
        positive=text["positive"],
        negative=text["negative"],
        vae=vae["vae"],
        first_image=picture["IMAGE"],
        clip_vision_output=seen["CLIP_VISION_OUTPUT"],
    )
    flow.column("Sampling", 2 * STEP, WIDE)
    sampler = add_sampler(flow, model["model"], known["positive"], known["negative"], known["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW)
    add_decoded_video(flow, vae, sampler, "WanCore/image_to_video_wan21", fps=16.0)


def embedded_demo(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = add_loaders(flow, 0, TINY)
    flow.column("1  Text to video", STEP, WIDE)
    text = add_prompt(flow, clip, "a red circle moving right on a blue background")
    size = flow.add("WanCoreEmptyLatent", **SIZE)
    flow.column("Sampling", 2 * STEP, WIDE)
    sampler = add_sampler(flow, model["model"], text["positive"], text["negative"], size["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW)
    decode = add_decode(flow, vae, sampler)
    add_video(flow, decode["image"], "WanCore/demo_text")
    flow.column("Plan and report", 3 * STEP + NARROW + 60, WIDE)
    flow.add("WanCorePlanPreview", model=model["model"], space=240)
    flow.add("WanCoreReport", report=decode["report"], space=270)

    below = BELOW
    flow.column("2  Image to video", STEP, WIDE, y=below)
    last = flow.add("ImageFromBatch", image=decode["image"], batch_index=SIZE["frames"] - 1, length=1)
    back = add_prompt(flow, clip, "a red circle moving left on a blue background")
    known = flow.add(
        "WanCoreImageToVideo",
        positive=back["positive"],
        negative=back["negative"],
        vae=vae["vae"],
        **SIZE,
        first_image=last["IMAGE"],
    )
    flow.column("Its model", 0, WIDE, y=below)
    second = flow.add("WanCoreModelLoader", high=TINY_I2V, low=TINY_I2V, space=180)
    flow.column("Sampling", 2 * STEP, WIDE, y=below)
    again = add_sampler(flow, second["model"], known["positive"], known["negative"], known["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW, y=below)
    decode_again = add_decoded_video(flow, vae, again, "WanCore/demo_image")
    flow.column("Its report", 3 * STEP + NARROW + 60, WIDE, y=below)
    flow.add("WanCoreReport", report=decode_again["report"], space=300)


def mixed_with_native_nodes(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = add_loaders(flow, 0, TINY)
    flow.column("Text", STEP, WIDE)
    positive = flow.add(
        "CLIPTextEncode", title="Positive", clip=clip["clip"], text="a purple cross moving down on a yellow background"
    )
    negative = flow.add("CLIPTextEncode", title="Negative", clip=clip["clip"], text="")
    empty = flow.add(
        "EmptyHunyuanLatentVideo", width=SIZE["width"], height=SIZE["height"], length=SIZE["frames"], batch_size=1
    )
    flow.column("Text to video", 2 * STEP, WIDE)
    sampler = add_sampler(
        flow, model["model"], positive["CONDITIONING"], negative["CONDITIONING"], empty["LATENT"], seed=1
    )
    flow.column("Video", 3 * STEP, NARROW)
    decode = flow.add("VAEDecode", samples=sampler["latent"], vae=vae["vae"])
    add_video(flow, decode["IMAGE"], "WanCore/mixed_text")

    below = BELOW
    flow.column("Its model", 0, WIDE, y=below)
    second = flow.add("WanCoreModelLoader", high=TINY_I2V, low=TINY_I2V, space=180)
    flow.column("Its first frame", -500, 460, y=below)
    picture = add_drawing(flow, "purple", "yellow", left=34, top=4)
    flow.column("Image", STEP, WIDE, y=below)
    start = flow.add(
        "CLIPTextEncode", title="Positive", clip=clip["clip"], text="a purple square moving down on a yellow background"
    )
    known = flow.add(
        "WanImageToVideo",
        positive=start["CONDITIONING"],
        negative=negative["CONDITIONING"],
        vae=vae["vae"],
        width=SIZE["width"],
        height=SIZE["height"],
        length=SIZE["frames"],
        batch_size=1,
        start_image=picture["IMAGE"],
    )
    flow.column("Image to video", 2 * STEP, WIDE, y=below)
    again = add_sampler(flow, second["model"], known["positive"], known["negative"], known["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW, y=below)
    decode_again = flow.add("VAEDecode", samples=again["latent"], vae=vae["vae"])
    add_video(flow, decode_again["IMAGE"], "WanCore/mixed_image")


def fewer_forwards(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = add_loaders(flow, 0, TINY)
    flow.column("What to show", STEP, WIDE)
    caption = "an orange triangle moving left on a black background"
    text = add_prompt(flow, clip, caption)
    size = flow.add("WanCoreEmptyLatent", **SIZE)
    cache = flow.add("WanCoreMagCache", space=40)
    numbers: dict[str, Any] = {"model": model["model"], "steps": 40}
    encoded = {"positive": text["positive"], "negative": text["negative"], "latent": size["latent"], "seed": 1}
    flow.column("In full", 2 * STEP, WIDE)
    full = flow.add("WanCoreSampler", **numbers, **encoded, space=300)
    flow.column("Its video", 3 * STEP, NARROW)
    decode = add_decode(flow, vae, full)
    add_video(flow, decode["image"], "WanCore/full")
    flow.column("What is skipped", 3 * STEP + NARROW + 60, WIDE)
    flow.add("WanCorePlanPreview", **numbers, skipping=cache["skipping"], space=310)

    below = BELOW
    flow.column("With fewer forwards", 2 * STEP, WIDE, y=below)
    fewer = flow.add("WanCoreSampler", **numbers, **encoded, skipping=cache["skipping"], space=300)
    flow.column("Its video", 3 * STEP, NARROW, y=below)
    again = add_decode(flow, vae, fewer)
    add_video(flow, again["image"], "WanCore/fewer_forwards")
    flow.column("What it cost", 3 * STEP + NARROW + 60, WIDE, y=below)
    compared = flow.add("WanCoreCompare", full=decode["image"], other=again["image"], caption=caption, space=120)
    flow.add("PreviewImage", images=compared["image"], space=300)


def four_steps(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = add_loaders(flow, 0, TINY)
    flow.column("Four-step LoRAs", STEP, WIDE)
    lora = flow.add(
        "WanCoreLoRA",
        model=model["model"],
        high="tiny 4-step high (embedded)",
        low="tiny 4-step low (embedded)",
        space=100,
    )
    text = add_prompt(flow, clip, "a green cross moving down on a white background")
    size = flow.add("WanCoreEmptyLatent", **SIZE)
    flow.column("Sampling", 2 * STEP, WIDE)
    sampler = add_sampler(flow, lora["model"], text["positive"], text["negative"], size["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW)
    add_decoded_video(flow, vae, sampler, "WanCore/four_steps")
    flow.column("The steps", 3 * STEP + NARROW + 60, WIDE)
    flow.add("WanCorePlanPreview", model=lora["model"], space=310)


def video_to_video(flow: Workflow) -> None:
    add_note(flow)
    model, clip, vae = add_loaders(flow, 0, TINY)
    flow.column("A video", STEP, WIDE)
    text = add_prompt(flow, clip, "a red circle moving right on a blue background")
    size = flow.add("WanCoreEmptyLatent", **SIZE)
    flow.column("Sampling", 2 * STEP, WIDE)
    sampler = add_sampler(flow, model["model"], text["positive"], text["negative"], size["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW)
    decode = add_decode(flow, vae, sampler)
    add_video(flow, decode["image"], "WanCore/before")

    below = BELOW
    flow.column("What to make of it", STEP, WIDE, y=below)
    again = add_prompt(flow, clip, "an orange circle moving right on a blue background")
    encoded = flow.add("WanCoreVAEEncode", vae=vae["vae"], image=decode["image"])
    flow.column("Sampling from the video", 2 * STEP, WIDE, y=below)
    second = add_sampler(
        flow, model["model"], again["positive"], again["negative"], encoded["latent"], seed=2, denoise=0.6
    )
    flow.column("Its video", 3 * STEP, NARROW, y=below)
    add_decoded_video(flow, vae, second, "WanCore/after")


def multi_gpu(flow: Workflow) -> None:
    add_note(flow)
    flow.column("Workers", 0, WIDE)
    workers = flow.add("WanCoreLauncher", space=40)["workers"]
    model, clip, vae = add_loaders(flow, 0, TINY, y=360, workers=workers)
    flow.column("What to show", STEP, WIDE)
    text = add_prompt(flow, clip, "a white cross moving down on a purple background")
    size = flow.add("WanCoreEmptyLatent", **SIZE)
    flow.column("Sampling", 2 * STEP, WIDE)
    sampler = add_sampler(flow, model["model"], text["positive"], text["negative"], size["latent"], seed=1)
    flow.column("Video", 3 * STEP, NARROW)
    decode = add_decoded_video(flow, vae, sampler, "WanCore/multi_gpu")
    flow.column("What each part took", 3 * STEP + NARROW + 60, WIDE)
    flow.add("WanCoreReport", report=decode["report"], space=300)


DESCRIPTIONS: tuple[Callable[[Workflow], None], ...] = (
    text_to_video,
    image_to_video,
    image_to_video_wan21,
    embedded_demo,
    embedded_driven,
    mixed_with_native_nodes,
    fewer_forwards,
    four_steps,
    multi_gpu,
    video_to_video,
    wan22_image_to_video,
    wan22_text_to_video,
    wan22_first_last_frame,
    wan22_5b,
    wan22_animate_14b,
    wan22_animate_2,
    wan22_animate_2_loop,
    wan22_sound_to_video,
    wan21_vace_video_to_video,
    wan21_vace_inpainting,
    wan21_vace_outpainting,
    wan21_vace_reference,
    wan21_vace_first_last_frame,
    wan22_fun_control,
    wan22_fun_inpaint,
    wan22_fun_camera,
)


# ------------------------------------------------------------------------------------------------------------- writing


def make() -> dict[Path, str]:
    """File below `workflows/` -> what it should hold."""
    schemas, files = read_schemas(), {}
    for describe in DESCRIPTIONS:
        flow = Workflow(describe.__name__, schemas)
        describe(flow)
        for path, form in ((f"{title_of(flow.name)}.json", flow.page()), (f"api/{flow.name}.json", flow.api())):
            files[WORKFLOWS / path] = json.dumps(form, indent=1, ensure_ascii=False) + "\n"
    return files


def learn(address: str) -> None:
    """Ask a running ComfyUI for the schemas of those of its own nodes that are not described yet."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{address.rstrip('/')}/object_info", timeout=60) as answer:
        info: dict[str, Any] = json.load(answer)
    known = json.loads(NATIVE_SCHEMAS.read_text())
    schemas = {name: known.get(name) or native_schema(info[name]) for name in sorted(NATIVE)}
    rows = [f" {json.dumps(name)}: {json.dumps(schema)}" for name, schema in schemas.items()]
    NATIVE_SCHEMAS.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write workflows/ in the page's form and the API's.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not current")
    parser.add_argument("--native", metavar="URL", help="a running ComfyUI, to learn its own nodes from")
    options = parser.parse_args(argv)
    if options.native:
        learn(options.native)
    files = make()
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    stale += [path for path in sorted(WORKFLOWS.rglob("*.json")) if path not in files]
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    if options.check:
        if stale:
            print(f"not what the descriptions say: {names}. Run python tools/make_workflows.py", file=sys.stderr)
        return bool(stale)
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    print(f"wrote {names or 'nothing: all files are current'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
