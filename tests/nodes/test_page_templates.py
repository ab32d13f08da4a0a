"""The templates in ComfyUI's page, in both of its renderers: found by their name, every node where the file has it and
none on another, also with a high video in its preview, no text cut at 100 %, each missing file offered for download
from its address."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.browser import Browser, find_browser, front_end, page_of
from tests.comfyui import ComfyUI
from tests.nodes.workflow_pages import TITLES, api_form, graphs, page_form
from tools.workflows import all_nodes, files_of
from wan_core.media.mp4 import write_mp4

pytestmark = [pytest.mark.comfy, pytest.mark.slow]

OPENED = """const [workflow, name] = arguments, ids = workflow.nodes.map((node) => String(node.id)).sort().join();
await app.loadGraphData(workflow, true, true, name);
const there = () => app.graph.nodes.map((node) => String(node.id)).sort().join() === ids;
for (let tries = 0; tries < 60 && !there(); tries++) await new Promise((done) => setTimeout(done, 250));
await new Promise((done) => setTimeout(done, 1500));
return there();"""
FIT = """app.canvas.ds.scale = 0.3; app.canvas.ds.offset = [700, 400]; app.canvas.setDirty(true, true);
await new Promise((done) => setTimeout(done, 1000));"""
ENTER = """const box = app.graph.nodes.find((node) => node.subgraph);
app.canvas.openSubgraph(box.subgraph, box);
await new Promise((done) => setTimeout(done, 1500));"""
# title, left, top, width, height of each node as it is drawn, and how much higher its contents are.
MEASURE = """return app.canvas.graph.nodes.map((node) => {
  const element = arguments[0] ? document.querySelector(`[data-node-id="${node.id}"]`) : null;
  const seen = element?.getBoundingClientRect(), scale = app.canvas.ds.scale;
  const [width, height] = seen ? [seen.width / scale, seen.height / scale] : [node.size[0], node.size[1] + 30];
  return [`${node.title} ${node.id}`, node.pos[0], node.pos[1] - 30, width, height,
    element ? 0 : node.computeSize()[1] + 30 - height];
})"""
# Texts that do not show whole in Nodes 2.0, at 100 %.
CUT = """const cut = [];
for (const node of app.canvas.graph.nodes) {
  app.canvas.ds.scale = 1; app.canvas.ds.offset = [200 - node.pos[0], 150 - node.pos[1]];
  app.canvas.setDirty(true, true);
  await new Promise((done) => setTimeout(done, 300));
  const element = document.querySelector(`[data-node-id="${node.id}"]`);
  if (!element) cut.push(`${node.title} is not drawn`);
  for (const one of element?.querySelectorAll("*") ?? []) {
    const style = getComputedStyle(one), text = String(one.value ?? one.innerText ?? "").trim();
    const wide = style.overflowX !== "visible" && one.scrollWidth > one.clientWidth + 1;
    const high = style.overflowY !== "visible" && one.scrollHeight > one.clientHeight + 1;
    if (text && style.visibility !== "hidden" && (wide || high)) cut.push(`${node.title}: ${text.slice(0, 80)}`);
  }
}
return cut;"""
PROMPT = "return (await app.graphToPrompt()).output"
OFFERED = """const names = arguments[0], text = document.body.innerText;
return names.filter((name) => text.includes(name))"""
DETAILS = """const show = [...document.querySelectorAll("button")].find((one) => /View details/.test(one.innerText));
show?.click();
await new Promise((done) => setTimeout(done, 2000));
return [...document.querySelectorAll("button")].filter((one) => one.innerText.trim() === "Download").length"""


ARGUMENTS = front_end()


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    find_browser()
    Image.fromarray(np.full((64, 64, 3), 90, np.uint8)).save(base / "input" / "example.png")
    write_mp4(base / "input" / "example.mp4", np.full((9, 112, 64, 3), 90, np.uint8), fps=24)  # its preview is high


@pytest.fixture(scope="module", params=[False, True], ids=["classic", "nodes 2.0"])
def page(comfy: ComfyUI, request: pytest.FixtureRequest) -> Iterator[tuple[Browser, bool]]:
    with page_of(comfy, request.param) as browser:
        yield browser, request.param


def overlaps(nodes: list[list[Any]]) -> list[str]:
    return [
        f"{one[0]} lies on {other[0]}"
        for one, other in combinations(nodes, 2)
        if one[1] < other[1] + other[3] and other[1] < one[1] + one[3]
        if one[2] < other[2] + other[4] and other[2] < one[2] + one[4]
    ]


@pytest.mark.parametrize("name", TITLES)
def test_it_opens_whole_and_would_send_the_api_form(comfy: ComfyUI, page: tuple[Browser, bool], name: str) -> None:
    browser, vue = page
    title = urllib.parse.quote(TITLES[name])
    workflow = comfy.get(f"/api/workflow_templates/wancore/{title}.json")
    assert workflow == page_form(name)
    assert browser.script(OPENED, workflow, name)
    sent, expected = browser.script(PROMPT), api_form(name)
    assert sent.keys() == expected.keys()
    for key, one in expected.items():  # newer ComfyUIs have more inputs on their own nodes, and ours may get more
        inputs = {name: value for name, value in sent[key]["inputs"].items() if name in one["inputs"]}
        assert (sent[key]["class_type"], inputs) == (one["class_type"], one["inputs"])
    for level in range(len(graphs(workflow))):
        if level:
            browser.script(ENTER)
        browser.script(FIT)
        nodes = browser.script(MEASURE, vue)
        assert overlaps(nodes) == []
        assert [one[0] for one in nodes if one[5] > 1] == [], "contents are higher than their node"
        if vue and not level:
            assert browser.script(CUT) == []


def test_missing_files_are_offered(page: tuple[Browser, bool]) -> None:
    name = "wan22_i2v_4_steps"
    browser, _ = page
    names = sorted({file for node in all_nodes(page_form(name)) for file in files_of(node)})
    assert browser.script(OPENED, page_form(name), name)
    assert browser.script(DETAILS) == len(names)
    assert sorted(browser.script(OFFERED, names)) == names
