"""The node pack in a running ComfyUI, driven through its API: what a page sends is what these tests send."""

from __future__ import annotations

import io
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.comfyui import ComfyUI, Refused, Run, find_comfyui, interrupted, make_base
from tests.nodes.comfy_files import BROKEN, FAULTS, assert_comes_true, broken_libraries, make_files
from tools.embedded_graphs import (
    CAPTION,
    SMALL,
    TINY_I2V,
    image_to_video,
    loaders,
    node,
    small,
    text_to_video,
)
from tools.processes import State, hidden, look, memory_of, wait_until
from wan_core.media.video import read_video

pytestmark = pytest.mark.comfy

SCHEMAS = Path(__file__).parent / "node_schemas.json"


PACKS = {"faults": FAULTS}


@pytest.fixture(scope="module")
def files(base: Path) -> dict[str, str]:
    make_files(base)
    return broken_libraries(base)


def count(server: ComfyUI, text: str) -> int:
    return server.log().count(text)


# --------------------------------------------------------------------------------------------------------------- tests


def test_all_nodes_register_without_a_warning(comfy: ComfyUI) -> None:
    log = comfy.log()
    start = log[log.index("Import times") :]
    assert "wancore" in start and "IMPORT FAILED" not in log and "Traceback" not in log
    assert not [line for line in log.splitlines() if "warning" in line.lower() and "wan" in line.lower()]
    info = comfy.get("/object_info")
    assert {name for name in info if name.startswith("WanCore")} == set(json.loads(SCHEMAS.read_text()))


def test_a_broken_optional_library_costs_one_line_at_most(comfy: ComfyUI) -> None:
    assert comfy.run(small(seed=31)).ok
    for name in BROKEN:
        assert count(comfy, f"{name} is broken") <= 1


def test_text_to_video_with_preview_progress_plan_and_report(comfy: ComfyUI) -> None:
    graph = text_to_video()
    graph["model"]["inputs"]["precision"] = "fp32"  # no other test's loader: what is cached says nothing again
    graph["plan"] = node("WanCorePlanPreview", model=["model", 0])
    graph["report"] = node("WanCoreReport", report=["decode", 1])
    graph["table"] = node("PreviewAny", source=["plan", 1])
    graph["words"] = node("PreviewAny", source=["report", 1])
    run = comfy.watch(graph)
    assert run.ok, run.status
    frames = read_video(comfy.output_file(run, "save"))
    assert frames.shape == (17, 96, 96, 3)
    assert_comes_true(comfy.output_file(run, "save"))

    steps = [e["data"]["value"] for e in run.events if e["type"] == "progress" and e["data"]["node"] == "sampler"]
    assert steps == list(range(1, 21))
    decoded = [e["data"]["value"] for e in run.events if e["type"] == "progress" and e["data"]["node"] == "decode"]
    assert decoded[-1] == 17 and len(decoded) > 1
    pictures = [Image.open(io.BytesIO(e["data"])) for e in run.events if e["type"] == "preview"]
    assert len(pictures) == 20
    assert np.asarray(pictures[-1]).std() > 1
    said = [e["data"] for e in run.events if e["type"] == "text" and e["node"] == "sampler"]
    assert any("step 19 of 20, low-noise expert" in text and "left" in text for text in said)
    assert "t2v-tiny: two experts" in run.outputs["model"]["text"][0]
    assert "t2v-tiny: 20 steps" in run.outputs["sampler"]["text"][0]

    for drawn in ("plan", "report"):
        picture = Image.open(comfy.output_file(run, drawn))
        assert picture.width == 960 and len(picture.getcolors(1 << 20)) > 20
    table, report = (run.outputs[key]["text"][0] for key in ("table", "words"))
    assert "boundary 875: high -> low" in table and table.count("\n") >= 21
    assert all(phase in report for phase in ("text", "denoise high", "denoise low", "decode", "seed: 1", "t2v_high"))


def test_a_plan_has_the_settings_of_the_sampler(comfy: ComfyUI) -> None:
    """Through a node of one value too; of two samplers with other settings, those of the one with the same latent; the
    model's own where no sampler takes the model."""
    graph = small(steps=["three", 0], solver="euler", shift=4.0)
    graph["three"] = node("PrimitiveInt", value=3)
    graph["plan"] = node("WanCorePlanPreview", model=["model", 0])
    run = comfy.run(graph)
    assert run.ok, run.status
    assert "3 steps" in run.outputs["plan"]["text"][0]

    second = {**graph["sampler"]["inputs"], "steps": 5, "latent": ["other", 0]}
    graph |= {"other": graph["size"], "second": {**graph["sampler"], "inputs": second}}
    graph["kept"] = node("SaveLatent", samples=["second", 0], filename_prefix="second")
    run = comfy.run(graph)
    assert not run.ok and "with different settings" in str(run.status)
    graph["plan"]["inputs"]["latent"] = ["other", 0]
    run = comfy.run(graph)
    assert run.ok and "5 steps" in run.outputs["plan"]["text"][0]
    run = comfy.run({"model": graph["model"], "plan": node("WanCorePlanPreview", model=["model", 0])})
    assert run.ok and "20 steps" in run.outputs["plan"]["text"][0]


def test_mixed_with_native_nodes(comfy: ComfyUI) -> None:
    """Text encode, image conditioning and decode by ComfyUI's own nodes around our sampler."""
    graph = image_to_video()
    graph["text"] = node("CLIPTextEncode", clip=["encoder", 0], text=CAPTION)
    graph["nothing"] = node("CLIPTextEncode", clip=["encoder", 0], text="")
    graph["size"] = node(
        "WanImageToVideo",
        positive=["text", 0],
        negative=["nothing", 0],
        vae=["vae", 0],
        width=96,
        height=96,
        length=17,
        batch_size=1,
        start_image=["picture", 0],
    )
    graph["decode"] = node("VAEDecode", vae=["vae", 0], samples=["sampler", 0])
    run = comfy.run(graph)
    assert run.ok, run.status
    assert_comes_true(comfy.output_file(run, "save"))


def test_native_conditioning_is_the_same_as_ours(comfy: ComfyUI) -> None:
    """A first and a last frame through WanFirstLastFrameToVideo and through ours: the same pictures."""
    graph = image_to_video()
    graph["size"]["inputs"] |= SMALL
    graph["sampler"]["inputs"] |= {"steps": 2}
    graph["save"] = node("SaveImage", images=["decode", 0], filename_prefix="same")
    graph["scaled"] = node(
        "ImageScale", image=["picture", 0], upscale_method="area", width=48, height=48, crop="disabled"
    )
    graph["size"]["inputs"] |= {"first_image": ["scaled", 0], "last_image": ["scaled", 0]}
    ours = comfy.run(graph)
    ends = {name: graph["size"]["inputs"].pop(name) for name in ("first_image", "last_image")}
    graph["both"] = node("ImageBatch", image1=["scaled", 0], image2=["scaled", 0])
    graph["size"]["inputs"] |= {"keyframes": ["both", 0], "keyframe_numbers": "0, 4"}
    assert_same_pictures(comfy, ours, comfy.run(graph))
    graph["size"]["inputs"] |= ends
    assert "frame 0 is known twice" in str(comfy.run(graph).status)
    graph["size"] = node(
        "WanFirstLastFrameToVideo",
        positive=["text", 0],
        negative=["text", 1],
        vae=["vae", 0],
        width=48,
        height=48,
        length=5,
        batch_size=1,
        start_image=["scaled", 0],
        end_image=["scaled", 0],
    )
    graph["decode"] = node("VAEDecodeTiled", vae=["vae", 0], samples=["sampler", 0], **TILES)
    theirs = comfy.run(graph)
    assert ours.ok and theirs.ok, (ours.status, theirs.status)
    assert_same_pictures(comfy, ours, theirs)


TILES = {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}


def test_one_transformer_with_a_known_first_frame_and_the_native_node_for_it(comfy: ComfyUI) -> None:
    """TI2V-5B: our image node and Wan22ImageToVideoLatent give the same pictures."""
    size = {"width": 64, "height": 64}
    graph = image_to_video() | {"model": loaders("ti2v.safetensors", "none")["model"]}
    graph["vae"] = node("WanCoreVAELoader", vae="ti2v.safetensors", precision="auto")
    graph["size"]["inputs"] |= {**size, "frames": 5, "first_image": ["scaled", 0]}
    graph["scaled"] = node("ImageScale", image=["picture", 0], upscale_method="area", crop="disabled", **size)
    graph["sampler"]["inputs"] |= {"steps": 2}
    graph["save"] = node("SaveImage", images=["decode", 0], filename_prefix="same")
    ours = comfy.run(graph)
    graph["size"] = node(
        "Wan22ImageToVideoLatent", vae=["vae", 0], length=5, batch_size=1, start_image=["scaled", 0], **size
    )
    graph["sampler"]["inputs"] |= {"positive": ["text", 0], "negative": ["text", 1], "latent": ["size", 0]}
    theirs = comfy.run(graph)
    assert ours.ok and theirs.ok, (ours.status, theirs.status)
    assert "one transformer for every step" in ours.outputs["model"]["text"][0]
    assert_same_pictures(comfy, ours, theirs)
    graph["size"]["inputs"].pop("start_image")
    assert comfy.run(graph).ok, "without an image it is text to video"


def assert_same_pictures(comfy: ComfyUI, ours: Run, theirs: Run) -> None:
    for index in range(5):
        a, b = (np.asarray(Image.open(comfy.output_file(run, "save", index)), dtype=int) for run in (ours, theirs))
        assert np.abs(a - b).max() <= 1
        assert a.std() > 0


@pytest.mark.parametrize(
    ("where", "inputs", "message"),
    [
        ("size", {"width": 100}, "The nearest is 96x48"),
        ("size", {"frames": 18}, "4n + 1"),
        ("size", {"width": 16384}, "from 16 to 8192"),
        ("size", {"latent_type": "another"}, "another"),
        ("model", {"high": "broken.safetensors"}, "broken.safetensors"),
        ("model", {"high": TINY_I2V}, "the experts differ"),
        ("model", {"attention": "cudnn"}, "NVIDIA"),
        ("model", {"low": "gone.safetensors"}, "gone.safetensors"),
        ("model", {"high": "/etc/passwd"}, "is not a model in"),
        ("model", {"low": "../vae/../../input/first.png"}, "is not a model in"),
        ("encoder", {"text_encoder": "/etc/passwd"}, "is not a model in"),
        ("vae", {"vae": "../../input/first.png"}, "is not a model in"),
        ("model", {"precision": "fp16"}, "fp16"),
        ("vae", {"vae": "gone.safetensors"}, "gone.safetensors"),
        ("sampler", {"steps": 5000}, "5000"),
        ("sampler", {"boundary": 1.5}, "1.5"),
        ("sampler", {"solver": "ddim"}, "ddim"),
    ],
)
def test_bad_input_is_refused_at_its_node(comfy: ComfyUI, where: str, inputs: dict[str, Any], message: str) -> None:
    if message == "ddim" and not comfy.get("/object_info")["WanCoreFromModel"].get("search_aliases"):
        pytest.skip("this ComfyUI compares no lists: the sampler refuses it when it runs")
    graph = small()
    graph[where]["inputs"] |= inputs
    with pytest.raises(Refused) as refused:
        comfy.queue(graph)
    assert set(refused.value.errors) == {where}
    errors = refused.value.errors[where]["errors"]
    assert len(errors) == 1, "one bad value is one error"
    assert message in errors[0]["details"] + errors[0]["message"]


def test_interruption_takes_effect_within_a_step_and_the_next_prompt_works(comfy: ComfyUI) -> None:
    assert interrupted(comfy, small(steps=1000, seed=77, solver="euler")) < 200  # it was on its way for some steps
    assert comfy.run(small(seed=78)).ok


def test_many_prompts_load_once_and_leave_nothing(comfy: ComfyUI) -> None:
    """Every fifth is interrupted. Memory, open files, threads and partial files stay as they were."""
    assert comfy.run(small(seed=1000)).ok
    pid, early = comfy.process.pid, State(Counter(), 0)
    loads, memory = count(comfy, "WanCore loaded"), []
    encoded = count(comfy, "WanCore encoded the text")
    for seed in range(25):
        graph = small(seed=seed)
        graph["text"]["inputs"]["positive"] = CAPTION if seed % 2 else "a green star moving up on a white background"
        assert comfy.run(graph).ok
        if seed % 5 == 4:
            interrupted(comfy, small(steps=1000, seed=1000 + seed, solver="euler"))
        early = look(pid) if seed == 9 else early
        memory.append(memory_of(comfy.process.pid))
    assert count(comfy, "WanCore loaded") == loads
    assert count(comfy, "WanCore encoded the text") == encoded + 1  # the star, once; everything else was known
    assert memory[-1] - memory[4] < 24 * 2**20, memory
    wait_until(lambda: look(pid).threads <= early.threads, 10, "threads are left over")
    wait_until(lambda: look(pid).files.total() <= early.files.total(), 10, "open files are left over")
    assert not hidden(comfy.base)


def test_out_of_memory_in_decode_leaves_the_latents_usable(comfy: ComfyUI) -> None:
    graph = small(seed=4711)
    graph["short"] = node("ShortOfMemory", vae=["vae", 0], always=True)
    graph["decode"]["inputs"]["vae"] = ["short", 0]
    failed = comfy.run(graph)
    error = failed.message("execution_error")
    assert error["node_id"] == "decode" and "no memory left" in error["exception_message"]
    graph["short"]["inputs"]["always"] = False
    run = comfy.run(graph)
    assert run.ok and "sampler" in run.cached
    assert read_video(comfy.output_file(run, "save")).shape == (5, 48, 48, 3)


LARGE = 128 * 2**20  # bytes; large.safetensors takes twice that in fp32


def test_free_gives_memory_back_and_models_return_when_used(comfy: ComfyUI) -> None:
    graph = small(seed=5)
    graph |= {"model": loaders("large.safetensors", "none")["model"]}
    before = memory_of(comfy.process.pid)
    assert comfy.run(graph).ok
    loaded = memory_of(comfy.process.pid)
    assert loaded - before > LARGE
    deadline = time.monotonic() + 30
    while memory_of(comfy.process.pid) > loaded - LARGE and time.monotonic() < deadline:
        comfy.post("/free", {"unload_models": True})  # again: it hears nothing while it cleans up after a prompt
        time.sleep(0.2)
    assert loaded - memory_of(comfy.process.pid) > LARGE
    loads = count(comfy, "WanCore loaded the transformer")
    graph["sampler"]["inputs"]["seed"] = 6
    assert comfy.run(graph).ok
    assert count(comfy, "WanCore loaded the transformer") == loads + 1
    comfy.post("/free", {"unload_models": True, "free_memory": True})


def test_an_expert_that_streams_makes_the_same_video(comfy: ComfyUI) -> None:
    videos = []
    for residency in ("resident", "stream"):
        graph = small(seed=11)
        graph["model"]["inputs"]["residency"] = residency
        before = len(comfy.log())
        run = comfy.run(graph)
        assert run.ok, run.status
        log = comfy.log()[before:]
        assert ("WanCore streams the high-noise expert:" in log) == (residency == "stream"), log
        videos.append(read_video(comfy.output_file(run, "save")))
    assert (videos[0] == videos[1]).all()
    comfy.post("/free", {"unload_models": True, "free_memory": True})
    again = comfy.run(small(seed=12) | {"model": graph["model"]})
    assert again.ok, again.status


def test_the_oldest_comfyui_that_the_pack_names(tmp_path: Path) -> None:
    checkout = find_comfyui("~/comfy/ComfyUI-0.3.64", "COMFYUI_OLD_PATH")
    server = ComfyUI(checkout, make_base(tmp_path))
    try:
        info = server.get("/object_info")
        assert {name for name in info if name.startswith("WanCore")} == set(json.loads(SCHEMAS.read_text()))
        assert "IMPORT FAILED" not in server.log() and "Traceback" not in server.log()
        run = server.run(small())
        assert run.ok, run.status
        assert read_video(server.output_file(run, "save")).shape == (5, 48, 48, 3)
    finally:
        server.stop()
