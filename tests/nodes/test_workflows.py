"""The workflows: whole as ComfyUI's page saved them, what is derived from them up to date, every file that they name
with an address. In a real ComfyUI those of the embedded model make the videos that their prompts ask for, with no file
but the pack's own, and the others run on tiny random weights."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comfyui import ComfyUI, find_comfyui, python_of
from tests.nodes.workflow_pages import (
    AUTOGROW,
    DYNAMIC_COMBO,
    PAGES,
    SCHEMAS,
    TITLES,
    api_form,
    check_layout,
    check_links,
    check_nodes,
    check_notes,
    check_seeds,
    check_view,
    graphs,
    notes_of,
    page_form,
)
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
)
from wan_core.media.video import read_video
from wan_lab.metrics import judge

HEADLESS = (ROOT / "docs" / "headless.md").read_text(encoding="utf-8")
KINDS: dict[str, type | tuple[type, ...]] = {"INT": int, "FLOAT": (int, float), "STRING": str, "BOOLEAN": bool}
LOOPS = {"StartLoop", "EndLoop", "ComfyMathExpression", "GetImageSize", "PrimitiveInt"}  # in ComfyUI from 0.36 on


EMBEDDED = [name for name in PAGES if '"tiny' in json.dumps(api_form(name))]
NEED_FILES = [name for name in PAGES if name not in EMBEDDED]
BOXES = [name for name in TITLES if name in NEED_FILES]


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


@pytest.mark.skipif(not shutil.which("jq"), reason="needs jq")
def test_the_command_of_the_page_on_headless_use_accelerates_a_workflow(tmp_path: Path) -> None:
    """*Wan 2.2 I2V Accelerate* gets back the nodes that were taken out of it, and a guider gets one too."""
    whole = api_form("wan22_i2v_accelerate")
    models = {
        name: one["inputs"].pop("model") for name, one in whole.items() if one["class_type"] == "WanCoreAccelerate"
    }
    plain = {name: one for name, one in whole.items() if name not in models}
    wires = {name: models[one["inputs"]["model"][0]] for name, one in plain.items() if "KSampler" in one["class_type"]}
    for name, wire in wires.items():
        plain[name]["inputs"]["model"] = wire
    first = next(iter(wires.values()))
    plain |= {name: {"class_type": name, "inputs": {"model": first}} for name in ("BasicScheduler", "CFGGuider")}
    plain["SamplerCustomAdvanced"] = {"class_type": "SamplerCustomAdvanced", "inputs": {"guider": ["CFGGuider", 0]}}
    (tmp_path / "my_workflow.json").write_text(json.dumps(plain), encoding="utf-8")
    [command] = re.findall(r"```sh\n(jq 'reduce .*?)```", HEADLESS, re.DOTALL)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    faster = json.loads((tmp_path / "faster.json").read_text(encoding="utf-8"))
    schema = json.loads((ROOT / "tests" / "nodes" / "node_schemas.json").read_text())["WanCoreAccelerate"]["inputs"]
    values = {one["name"]: one["default"] for one in schema if not one["optional"] and "default" in one}
    for name, wire in (wires | {"CFGGuider": first}).items():
        [added, slot] = faster[name]["inputs"].pop("model")
        assert slot == 0 and faster.pop(added) == {
            "class_type": "WanCoreAccelerate",
            "inputs": {"model": wire, **values},
        }
        del plain[name]["inputs"]["model"]
    assert faster == plain and len(wires) == 2


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


@pytest.mark.parametrize("name", PAGES)
def test_notes_name_templates_that_exist(name: str) -> None:
    for template in re.findall(r"\*((?:Wan 2\.2|Toy|Embedded) [^*]*)\*", " ".join(notes_of(page_form(name)))):
        assert template in {path.stem for path in PAGES.values()}


@pytest.mark.parametrize("name", TITLES)
def test_notes_name_what_exists(name: str) -> None:
    """Nodes, inputs and workflows."""
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
