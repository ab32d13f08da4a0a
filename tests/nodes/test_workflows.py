"""The shared workflows: consistent in themselves, the page's form and the API's the same graph, and in a real ComfyUI
each makes the videos its prompts ask for, with no file but the pack's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui import ComfyUI, find_comfyui, make_base, python_of
from tools.make_workflows import DESCRIPTIONS, LOOPS, NATIVE, main
from tools.page_form import (
    MATCHED,
    NATIVE_SCHEMAS,
    NOTE,
    WIDGETS,
    Workflow,
    extra_values,
    incompatibilities,
    native_schema,
    read_schemas,
    title_of,
)
from wan_core.media.video import read_video
from wan_lab.metrics import judge

WORKFLOWS = Path(__file__).resolve().parents[2] / "workflows"
HEADLESS = (WORKFLOWS.parent / "docs" / "headless.md").read_text(encoding="utf-8")
NAMES = sorted(path.stem for path in (WORKFLOWS / "api").glob("*.json"))
TEMPLATES = [name for name in NAMES if name.startswith(("wan21_", "wan22_"))]  # run in test_templates.py
DRIVEN = ["wan22_animate_14b", "wan22_animate_2", "wan22_animate_2_loop"]  # their nodes run in test_nodes_driven.py
NEED_FILES = ["image_to_video_wan21", *TEMPLATES]  # the first runs in test_nodes_wan21.py
EMBEDDED = [name for name in NAMES if name not in NEED_FILES]
SCHEMAS = read_schemas()
KINDS: dict[str, type | tuple[type, ...]] = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}
CONTROLS = ("fixed", "increment", "decrement", "randomize")


def page_form(name: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / f"{title_of(name)}.json").read_text(encoding="utf-8"))


def api_form(name: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


def widget_values(node: dict[str, Any]) -> dict[str, Any]:
    """What the page reads out of `widgets_values`, by position; after a seed stands what to do with it next, after an
    image to upload its kind."""
    values, found = list(node["widgets_values"]), {}
    for entry in SCHEMAS[node["type"]]["inputs"]:
        if entry["type"] in WIDGETS:
            found[entry["name"]] = values.pop(0)
            if entry.get("control_after_generate"):
                assert values.pop(0) in CONTROLS
            else:
                assert all(values.pop(0) == value for value in extra_values(entry))
    assert not values, f"{node['type']} {node['id']} has values left over: {values}"
    return found


def prompt_of(page: dict[str, Any]) -> dict[str, Any]:
    """The page's form as the page itself would send it."""
    sources = {link[0]: [str(link[1]), link[2]] for link in page["links"]}
    prompt = {}
    for node in page["nodes"]:
        if node["type"] == NOTE:
            continue
        inputs = widget_values(node)
        inputs |= {entry["name"]: sources[entry["link"]] for entry in node["inputs"] if entry["link"] is not None}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def on_cpu_workers(prompt: dict[str, Any]) -> dict[str, Any]:
    """With two workers on the CPU in place of those on GPUs."""
    for entry in prompt.values():
        if entry["class_type"] == "WanCoreLauncher":
            entry["inputs"]["devices"] = "cpu,cpu"
    return prompt


def caption_behind(prompt: dict[str, Any], node: str) -> str:
    """The positive prompt that a video was made from, found by going up its inputs; what is drawn, where a picture and
    a video say what it shows."""
    way = ("video", "images", "image", "samples", "latent", "positive")
    inputs = prompt[node]["inputs"]
    if prompt[node]["class_type"] == "WanCoreAnimate2":
        return "a green square moving right on a white background"
    if prompt[node]["class_type"] in ("CLIPTextEncode", "WanCoreTextEncode"):
        return inputs.get("positive", inputs.get("text"))
    if prompt[node]["class_type"] in ("WanCoreSampler", "WanCoreImageToVideo", "WanImageToVideo"):
        way = ("positive",)
    return caption_behind(prompt, next(inputs[name][0] for name in way if name in inputs))


def test_there_is_one_for_every_use() -> None:
    assert {"text_to_video", "image_to_video", "embedded_demo", "embedded_driven", "mixed_with_native_nodes"} <= set(
        NAMES
    )
    assert {path.stem for path in WORKFLOWS.glob("*.json")} == {title_of(name) for name in NAMES}
    assert {path.stem for path in WORKFLOWS.glob("*.jpg")} == {title_of(name) for name in NAMES}


def test_the_files_are_what_the_descriptions_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err
    assert {describe.__name__ for describe in DESCRIPTIONS} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_nodes_inputs_and_values_exist(name: str) -> None:
    page = page_form(name)
    for node in page["nodes"]:
        if node["type"] == NOTE:
            continue
        schema = SCHEMAS[node["type"]]
        names = sorted(entry["name"] for entry in schema["inputs"])
        assert sorted(entry["name"] for entry in node["inputs"]) == names
        for shown, out in zip(node["outputs"], schema["outputs"], strict=True):
            assert shown["name"] == out["name"] and out["type"] in (shown["type"], MATCHED)
        values = widget_values(node)
        for entry in schema["inputs"]:
            if entry["type"] == "COMBO" and "options" in entry:
                value, is_a_file = values[entry["name"]], str(values[entry["name"]]).endswith(".safetensors")
                listed = value in entry["options"] or (is_a_file and name in NEED_FILES)
                assert listed, f"{node['type']}.{entry['name']}"
            elif entry["type"] in KINDS:
                assert isinstance(values[entry["name"]], KINDS[entry["type"]]), f"{node['type']}.{entry['name']}"


@pytest.mark.parametrize("name", NAMES)
def test_links_are_consistent(name: str) -> None:
    page = page_form(name)
    nodes = {node["id"]: node for node in page["nodes"]}
    assert len(nodes) == len(page["nodes"]) and max(nodes) == page["last_node_id"]
    assert [link[0] for link in page["links"]] == list(range(1, page["last_link_id"] + 1))
    for number, source, slot, target, entry, kind in page["links"]:
        out, into = nodes[source]["outputs"][slot], nodes[target]["inputs"][entry]
        assert number in out["links"] and into["link"] == number
        assert out["type"] == kind and (kind in into["type"].split(",") or "*" in (kind, into["type"]))
        assert nodes[source]["order"] < nodes[target]["order"]
    ends = [entry["link"] for node in page["nodes"] for entry in node["inputs"] if entry["link"] is not None]
    starts = [link for node in page["nodes"] for out in node["outputs"] for link in out["links"] or []]
    assert sorted(ends) == sorted(starts) == [link[0] for link in page["links"]]


@pytest.mark.parametrize("name", NAMES)
def test_needed_sockets_are_connected(name: str) -> None:
    for node in page_form(name)["nodes"]:
        optional = {entry["name"]: entry["optional"] for entry in SCHEMAS.get(node["type"], {"inputs": []})["inputs"]}
        for entry in node["inputs"]:
            assert "widget" in entry or entry["link"] or optional[entry["name"]], f"{node['type']}.{entry['name']}"


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_are_one_graph(name: str) -> None:
    api = api_form(name)
    assert prompt_of(page_form(name)) == {
        key: {"class_type": node["class_type"], "inputs": node["inputs"]} for key, node in api.items()
    }


@pytest.mark.parametrize("name", NAMES)
def test_nothing_lies_on_anything_else(name: str) -> None:
    boxes = [(*node["pos"], *node["size"]) for node in page_form(name)["nodes"]]
    for index, (x, y, width, height) in enumerate(boxes):
        for left, top, wide, high in boxes[:index]:
            assert x >= left + wide or left >= x + width or y - 30 >= top + high or top - 30 >= y + height


@pytest.mark.parametrize("name", NAMES)
def test_groups_are_apart(name: str) -> None:
    boxes = [group["bounding"] for group in page_form(name)["groups"]]
    for index, (x, y, width, height) in enumerate(boxes):
        for left, top, wide, high in boxes[:index]:
            assert x >= left + wide or left >= x + width or y >= top + high or top >= y + height


@pytest.mark.parametrize("name", NAMES)
def test_a_note_says_which_files_go_where_and_the_video_is_saved(name: str) -> None:
    page = page_form(name)
    notes = " ".join(node["widgets_values"][0] for node in page["nodes"] if node["type"] == NOTE)
    assert "embedded" in notes
    alone = {
        "wan22_5b": "ti2v_5B",
        **dict.fromkeys([*DRIVEN, "embedded_driven", "image_to_video_wan21"], "clip_vision"),
    }
    one = "vace_14B" if "_vace_" in name else alone.get(name, "high_noise")
    needed = ["diffusion_models", "text_encoders", "vae", "umt5", one]
    assert name == "embedded_demo" or all(folder in notes for folder in needed)
    saved = [node for node in page["nodes"] if node["type"] == "SaveVideo"]
    made = [node for node in page["nodes"] if node["type"] in ("CreateVideo", "WanCoreDecodeToVideo")]
    assert saved and len(made) == len(saved)


@pytest.mark.parametrize("name", NAMES)
def test_videos_that_are_compared_keep_their_seed(name: str) -> None:
    """Each sampler would draw a seed of its own after the first run, and the next would compare different videos."""
    page = page_form(name)
    nodes = [node for node in page["nodes"] if node["type"] != NOTE]
    drawn = [node for node in nodes if any(entry["name"] == "seed" for entry in node["inputs"])]
    controls = {value for node in drawn for value in node["widgets_values"] if value in CONTROLS}
    assert controls == ({"fixed"} if any(node["type"] == "WanCoreCompare" for node in nodes) else {"randomize"})


def test_the_multi_gpu_workflow_takes_the_gpus_that_are_there() -> None:
    for prompt in (prompt_of(page_form("multi_gpu")), api_form("multi_gpu")):
        [launcher] = [entry for entry in prompt.values() if entry["class_type"] == "WanCoreLauncher"]
        assert launcher["inputs"]["devices"] == "auto"


def test_mistakes_in_a_description_are_told() -> None:
    flow = Workflow("wrong", SCHEMAS)
    flow.column("A", 0, 300)
    with pytest.raises(ValueError, match="has no input"):
        flow.add("EmptyImage", colour=1)
    with pytest.raises(ValueError, match="needs 'samples'"):
        flow.add("VAEDecode")
    with pytest.raises(KeyError, match="no output"):
        flow.add("EmptyImage")["LATENT"]


def test_what_a_newer_comfyui_changed_is_told() -> None:
    def schema(*inputs: tuple[Any, ...]) -> dict[str, Any]:
        names = ("name", "type", "optional", "options")
        return {"inputs": [dict(zip(names, entry, strict=False)) for entry in inputs], "outputs": []}

    old = schema(("video", "VIDEO", False), ("codec", "COMBO", False, ["auto", "h264"]))
    dynamic = ("codec", "COMFY_DYNAMICCOMBO_V3", False, [{"key": "auto"}, {"key": "h264"}])
    more = {"name": "audio", "type": "AUDIO", "optional": True}
    newer = schema(("video", "VIDEO", False), dynamic)
    assert incompatibilities(old, old) == []
    newer["inputs"].append(more)
    newer["outputs"].append({"name": "video", "type": "VIDEO"})
    assert incompatibilities(old, newer) == []
    more["optional"] = False
    assert incompatibilities(old, newer) == ["input audio is new and needed"]
    assert incompatibilities(old, schema(("video", "IMAGE", False), ("codec", "COMBO", False, ["auto"]))) == [
        "input video is IMAGE instead of VIDEO",
        "input codec has no option 'h264'",
    ]
    assert incompatibilities(old, schema(("video", "VIDEO", False))) == ["input codec is gone"]
    assert "order" in incompatibilities(old, schema(dynamic, ("video", "VIDEO", False)))[0]
    parts = schema(("codec", "COMBO", False, ["auto"]), ("codec.level", "INT", False), ("values.a", "INT", False))
    assert incompatibilities(parts, schema(dynamic, ("values", "COMFY_AUTOGROW_V3", False))) == []
    assert incompatibilities(parts, schema(dynamic)) == ["input values.a is gone"]
    any_type, matched = ({"inputs": [], "outputs": [{"name": "value", "type": kind}]} for kind in ("*", MATCHED))
    assert incompatibilities(any_type, matched) == [] and incompatibilities(matched, any_type)


def test_the_page_on_headless_use_names_nodes_and_files_that_exist() -> None:
    prompt = api_form("text_to_video")
    named = re.findall(r'\.\["(\d+)"\]\.inputs\.(\w+) =', HEADLESS)
    assert named and all(field in prompt[node]["inputs"] for node, field in named)
    assert set(re.findall(r"workflows/api/(\w+)\.json", HEADLESS)) <= set(NAMES)


# ---------------------------------------------------------------------------------------------------- in a real ComfyUI


@pytest.fixture(scope="module")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """A fresh installation: no model, no picture, nothing but the pack."""
    server = ComfyUI(find_comfyui(), make_base(tmp_path_factory.mktemp("comfyui")))
    yield server
    server.stop()


@pytest.mark.comfy
@pytest.mark.parametrize("name", EMBEDDED)
def test_it_runs_and_every_caption_comes_true(comfy: ComfyUI, name: str) -> None:
    prompt = on_cpu_workers(api_form(name))
    run = comfy.run(prompt)
    assert run.ok, run.status
    saved = [key for key, node in prompt.items() if node["class_type"] == "SaveVideo"]
    for key in saved:
        video, caption = comfy.output_file(run, key), caption_behind(prompt, key)
        frames = torch.from_numpy(read_video(video))
        assert frames.shape == (17, 96, 96, 3)
        verdict = judge(frames, caption)
        assert verdict.all_true, f"{video.name}: {caption}: {verdict}"


@pytest.mark.comfy
def test_comfyuis_own_nodes_take_what_the_workflows_give_them(comfy: ComfyUI) -> None:
    info, described = comfy.get("/object_info"), json.loads(NATIVE_SCHEMAS.read_text())
    there = [name for name in NATIVE if name in info]
    assert set(described) == set(NATIVE) and set(NATIVE) - set(there) <= set(LOOPS)
    assert {name: incompatibilities(described[name], native_schema(info[name])) for name in there} == {
        name: [] for name in there
    }


@pytest.mark.comfy
def test_the_template_browser_shows_them(comfy: ComfyUI) -> None:
    packs = comfy.get("/api/workflow_templates")
    assert sorted(packs["wancore"]) == sorted(title_of(name) for name in NAMES)


@pytest.mark.comfy
def test_the_python_of_the_page_on_headless_use(comfy: ComfyUI, tmp_path: Path) -> None:
    """As it stands there, with a Python that has what ComfyUI's has."""
    [source] = re.findall(r"```python\n(.*?)```", HEADLESS, re.DOTALL)
    (tmp_path / "generate.py").write_text(source, encoding="utf-8")
    caption = "a purple cross moving left on a white background"
    command = [python_of(find_comfyui()), "generate.py", str(WORKFLOWS / "api" / "text_to_video.json"), caption, "7"]
    environment = {**os.environ, "COMFYUI": f"http://127.0.0.1:{comfy.port}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "WanCoreSampler\n" in done.stdout and "  20 of 20\n" in done.stdout
    assert "step 20 of 20, low-noise expert" in done.stdout and (tmp_path / "preview.jpg").is_file()
    [video] = tmp_path.glob("*.mp4")
    assert judge(torch.from_numpy(read_video(video)), caption).all_true

    wrong = api_form("text_to_video")
    wrong["6"]["inputs"]["frames"] = 18
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    command[2:] = ["wrong.json"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "18 frames given" in done.stdout
