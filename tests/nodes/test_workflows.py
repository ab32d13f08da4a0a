"""The workflows: whole as ComfyUI's page saved them, what is derived from them up to date, every file that they name
with an address. In a real ComfyUI those of the embedded model make the videos that their prompts ask for, with no file
but the pack's own, and the others run on tiny random weights."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui import ComfyUI, find_comfyui, make_base, python_of, serving
from tools.workflows import (
    BLUEPRINTS,
    NATIVE_SCHEMAS,
    ROOT,
    TITLE,
    WORKFLOWS,
    Schema,
    all_nodes,
    files_of,
    known_files,
    main,
    native_schema,
    pages,
    read_schemas,
)
from wan_core.media.video import read_video
from wan_lab.metrics import judge

HEADLESS = (ROOT / "docs" / "headless.md").read_text(encoding="utf-8")
PAGES = pages()
TITLES = {name: path.stem for name, path in PAGES.items() if path.parent == WORKFLOWS}  # those of the browser
SCHEMAS = read_schemas()
WIDGETS = ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")  # anything else is a socket
KINDS: dict[str, type | tuple[type, ...]] = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}
CONTROLS = ("fixed", "increment", "decrement", "randomize")
NOTE = "MarkdownNote"  # exists in the page only
LOOPS = {"StartLoop", "EndLoop", "ComfyMathExpression", "GetImageSize", "PrimitiveInt"}  # in ComfyUI from 0.36 on
MATCHED, DYNAMIC_COMBO, AUTOGROW = "COMFY_MATCHTYPE_V3", "COMFY_DYNAMICCOMBO_V3", "COMFY_AUTOGROW_V3"
ABOVE, MARGIN = 30, 16  # pixels of the page: above a node, around a note's text
LETTER = 5.9  # pixels of one in a note
FITTED = 20  # pixels that the page adds to the nodes' bounds where it fits them
SIDEBAR, BARS = 60, 100  # pixels of the page that its bars take, on the left and on top
TEXT = 8 / 14  # scale at which letters have the page's smallest size (LiteGraph.Canvas.MinFontSizeForLOD)
INSIDE, OUTSIDE = -10, -20  # the ends of a subgraph


def page_form(name: str) -> dict[str, Any]:
    return json.loads(PAGES[name].read_text(encoding="utf-8"))


def api_form(name: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


EMBEDDED = [name for name in PAGES if '"tiny' in json.dumps(api_form(name))]
NEED_FILES = [name for name in PAGES if name not in EMBEDDED]
BOXES = [name for name in TITLES if name in NEED_FILES]


def graphs(page: dict[str, Any]) -> list[dict[str, Any]]:
    """The workflow and its subgraphs."""
    return [page, *page.get("definitions", {}).get("subgraphs", [])]


def notes_of(page: dict[str, Any]) -> list[str]:
    return [node["widgets_values"][0] for node in page["nodes"] if node["type"] == NOTE]


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
    if prompt[node]["class_type"] == "WanCorePromptsOverTime":
        return inputs["prompts"]
    if prompt[node]["class_type"] in ("CLIPTextEncode", "WanCoreTextEncode"):
        return inputs.get("positive", inputs.get("text"))
    if prompt[node]["class_type"] in ("WanCoreSampler", "WanCoreImageToVideo", "WanImageToVideo"):
        way = ("positive",)
    return caption_behind(prompt, next(inputs[name][0] for name in way if name in inputs))


def captions_of(text: str) -> list[tuple[int, int | None, str]]:
    """Frames, and what they show: one caption, or that of each line of prompts over time, away from their borders."""
    lines = [line.partition(":") for line in text.splitlines()]
    if not lines[0][1]:
        return [(0, None, text)]
    starts = [int(number) for number, _, _ in lines]
    ends = [*starts[1:], None]
    return [
        (start and start + 4, None if end is None else end - 3, caption.strip())
        for start, end, (_, _, caption) in zip(starts, ends, lines, strict=True)
    ]


# ---------------------------------------------------------------------------------------------------- as they are saved


def test_there_is_one_for_every_use() -> None:
    assert {path.stem for path in WORKFLOWS.glob("*.jpg")} == set(TITLES.values())
    assert all(TITLE.fullmatch(title) and not re.search(r'[<>:"/\\|?*]', title) for title in TITLES.values())
    assert len({page_form(name)["id"] for name in PAGES}) == len(PAGES)
    assert set(BLUEPRINTS) <= set(TITLES.values())


def test_every_file_has_an_address() -> None:
    files = known_files()
    for one in files.values():
        assert re.fullmatch(r"https://huggingface\.co/[\w.-]+/[\w.-]+/resolve/main/[\w./-]+", one.address)
        assert one.address.endswith("/" + one.name) and one.gb > 0
        assert one.folder in ("diffusion_models", "loras", "text_encoders", "vae", "clip_vision", "audio_encoders")
    named = {name for page in PAGES for node in all_nodes(page_form(page)) for name in files_of(node)}
    assert named <= files.keys()


@pytest.mark.parametrize("name", PAGES)
def test_loaders_offer_what_they_name_and_notes_link_it(name: str) -> None:
    page, offered = page_form(name), dict[str, str]()
    for graph in graphs(page):
        for node in graph["nodes"]:
            offered |= {one["name"]: one["url"] for one in node["properties"].get("models", [])}
    named = {file for node in all_nodes(page) for file in files_of(node)}
    assert named == offered.keys()
    if name in BOXES:
        links = dict(re.findall(r"\[([^]]+)\]\((https[^)]+)\)", " ".join(notes_of(page))))
        assert links == offered


@pytest.mark.parametrize("name", TITLES)
def test_notes_name_what_exists(name: str) -> None:
    """Nodes, inputs and templates."""
    page, text = page_form(name), " ".join(notes_of(page_form(name)))
    titles = {node.get("title") for node in all_nodes(page)} | {graph.get("name") for graph in graphs(page)}
    shown = json.loads((ROOT / "locales" / "zh" / "nodeDefs.json").read_text(encoding="utf-8"))
    inputs = {entry["name"] for node in all_nodes(page) for entry in node["inputs"]}
    inputs |= {entry["name"] for schema in SCHEMAS.values() for entry in [*schema["inputs"], *schema["outputs"]]}
    labels = {"Files", "Time", "Next", "Load Image", "Load Video", "Load Audio"}
    kinds = {re.sub(r"(?<=[a-z])(?=[A-Z])", " ", kind).replace("Wan Core", "WanCore") for kind in shown}
    for bold in re.findall(r"\*\*([^*]+)\*\*", text):
        exists = bold in titles | inputs | labels or bold.lower() in {kind.lower() for kind in kinds}
        assert exists, f"{name}: **{bold}**"
    for template in re.findall(r"\*((?:Wan 2\.2|Toy) [^*]*)\*", text):
        assert template in TITLES.values() or (WORKFLOWS / "more" / f"{template}.json").is_file(), template
    for workflow_name in re.findall(r"workflow \*([^*]+)\*", text):
        assert (WORKFLOWS / "more" / f"{workflow_name}.json").is_file()


@pytest.mark.parametrize("name", TITLES)
def test_app_mode_shows_inputs_that_exist_and_the_video(name: str) -> None:
    page = page_form(name)
    nodes, shown = {str(node["id"]): node for node in page["nodes"]}, page["extra"]["linearData"]
    assert shown["inputs"] and shown["outputs"]
    for node, widget in shown["inputs"]:
        assert any(entry["name"] == widget and "widget" in entry for entry in nodes[node]["inputs"]), (node, widget)
    assert all(nodes[node]["type"] == "SaveVideo" for node in shown["outputs"])


def test_the_api_forms_are_those_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().err


def check_nodes(page: dict[str, Any]) -> None:
    """Every node has the inputs and outputs of its schema, or those before it got more, and as many saved values as the
    page reads: after a seed stands what to do with it next, after a file to upload what the page keeps of it."""
    boxes = {graph["id"]: graph for graph in graphs(page)[1:]}
    for node in all_nodes(page):
        if node["type"] == NOTE:
            continue
        if node["type"] in boxes:
            check_box(node, boxes[node["type"]])
            continue
        schema = SCHEMAS[node["type"]]
        entries, names = {entry["name"]: entry for entry in schema["inputs"]}, [one["name"] for one in node["inputs"]]
        assert names == sorted(names, key=lambda name: (entries[name]["type"] in WIDGETS, [*entries].index(name)))
        assert all(name in names or entry["optional"] for name, entry in entries.items()), node["type"]
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


def check_box(node: dict[str, Any], subgraph: dict[str, Any]) -> None:
    """The node that stands for a subgraph has its inputs, outputs, and a value for each that is a widget, which is
    that of the node inside."""
    assert [one["name"] for one in node["inputs"]] == [one["name"] for one in subgraph["inputs"]]
    assert [one["type"] for one in node["outputs"]] == [one["type"] for one in subgraph["outputs"]]
    widgets = [one for one in node["inputs"] if "widget" in one]
    assert len(widgets) == len(node["widgets_values"])
    inside = {one["id"]: one for one in subgraph["nodes"]}
    values = dict(zip((one["name"] for one in widgets), node["widgets_values"], strict=True))
    for number, entry in enumerate(subgraph["inputs"]):
        ends = [link for link in subgraph["links"] if link["origin_id"] == INSIDE and link["origin_slot"] == number]
        assert sorted(link["id"] for link in ends) == sorted(entry["linkIds"])
        for link in ends:
            target = inside[link["target_id"]]["inputs"][link["target_slot"]]
            assert ("widget" in target) == (entry["name"] in values) and target["type"] == entry["type"]
            if entry["name"] in values:
                assert values[entry["name"]] in inside[link["target_id"]]["widgets_values"]


def check_links(page: dict[str, Any]) -> None:
    numbers = [node["id"] for node in all_nodes(page)]
    assert len(numbers) == len(set(numbers)), "a node's number is used twice"
    for graph in graphs(page):
        check_links_of(graph)


def check_links_of(graph: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in graph["nodes"]}
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    links = [tuple(one[name] for name in names) if isinstance(one, dict) else tuple(one) for one in graph["links"]]
    for number, source, slot, target, entry, kind in links:
        inner = source == INSIDE or target == OUTSIDE
        out = graph["inputs"][slot] if source == INSIDE else nodes[source]["outputs"][slot]
        into = graph["outputs"][entry] if target == OUTSIDE else nodes[target]["inputs"][entry]
        assert number in out["linkIds" if source == INSIDE else "links"]
        assert number in into["linkIds"] if target == OUTSIDE else into["link"] == number
        assert out["type"] == kind and (kind in into["type"].split(",") or "*" in (kind, into["type"]))
        assert inner or nodes[source]["order"] < nodes[target]["order"]
    ends = [entry["link"] for node in graph["nodes"] for entry in node["inputs"] if entry["link"] is not None]
    starts = [link for node in graph["nodes"] for out in node["outputs"] for link in out["links"] or []]
    assert sorted(ends) == sorted(link[0] for link in links if link[3] != OUTSIDE)
    assert sorted(starts) == sorted(link[0] for link in links if link[1] != INSIDE)


def check_layout(page: dict[str, Any]) -> None:
    """Nothing lies on anything else."""
    levels = [[(*node["pos"], *node["size"], ABOVE) for node in graph["nodes"]] for graph in graphs(page)]
    levels += [[(*group["bounding"], 0) for group in graph["groups"]] for graph in graphs(page)]
    for boxes in levels:
        for (x, y, width, height, above), (left, top, wide, high, _) in combinations(boxes, 2):
            apart = x >= left + wide or left >= x + width
            assert apart or y - above >= top + high or top - above >= y + height, (x, y, left, top)


def check_view(page: dict[str, Any]) -> None:
    """A template opens with all of its nodes on a page of 1366x768, beside the page's bars, and no smaller than the
    classic renderer draws text."""
    view, nodes = page["extra"]["ds"], page["nodes"]
    assert view["scale"] > TEXT
    assert_fitted(nodes)
    for node in nodes:
        for axis, first, last in ((0, SIDEBAR, 1366), (1, BARS, 768)):
            begin = node["pos"][axis] - ABOVE * axis + view["offset"][axis]
            end = node["pos"][axis] + node["size"][axis] + view["offset"][axis]
            assert first < begin * view["scale"] and end * view["scale"] < last, (node["type"], axis)


def assert_fitted(nodes: list[dict[str, Any]]) -> None:
    """Opened from the browser the page fits the nodes into three quarters of the window: text is drawn there too."""
    lows = [min(node["pos"][axis] - ABOVE * axis for node in nodes) for axis in (0, 1)]
    highs = [max(node["pos"][axis] + node["size"][axis] for node in nodes) for axis in (0, 1)]
    sides = [high - low + FITTED for low, high in zip(lows, highs, strict=True)]
    assert min(0.75 * 1366 / sides[0], 0.75 * 768 / sides[1]) > TEXT, sides


def check_notes(name: str, page: dict[str, Any]) -> None:
    """Nodes 2.0 draws code dark on dark and cuts wide tables off; a note is as high as its text needs in the renderer
    that takes more room. It says which files go where, and no command that runs in one folder only."""
    for node in (node for node in page["nodes"] if node["type"] == NOTE):
        text = node["widgets_values"][0]
        assert "`" not in text and "python -m" not in text and not re.search(r"^\|", text, re.MULTILINE)
        letters = (node["size"][0] - 2 * MARGIN) / LETTER
        lines = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line) for line in text.splitlines()]
        heights = [12 if not line else 40 if line[0] == "#" else 20 * math.ceil(len(line) / letters) for line in lines]
        assert node["size"][1] >= sum(heights) + 2 * MARGIN
    folders = {one["directory"] for node in all_nodes(page) for one in node["properties"].get("models", [])}
    assert all(folder in " ".join(notes_of(page)) for folder in folders - {"audio_encoders", "clip_vision"})


def check_seeds(page: dict[str, Any]) -> None:
    """Each sampler would draw a seed of its own after the first run: where videos are compared, seeds stay."""
    nodes = [node for node in all_nodes(page) if node["type"] in SCHEMAS]
    drawn = [node for node in nodes if any(entry["name"] == "seed" for entry in node["inputs"])]
    controls = {value for node in drawn for value in node["widgets_values"] if value in CONTROLS}
    expected = {"fixed"} if any(node["type"] == "WanCoreCompare" for node in nodes) else {"randomize"}
    assert controls == (expected if drawn else set())


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_whole(name: str) -> None:
    page = page_form(name)
    check_nodes(page)
    check_links(page)
    check_layout(page)
    if name in TITLES:
        check_view(page)
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
                is_a_file = name in NEED_FILES and str(value).endswith((".safetensors", ".gguf"))
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


# ---------------------------------------------------------------------------------------------------- in a real ComfyUI


@pytest.fixture(scope="module")
def comfy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyUI]:
    """A fresh installation: no model, no picture, nothing but the pack."""
    yield from serving(make_base(tmp_path_factory.mktemp("comfyui")))


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
        parts = captions_of(caption)
        for begin, end, part_caption in parts:
            verdict = judge(frames[begin:end], part_caption)
            verdict = replace(verdict, motion=True) if len(parts) > 1 else verdict  # a few frames move too little
            assert verdict.all_true, f"{video.name}: {part_caption}: {verdict}"


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
    assert sorted(packs["wancore"]) == sorted(TITLES.values())


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
