"""The workflows: whole as ComfyUI's page saved them, their API form up to date, and in a real ComfyUI each makes the
videos that its prompts ask for, with no file but the pack's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui import ComfyUI, find_comfyui, make_base, python_of
from tools.workflows import NATIVE_SCHEMAS, ROOT, WORKFLOWS, Schema, main, native_schema, pages, read_schemas
from wan_core.media.video import read_video
from wan_lab.metrics import judge

HEADLESS = (ROOT / "docs" / "headless.md").read_text(encoding="utf-8")
PAGES = pages()
TEMPLATES = [name for name in PAGES if name.startswith(("wan21_", "wan22_"))]  # run in test_templates.py
DRIVEN = ["wan22_animate_14b", "wan22_animate_2", "wan22_animate_2_loop"]  # their nodes run in test_nodes_driven.py
NEED_FILES = ["image_to_video_wan21", *TEMPLATES]  # the first runs in test_nodes_wan21.py
EMBEDDED = [name for name in PAGES if name not in NEED_FILES]
SCHEMAS = read_schemas()
WIDGETS = ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")  # anything else is a socket
KINDS: dict[str, type | tuple[type, ...]] = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}
CONTROLS = ("fixed", "increment", "decrement", "randomize")
NOTE = "MarkdownNote"  # exists in the page only
LOOPS = {"StartLoop", "EndLoop", "ComfyMathExpression", "GetImageSize", "PrimitiveInt"}  # in ComfyUI from 0.36 on
MATCHED, DYNAMIC_COMBO, AUTOGROW = "COMFY_MATCHTYPE_V3", "COMFY_DYNAMICCOMBO_V3", "COMFY_AUTOGROW_V3"
TITLE, MARGIN = 30, 16  # pixels of the page: above a node, around a note's text
NOTE_LETTERS = 88  # of a line in a note


def page_form(name: str) -> dict[str, Any]:
    return json.loads(PAGES[name].read_text(encoding="utf-8"))


def api_form(name: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


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


# ---------------------------------------------------------------------------------------------------- as they are saved


def test_there_is_one_for_every_use() -> None:
    assert {"text_to_video", "image_to_video", "embedded_demo", "mixed_with_native_nodes", "multi_gpu"} <= PAGES.keys()
    assert {path.stem for path in WORKFLOWS.glob("*.jpg")} == {path.stem for path in PAGES.values()}
    assert len({page_form(name)["id"] for name in PAGES}) == len(PAGES)


def test_the_api_forms_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def check_nodes(page: dict[str, Any]) -> None:
    """Every node has the inputs and outputs of its schema, or those before it got more, and as many saved values as the
    page reads: after a seed stands what to do with it next, after a file to upload what the page keeps of it."""
    for node in page["nodes"]:
        if node["type"] == NOTE:
            continue
        schema = SCHEMAS[node["type"]]
        entries, known = {entry["name"]: entry for entry in schema["inputs"]}, [one["name"] for one in node["inputs"]]
        assert known == sorted(known, key=lambda name: (entries[name]["type"] in WIDGETS, [*entries].index(name)))
        assert all(name in known or entry["optional"] for name, entry in entries.items()), node["type"]
        for shown in node["inputs"]:
            connected = shown["link"] is not None or "widget" in shown or entries[shown["name"]]["optional"]
            assert connected, f"{node['type']}.{shown['name']} needs a link"
        for shown, out in zip(node["outputs"], schema["outputs"], strict=True):
            assert shown["name"] == out["name"] and out["type"] in (shown["type"], MATCHED)
        widgets = [entries[shown["name"]] for shown in node["inputs"] if "widget" in shown]
        extra = sum(1 for one in widgets if one.get("control_after_generate") or one.get("image_upload"))
        extra += 2 * sum(1 for one in widgets if one.get("audio_upload"))
        assert len(node["widgets_values"]) == len(widgets) + extra, node["type"]
        assert node["properties"]["cnr_id"] == ("wancore" if node["type"].startswith("WanCore") else "comfy-core")


def check_links(page: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in page["nodes"]}
    assert len(nodes) == len(page["nodes"]) and max(nodes) == page["last_node_id"]
    for number, source, slot, target, entry, kind in page["links"]:
        out, into = nodes[source]["outputs"][slot], nodes[target]["inputs"][entry]
        assert number in out["links"] and into["link"] == number
        assert out["type"] == kind and (kind in into["type"].split(",") or "*" in (kind, into["type"]))
        assert nodes[source]["order"] < nodes[target]["order"]
    ends = [entry["link"] for node in page["nodes"] for entry in node["inputs"] if entry["link"] is not None]
    starts = [link for node in page["nodes"] for out in node["outputs"] for link in out["links"] or []]
    assert sorted(ends) == sorted(starts) == sorted(link[0] for link in page["links"])


def check_layout(page: dict[str, Any]) -> None:
    """Nothing lies on anything else."""
    nodes = [(*node["pos"], *node["size"], TITLE) for node in page["nodes"]]
    for boxes in (nodes, [(*group["bounding"], 0) for group in page["groups"]]):
        for (x, y, width, height, above), (left, top, wide, high, _) in combinations(boxes, 2):
            apart = x >= left + wide or left >= x + width
            assert apart or y - above >= top + high or top - above >= y + height, (x, y, left, top)


def check_notes(name: str, page: dict[str, Any]) -> None:
    """The notes say which files go where. Nodes 2.0 draws code dark on dark and cuts wide tables off; a note is as high
    as its text needs in the renderer that takes more room."""
    notes = {node["widgets_values"][0]: node for node in page["nodes"] if node["type"] == NOTE}
    for text, node in notes.items():
        assert "`" not in text and not re.search(r"^\|", text, re.MULTILINE)
        heights = [12 if not line else 40 if line[0] == "#" else 20 * -(-len(line) // NOTE_LETTERS)
                   for line in text.splitlines()]  # fmt: skip
        assert node["size"][1] >= sum(heights) + 2 * MARGIN
    alone = {
        "wan22_5b": "ti2v_5B",
        **dict.fromkeys([*DRIVEN, "embedded_driven", "image_to_video_wan21"], "clip_vision"),
    }
    one = "vace_14B" if "_vace_" in name else alone.get(name, "high_noise")
    folders = [] if name == "embedded_demo" else ["diffusion_models", "text_encoders", "vae", "umt5", one]
    assert all(word in " ".join(notes) for word in ["embedded", *folders])


def check_seeds(page: dict[str, Any]) -> None:
    """Each sampler would draw a seed of its own after the first run: where videos are compared, seeds stay."""
    nodes = [node for node in page["nodes"] if node["type"] != NOTE]
    drawn = [node for node in nodes if any(entry["name"] == "seed" for entry in node["inputs"])]
    controls = {value for node in drawn for value in node["widgets_values"] if value in CONTROLS}
    assert controls == ({"fixed"} if any(node["type"] == "WanCoreCompare" for node in nodes) else {"randomize"})


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_whole(name: str) -> None:
    page = page_form(name)
    check_nodes(page)
    check_links(page)
    check_layout(page)
    check_notes(name, page)
    check_seeds(page)


@pytest.mark.parametrize("name", PAGES)
def test_the_values_are_allowed_and_every_video_is_saved(name: str) -> None:
    graph = api_form(name)
    for node in graph.values():
        for entry in SCHEMAS[node["class_type"]]["inputs"]:
            if entry["name"] not in node["inputs"]:
                assert entry["optional"], f"{node['class_type']}.{entry['name']}"
                continue
            value, kind = node["inputs"][entry["name"]], entry["type"]
            if isinstance(value, list):
                assert value[0] in graph and value[1] < len(SCHEMAS[graph[value[0]]["class_type"]]["outputs"])
            elif "options" in entry:
                is_a_file = name in NEED_FILES and str(value).endswith(".safetensors")
                assert value in entry["options"] or is_a_file, f"{node['class_type']}.{entry['name']}"
            elif kind in KINDS:
                assert isinstance(value, KINDS[kind]), f"{node['class_type']}.{entry['name']}"
    kinds = [node["class_type"] for node in graph.values()]
    assert 0 < kinds.count("SaveVideo") == kinds.count("CreateVideo") + kinds.count("WanCoreDecodeToVideo")


def test_the_multi_gpu_workflow_takes_the_gpus_that_are_there() -> None:
    [launcher] = [node for node in api_form("multi_gpu").values() if node["class_type"] == "WanCoreLauncher"]
    assert launcher["inputs"]["devices"] == "auto"


def incompatibilities(described: Schema, running: Schema) -> list[str]:
    """What keeps a graph made for the node `described` from running in a ComfyUI where it is `running`, in words."""
    now = {entry["name"]: entry for entry in running["inputs"]}
    grown = {name for name, entry in now.items() if entry["type"] in (DYNAMIC_COMBO, AUTOGROW)}
    own = [
        entry
        for entry in described["inputs"]
        if entry["name"].partition(".")[0] not in grown or "." not in entry["name"]
    ]
    names = [entry["name"] for entry in own]
    faults = [f"input {name} is gone" for name in names if name not in now]
    faults += [f"input {name} is new and needed" for name, entry in now.items()
               if name not in names and not entry["optional"] and entry["type"] != AUTOGROW]  # fmt: skip
    if [name for name in now if name in names] != [name for name in names if name in now]:
        faults.append(f"the order of the inputs is {list(now)} instead of {names}")
    for entry in own:
        faults += changes(entry, now[entry["name"]]) if entry["name"] in now else []
    outputs = zip(described["outputs"], running["outputs"], strict=False)
    same = len(running["outputs"]) >= len(described["outputs"])
    if not same or any(
        one["name"] != other["name"] or one["type"] not in ("*", other["type"]) for one, other in outputs
    ):
        faults.append(f"the outputs are {running['outputs']} instead of {described['outputs']}")
    return faults


def changes(entry: Schema, now: Schema) -> list[str]:
    name, kind = entry["name"], now["type"]
    if kind != entry["type"] and (entry["type"], kind) != ("COMBO", DYNAMIC_COMBO):
        return [f"input {name} is {kind} instead of {entry['type']}"]
    options = [option["key"] if kind == DYNAMIC_COMBO else option for option in now.get("options", [])]
    return [f"input {name} has no option {option!r}" for option in entry.get("options", []) if option not in options]


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
    assert set(re.findall(r"workflows/api/(\w+)\.json", HEADLESS)) <= PAGES.keys()


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
    there = [name for name in described if name in info]
    assert set(described) - set(there) <= LOOPS
    assert {name: incompatibilities(described[name], native_schema(info[name])) for name in there} == {
        name: [] for name in there
    }


@pytest.mark.comfy
def test_the_template_browser_shows_them(comfy: ComfyUI) -> None:
    packs = comfy.get("/api/workflow_templates")
    assert sorted(packs["wancore"]) == sorted(path.stem for path in PAGES.values())


@pytest.mark.comfy
def test_the_python_of_the_page_on_headless_use(comfy: ComfyUI, tmp_path: Path) -> None:
    """The page's program runs unchanged, in ComfyUI's Python."""
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
