"""WanCore Accelerate by a click in ComfyUI's page, in both of its renderers: into ComfyUI's official templates and a
graph with three KSampler (Advanced), run on tiny random weights, undone and taken out again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.comfyui import Graph
from benchmarks.templates.our_sampler import SAMPLERS
from benchmarks.templates.run import Templates, observed
from tests.browser import Browser, find_browser, front_end, page_of
from tests.comfyui import find_newer_comfyui
from tests.nodes.test_page import LOAD, NEST, RUN, toasted
from tests.nodes.test_workflows import on_cpu_workers
from wan_core.media.video import read_video

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

# Template -> WanCore Accelerates that a click adds, samplers whose model they are, samplers that are off, whether
# WanCore Decode to Video is in the place of VAE Decode and Create Video, and whether WanCore Accelerate VAE is added.
CLICKS = {
    "video_wan2_2_14B_i2v": (2, 2, 0, True, True),
    "video_wan2_2_14B_t2v": (2, 2, 0, True, False),
    "video_wan2_2_14B_flf2v": (2, 2, 2, True, True),
    "video_wan_animate2": (1, 1, 1, False, True),
    "video_wan_vace_inpainting": (1, 1, 0, True, True),
    "video_wan2_2_14B_s2v": (1, 3, 5, False, True),
}
EXACT = {"speed": "exact", "attention": "auto", "compare": "auto", "steps": 0}
COMMAND = """await app.extensionManager.command.execute(arguments[0]);
await new Promise((done) => setTimeout(done, 500));"""
PROMPT = "return (await app.graphToPrompt()).output"
# What a graph is, without what the page counts up.
STATE = """const plain = ({ nodes, links, definitions }) => ({
  nodes: nodes.map((node) => [node.id, node.type, node.mode, node.pos, node.widgets_values]),
  links: links.map((one) => Array.isArray(one) ? one.slice(1, 5) : [one.origin_id, one.origin_slot, one.target_id,
    one.target_slot]).map(String).sort(),
  subgraphs: (definitions?.subgraphs ?? []).map(plain),
});
return JSON.stringify(plain(app.rootGraph.serialize()));"""
FIXED = """for (const node of app.rootGraph.nodes) for (const widget of node.widgets ?? [])
  if (widget.name === "control_after_generate") widget.value = "fixed";"""  # the same seed in the next run
SELECTED = "return [...app.canvas.selectedItems].map((one) => one.type)"
OFFER = "return document.getElementById('wancore-offer')?.innerText ?? null"
BACK = """const query = new URLSearchParams({ filename: arguments[0], subfolder: arguments[1], type: "output" });
const blob = await (await fetch(`/view?${query}`)).blob();
await app.loadGraphData({ nodes: [], links: [], version: 0.4 }, true, true, "empty");
await app.handleFile(new File([blob], arguments[0], { type: "video/mp4" }));
await new Promise((done) => setTimeout(done, 1500));"""


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Templates]:
    find_browser()
    try:
        server = Templates(
            find_newer_comfyui(),
            tmp_path_factory.mktemp("comfyui"),
            environment={"WANCORE_ALLOW_CPU_WORKERS": "1"},
            # On a CPU ComfyUI computes attention in parts, which rounds otherwise (1.03e-5 in Animate-2).
            arguments=["--use-pytorch-cross-attention", *front_end()],
        )
    except FileNotFoundError as fault:
        pytest.skip(str(fault))
    yield server
    server.stop()


@pytest.fixture(scope="module", params=[False, True], ids=["classic", "nodes 2.0"])
def page(templates: Templates, request: pytest.FixtureRequest) -> Iterator[Browser]:
    with page_of(templates.server, request.param) as browser:
        yield browser
        assert [fault for fault in browser.faults() if "wancore" in fault.lower()] == []


def accelerated(prompt: Graph) -> dict[str, Any]:
    """What WanCore Accelerate's inputs are in front of every sampler; None: it is not there."""
    inputs_of = {}
    for name, one in prompt.items():
        if one["class_type"] in SAMPLERS:
            before = prompt[one["inputs"]["model"][0]]
            own = before["class_type"] == "WanCoreAccelerate"
            inputs_of[name] = {key: value for key, value in before["inputs"].items() if key != "model"} if own else None
    return inputs_of


def video_nodes(prompt: Graph) -> list[dict[str, Any]]:
    return [one for one in prompt.values() if one["class_type"] == "WanCoreDecodeToVideo"]


def ends(node: dict[str, Any]) -> bool:
    """Whether a node is a KSampler (Advanced) that no other goes on from."""
    return node["inputs"].get("return_with_leftover_noise") == "disable"


def the_same(templates: Templates, graphs: list[Graph]) -> int:
    """How many samplers ran in both graphs, plain and clicked, and gave the same latents: bit for bit, or but for the
    rounding of WanCore Accelerate VAE."""
    runs, said = [], []
    for run, graph in zip(("plain", "clicked"), graphs, strict=True):
        done = templates.server.run(observed(graph, run))
        assert done.ok, f"{run}: {done.status}"
        runs.append(templates.kept(run))
        said.append(templates.server.log().count("WanCore Accelerate: "))
    plain, clicked = runs
    encodes = any(one["class_type"] == "WanCoreAccelerateVAE" for one in graphs[1].values())
    assert plain.keys() == clicked.keys()
    for key, one in plain.items():
        assert torch.equal(one, clicked[key]) or (encodes and (one - clicked[key]).norm() <= 1e-4 * one.norm())
    assert said[1] - said[0] >= len(plain)
    return len(plain)


@pytest.mark.parametrize("name", CLICKS)
def test_a_click_and_its_undoing(page: Browser, templates: Templates, name: str) -> None:
    added, samplers, off, streams, encodes = CLICKS[name]
    page.script("toasts.length = 0")
    page.script(LOAD, templates.workflow(name), name)
    before, plain = page.script(STATE), page.script(PROMPT)
    assert set(map(str, accelerated(plain).values())) == {"None"}
    page.script(COMMAND, "WanCore.Accelerate")
    clicked = page.script(PROMPT)
    assert list(accelerated(clicked).values()) == [EXACT] * samplers
    assert len(clicked) == len(plain) + added - streams + encodes  # one node in the place of two
    assert toasted(page, "WanCore Accelerate VAE is behind") == encodes
    assert bool(video_nodes(clicked)) == streams
    for node in video_nodes(clicked):
        [old] = [one for one in plain.values() if one["class_type"] == "CreateVideo"]
        inputs = ("fps", "audio")
        assert [node["inputs"].get(key) for key in inputs] == [old["inputs"].get(key) for key in inputs]
    assert toasted(page, f"{added} node{'s' * (added > 1)} added")
    assert not off or toasted(page, f"{off} sampler{'s' * (off > 1)} that")
    assert len(page.script(SELECTED)) >= 1
    after = page.script(STATE)
    page.script(COMMAND, "WanCore.Accelerate")
    assert page.script(STATE) == after and toasted(page, "it is there already")
    page.script(COMMAND, "Comfy.Undo")
    page.wait(f"{STATE.replace('return', 'const now =')} return now === {before!r}")
    page.script(COMMAND, "WanCore.Accelerate")
    page.script(COMMAND, "WanCore.TakeOut")
    assert page.script(STATE) == before and page.script(PROMPT) == plain


# One model for both samplers: its wire forks at a reroute, each fork has one of its own.
FORK = """const nodes = app.rootGraph.nodes.filter((node) => node.type === "KSamplerAdvanced"), graph = app.rootGraph;
const wire = (node) => Object.values(graph.links).find((one) => one.target_id === node.id && one.target_slot === 0);
const [first, second] = nodes, source = graph.getNodeById(wire(first).origin_id);
const trunk = graph.createReroute([0, 0], wire(first));
source.connect(0, second, 0, trunk.id);
nodes.forEach((node, at) => graph.createReroute([100, 100 * at], wire(node)));"""
REROUTES = """return [...app.rootGraph.reroutes.values()].map((one) => [one.id, one.parentId ?? null,
  [...one.linkIds].filter((id) => id in app.rootGraph.links).length, one.linkIds.size])"""
API = "await app.loadApiJson(arguments[0], 'api'); await new Promise((done) => setTimeout(done, 1000));"


def numbered(graph: Graph) -> Graph:
    """The graph as the page opens it: ids of nodes are numbers there."""
    names = {name: str(number) for number, name in enumerate(graph, start=1)}
    for one in graph.values():
        linked = {key: [names[value[0]], value[1]] for key, value in one["inputs"].items() if isinstance(value, list)}
        one["inputs"] |= linked
    return {names[name]: one for name, one in graph.items()}


def test_reroutes_of_a_wire_that_forks_stay_on_it(page: Browser, templates: Templates) -> None:
    page.script(API, numbered(templates.graph("video_wan2_2_14B_t2v")))
    page.script(FORK)
    before, reroutes = page.script(STATE), page.script(REROUTES)
    assert [one[2:] for one in reroutes] == [[2, 2], [1, 1], [1, 1]]
    page.script(COMMAND, "WanCore.Accelerate")
    assert [one[2:] for one in page.script(REROUTES)] == [[1, 1]] * 3
    assert list(accelerated(page.script(PROMPT)).values()) == [EXACT] * 2
    page.script(COMMAND, "WanCore.TakeOut")
    assert page.script(STATE) == before and page.script(REROUTES) == reroutes


FASTER = """const node = app.rootGraph.nodes.find((one) => one.type === "WanCoreDecodeToVideo");
node.disconnectInput(node.findInputSlot("fps"));
node.widgets.find((one) => one.name === "fps").value = 24;
const sound = LiteGraph.createNode("EmptyAudio");
app.rootGraph.add(sound);
sound.connect(0, node, node.findInputSlot("audio"));"""


def test_fps_and_sound_that_came_after_the_click_stay_when_it_is_taken_out(page: Browser, templates: Templates) -> None:
    page.script(API, numbered(templates.graph("video_wan2_2_14B_t2v")))
    page.script(COMMAND, "WanCore.Accelerate")
    page.script(FASTER)
    [node] = video_nodes(page.script(PROMPT))
    page.script(COMMAND, "WanCore.TakeOut")
    [create] = [one for one in page.script(PROMPT).values() if one["class_type"] == "CreateVideo"]
    assert create["inputs"]["fps"] == node["inputs"]["fps"] == 24
    assert create["inputs"]["audio"] == node["inputs"]["audio"]


def test_what_cannot_be_taken_out_of_its_subgraph_is_said(page: Browser, templates: Templates) -> None:
    """A subgraph has no wire from one of its ends to another."""
    page.script("toasts.length = 0")
    page.script(LOAD, templates.workflow("video_wan2_2_14B_flf2v"), "nested")
    plain = page.script(PROMPT)
    page.script(COMMAND, "WanCore.Accelerate")
    for kind in ("WanCoreAccelerate", "WanCoreAccelerateVAE", "WanCoreDecodeToVideo"):
        page.script(NEST, [kind])
    page.script(COMMAND, "WanCore.TakeOut")
    assert toasted(page, "is bypassed: its subgraph has nothing else")
    assert toasted(page, "WanCore Decode to Video stays")
    left, kinds = page.script(PROMPT), (*SAMPLERS, "WanFirstLastFrameToVideo")
    assert all(left[name] == one for name, one in plain.items() if one["class_type"] in kinds)


@pytest.mark.parametrize("name", CLICKS)
def test_a_clicked_template_runs_and_gives_the_same(templates: Templates, page: Browser, name: str) -> None:
    page.script(LOAD, templates.workflow(name), name)
    plain = page.script(PROMPT)
    page.script(COMMAND, "WanCore.Accelerate")
    assert the_same(templates, [templates.runnable(one, name) for one in (plain, page.script(PROMPT))])


def test_a_saved_video_has_the_frames_of_vae_decode_and_the_graph(templates: Templates, page: Browser) -> None:
    """The image-to-video template in the page, run before and after the click. ComfyUI's page reads the graph back from
    the file that Save Video writes."""
    page.script(API, numbered(templates.graph("video_wan2_2_14B_i2v")))
    page.script(FIXED)
    before = page.script(STATE)
    saved = []
    for run in range(2):
        if run:
            page.script(COMMAND, "WanCore.Accelerate")
        graph = page.script(PROMPT)
        assert len(video_nodes(graph)) == run
        older = set((templates.base / "output").rglob("*.mp4"))
        assert page.script(RUN) == "execution_success"
        [path] = set((templates.base / "output").rglob("*.mp4")) - older
        saved.append(path)
    plain, clicked = (read_video(path).astype(int) for path in saved)
    assert plain.shape == clicked.shape and abs((plain - clicked).mean()) < 1
    assert np.corrcoef(plain.ravel(), clicked.ravel())[0, 1] > 0.99  # x264 rounds random pixels by several levels
    place = saved[1].relative_to(templates.base / "output")
    page.script(BACK, place.name, str(place.parent))
    assert video_nodes(page.script(PROMPT)) == video_nodes(graph)
    page.script(COMMAND, "WanCore.TakeOut")
    assert page.script(STATE) == before


@pytest.mark.parametrize("name", ["video_wan2_2_14B_t2v", "video_wan2_2_14B_i2v"])
def test_all_gpus_in_the_place_of_the_samplers(templates: Templates, page: Browser, name: str) -> None:
    """Here two workers on the CPU. The latents are ComfyUI's but for rounding."""
    page.script("toasts.length = 0")
    page.script(LOAD, templates.workflow(name), name)
    before, plain = page.script(STATE), page.script(PROMPT)
    page.script(COMMAND, "WanCore.AllGpus")
    assert toasted(page, "WanCore Sampler on all GPUs is in the place of 2 samplers")
    parallel = page.script(PROMPT)
    kinds = Counter(one["class_type"] for one in parallel.values())
    added = ("WanCoreLauncher", "WanCoreFromModel", "WanCoreSampler", "WanCoreDecodeToVideo")
    assert all(kinds[kind] == 1 for kind in added) and not kinds["KSamplerAdvanced"] and not kinds["VAEDecode"]
    latents = []
    for run, graph in (("one", plain), ("all", on_cpu_workers(parallel))):
        done = templates.server.run(observed(templates.runnable(graph, name), run))
        assert done.ok, f"{run}: {done.status}"
        [last] = (key for key, one in graph.items() if one["class_type"] == "WanCoreSampler" or ends(one))
        latents.append(templates.kept(run)[last.replace(":", "_")])
    assert (latents[0] - latents[1]).norm() <= 1e-3 * latents[0].norm()
    page.script(COMMAND, "WanCore.TakeOut")
    assert page.script(STATE) == before and page.script(PROMPT) == plain
    page.script(COMMAND, "WanCore.AllGpus")
    page.script(COMMAND, "Comfy.Undo")
    page.wait(f"{STATE.replace('return', 'const now =')} return now === {before!r}")


def test_the_sampler_on_all_gpus_takes_the_word_of_accelerate(templates: Templates, page: Browser) -> None:
    page.script(LOAD, templates.workflow("video_wan2_2_14B_t2v"), "word")
    page.script(COMMAND, "WanCore.Accelerate")
    page.script(
        "for (const graph of [app.rootGraph, ...app.rootGraph.subgraphs.values()]) for (const node of graph.nodes)"
        " if (node.type === 'WanCoreAccelerate') node.widgets.find((one) => one.name === 'speed').value = 'fast'"
    )
    page.script(COMMAND, "WanCore.AllGpus")
    [sampler] = [one for one in page.script(PROMPT).values() if one["class_type"] == "WanCoreSampler"]
    assert sampler["inputs"]["speed"] == "fast"


def test_it_is_offered_once_and_not_where_it_is_switched_off(templates: Templates, page: Browser) -> None:
    def opened(setting: bool) -> str | None:
        templates.server.post("/api/settings", {"WanCore.Accelerate.Offer": setting})
        page.open(f"http://127.0.0.1:{templates.server.port}")
        time.sleep(2)
        page.script(LOAD, templates.workflow("video_wan2_2_14B_t2v"), "offered")
        return page.script(OFFER)

    assert opened(False) is None
    assert "make this Wan workflow faster" in (opened(True) or "")
    before = page.script(STATE)
    page.script("document.querySelectorAll('#wancore-offer button')[1].click()")  # not now
    assert page.script(OFFER) is None and page.script(STATE) == before
    page.script(LOAD, templates.workflow("video_wan2_2_14B_i2v"), "again")
    assert page.script(OFFER) is None
    assert opened(True)
    page.script("document.querySelectorAll('#wancore-offer button')[0].click()")
    page.wait("return app.rootGraph.nodes.length && [...app.rootGraph.subgraphs.values()].some((one) =>"
              " one.nodes.some((node) => node.type === 'WanCoreAccelerate'))")  # fmt: skip
    assert opened(True)
    page.script("document.querySelectorAll('#wancore-offer button')[2].click()")
    page.wait("return app.extensionManager.setting.get('WanCore.Accelerate.Offer') === false")
