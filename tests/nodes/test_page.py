"""What a user sees: ComfyUI's page in Chromium, in both of its renderers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, find_browser, front_end, page_of
from tests.comfyui import ComfyUI
from tests.nodes.workflow_pages import page_form
from wan_core.pipeline.sources import TINY

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

SURFACE = json.loads((Path(__file__).parent / "page" / "surface.json").read_text())
STEPS = 2
LOW, HIGH = "_low_noise_*odd*.safetensors", "_high_noise_*odd*.safetensors"  # Markdown would take some of it away
LOAD = """await app.loadGraphData(arguments[0], true, true, arguments[1]);
await new Promise((done) => setTimeout(done, 1500));"""
RUN = """const ended = new Promise((done) => {
  for (const kind of ["execution_success", "execution_error", "execution_interrupted"])
    app.api.addEventListener(kind, () => done(kind), { once: true });
});
await app.queuePrompt(0, 1);
const refused = Object.values(app.lastNodeErrors ?? {}).flatMap((node) => node.errors.map((one) => one.details));
const end = refused.length ? refused.join("; ") : await ended;
await new Promise((done) => setTimeout(done, 500));
return end;"""
SHOWN = """return [...document.querySelectorAll(".dom-widget, .comfy-markdown-content")].map((one) => one.innerText)"""
NEST = """const graph = app.canvas.graph, names = arguments[0];
graph.convertToSubgraph(new Set(graph.nodes.filter((node) => names.includes(node.type))));
await new Promise((done) => setTimeout(done, 1000));"""
OPEN = """const node = app.canvas.graph.nodes.find((one) => one.subgraph);
app.canvas.openSubgraph(node.subgraph, node);
await new Promise((done) => setTimeout(done, 1500));"""
# Of each node of ours, the values that it is saved with, and the widgets that are its own.
COUNTS = """return app.graph.nodes.filter((node) => node.type.startsWith("WanCore")).map((node) => [
  node.title, node.serialize().widgets_values?.length ?? 0,
  (node.widgets ?? []).filter((one) => !one.name.startsWith("$$")).length])"""
MISSING = """const surface = arguments[0], objects = { app, api: app.api, canvas: app.canvas, graph: app.canvas.graph };
return Object.entries(objects).flatMap(([name, object]) => surface[name].filter((one) => !(one in object)));"""


ARGUMENTS = front_end()


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    find_browser()
    for expert, name in (("high", HIGH), ("low", LOW)):
        (base / "models" / "diffusion_models" / name).symlink_to(TINY / f"t2v_{expert}.safetensors")


@pytest.fixture(scope="module", params=[False, True], ids=["classic", "nodes 2.0"])
def page(comfy: ComfyUI, request: pytest.FixtureRequest) -> Iterator[Browser]:
    with page_of(comfy, request.param) as browser:
        yield browser


def workflow(**changed: dict[int, Any]) -> dict[str, Any]:
    """*Text to video* with few steps. changed: by type of node, place of a widget's value -> another value."""
    page = page_form("text_to_video")
    changed = {"WanCoreSampler": {1: "fixed", 2: STEPS}} | changed
    for node in page["nodes"]:
        for place, value in changed.get(node["type"], {}).items():
            node["widgets_values"][place] = value
    return page


def all_said(page: Browser, wanted_text: str) -> list[list[str]]:
    """The lines of each text on a node in which `wanted_text` is, as they are drawn."""
    texts = [text.replace("\ufeff", "") for text in page.script(SHOWN)]
    found = [text.strip().splitlines() for text in texts if wanted_text in text]
    return [[" ".join(line.split()) for line in lines] for lines in found]


def said(page: Browser, wanted_text: str) -> list[str]:
    [lines] = all_said(page, wanted_text)
    return lines


def toasted(page: Browser, wanted_text: str) -> bool:
    return any(wanted_text in text for text in page.script("return toasts"))


def test_the_page_has_what_the_script_uses(page: Browser) -> None:
    assert page.script(MISSING, SURFACE) == []
    assert page.script("return typeof app.extensionManager.toast.add") == "function"


def test_texts_stay_on_their_nodes_line_by_line_with_warnings_first(page: Browser) -> None:
    page_graph = workflow(WanCoreModelLoader={0: LOW, 1: HIGH}, WanCoreTextEncode={0: "a cat"})
    page.script(LOAD, page_graph, "swapped")
    assert page.script(RUN) == "execution_success"
    assert toasted(page, "the experts are swapped")
    loader, sampler = said(page, "two experts, 8 blocks"), said(page, "done in")
    warnings = [line for line in sampler if line.startswith("⚠ ")]
    assert loader[0].startswith("⚠ the experts are swapped: ") and loader[0] in warnings
    assert f"diffusion_models/{LOW} is for the low-noise expert" in loader[0]
    assert [line.split(": ")[0] for line in loader[1:]] == ["t2v-A14B", "high", "low", "its own settings"]
    plan, done, *_ = sampler[len(warnings) :]
    assert plan.startswith(f"t2v-A14B: {STEPS} steps") and done.startswith("done in")
    assert [title for title, saved, own in page.script(COUNTS) if saved != own] == []


def test_the_embedded_model_says_what_it_does_not_know_inside_a_subgraph_too(page: Browser) -> None:
    page.script(LOAD, workflow(WanCoreTextEncode={0: "A cat walks on grass"}), "a cat")
    page.script(NEST, ["WanCoreModelLoader", "WanCoreTextEncode", "WanCoreSampler"])
    for _ in range(2):  # the second time from the cache
        assert page.script(RUN) == "execution_success"
    assert toasted(page, "the embedded model knows only captions")
    page.script(OPEN)
    texts = all_said(page, "done in")  # in the classic page also that of the box, which is hidden
    assert texts and all("⚠ the embedded model knows only captions such as" in " ".join(lines) for lines in texts)
    assert said(page, "two experts, 8 blocks")[0].startswith("t2v-tiny")


def test_what_the_sampler_says_stands_on_the_box_of_a_template_too(page: Browser) -> None:
    page.script(LOAD, page_form("toy_t2v_no_download"), "toy")
    values = "return app.rootGraph.nodes.find((node) => node.subgraph).serialize().widgets_values.length"
    before = page.script(values)
    assert page.script(RUN) == "execution_success"
    plan, done, advice = said(page, "done in")
    assert plan.startswith("t2v-tiny: 20 steps") and done.startswith("done in") and advice.startswith("speed ")
    assert page.script(values) == before


def test_an_error_is_a_toast(page: Browser) -> None:
    page.script(LOAD, workflow(WanCoreEmptyLatent={3: "Wan 2.2 VAE (TI2V-5B)"}), "of another VAE")
    assert page.script(RUN) == "execution_error"
    assert toasted(page, "choose the latent type and the VAE that belong to the model")
