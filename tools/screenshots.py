"""Open every workflow in ComfyUI's page in both of its node renderers, check that it arrived whole and is laid out
well, and take its picture for docs/images/.

    python tools/screenshots.py http://127.0.0.1:8188 --run      check, and take every picture
    python tools/screenshots.py http://127.0.0.1:8188 --check    check only
    --run runs each before its picture is taken, and checks that what it then saves holds no more values than before.

Written, for those in PICTURED and cut to the groups named there: docs/images/<workflow>.png, of Nodes 2.0
docs/images/<workflow>_nodes2.png, and docs/images/shown.json: which inputs of which nodes the graphs have. A test
compares that file with the schemas, so that no picture is older than its nodes. The template browser's pictures are
drawn by `tools.thumbnails`.

Needs `pip install playwright` and a Chromium (`--chromium PATH`, by default the `chromium` of the system). The ComfyUI
must have this pack in custom_nodes, run with WANCORE_ALLOW_CPU_WORKERS=1 and, in its models and input folders, have a
file of every name that a workflow names. Checked in the page: no node is missing, every link joins the sockets that
the file says, every value of a widget is the file's, the prompt that the page would send is in `workflows/api`, no
nodes overlap, no note is clipped and no group's title is covered. ComfyUI's own nodes may have more inputs than the
file, where the ComfyUI is newer.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
import urllib.request
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from playwright.sync_api import BrowserContext, Page, sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.workflows import ROOT, WORKFLOWS, pages

IMAGES, PAGES = ROOT / "docs" / "images", pages()
WIDTH, HEIGHT, EDGE = 1920, 1080, 16  # pixels: of a picture, of the page, around a graph
# Workflows in docs/images -> how they are drawn there -> the groups to be seen: as wide as a page, in letters that can
# be read.
PICTURED: dict[str, dict[str, tuple[str, ...]]] = {"text_to_video": {"classic": ("Sampling", "Video")}}
RENDERERS = {"classic": "", "nodes2": "_nodes2"}  # what a picture's name ends with
EMBEDDED = '"tiny'  # in the graphs that run without weights
GROUP_TITLE = 34  # below a group's upper edge
COLOURS = 128  # of a picture's palette; a page has few
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--no-proxy-server"]

# What the page made of a workflow. A type that the page does not know becomes a plain LGraphNode with has_errors.
LOAD = """async ([workflow, name]) => {
  await app.loadGraphData(workflow, true, true, name);
  await new Promise((done) => setTimeout(done, 1000));
  const prompt = await app.graphToPrompt();
  const saved = app.graph.serialize();
  return {
    missing: app.graph.nodes.filter((n) => !LiteGraph.registered_node_types[n.type]).map((n) => n.type),
    refused: app.graph.nodes.filter((n) => n.has_errors).map((n) => n.type),
    links: saved.links,
    widgets: Object.fromEntries(saved.nodes.map((n) => [n.id, n.widgets_values])),
    inputs: Object.fromEntries(saved.nodes.map((n) => [n.id, (n.inputs ?? []).map((i) => [i.name, i.link ?? null])])),
    small: app.graph.nodes.filter((n) => n.computeSize()[1] > n.size[1] + 1)
      .map((n) => `${n.type} ${n.size} needs ${n.computeSize()}`),
    output: prompt.output,
  };
}"""
BOUNDS = """() => {
  let [left, top, right, bottom] = [1e9, 1e9, -1e9, -1e9];
  const boxes = [...app.graph.nodes.map((n) => [n.pos[0], n.pos[1] - 30, n.size[0], n.size[1] + 30]),
                 ...app.graph.groups.map((g) => [...g._bounding])];
  for (const [x, y, w, h] of boxes) {
    left = Math.min(left, x); top = Math.min(top, y); right = Math.max(right, x + w); bottom = Math.max(bottom, y + h);
  }
  return [left, top, right, bottom];
}"""
FIT = """async ([left, top, scale]) => {
  app.canvas.ds.scale = scale;
  app.canvas.ds.offset = [-left, -top];
  app.canvas.deselectAll?.();
  app.canvas.setDirty(true, true);
  await new Promise((done) => setTimeout(done, 1500));
}"""
BARE = """() => { app.extensionManager.focusMode = true; }"""  # no bars
SETTINGS = {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False, "Comfy.Graph.CanvasMenu": False}
SETTINGS |= {"Comfy.Graph.CanvasInfo": False}
SAVED = """() => app.graph.serialize().nodes.filter((n) => n.type.startsWith("WanCore"))
  .map((n) => [n.id, n.type, n.widgets_values?.length ?? 0])"""
RUN = """async () => {
  // with nothing cached, so that every node says what it has to say
  await app.api.fetchApi("/free", { method: "POST", headers: { "Content-Type": "application/json" },
                                   body: JSON.stringify({ unload_models: true, free_memory: true }) });
  await new Promise((done) => setTimeout(done, 2000));
  const ended = new Promise((done) => {
    for (const kind of ["execution_success", "execution_error", "execution_interrupted"])
      app.api.addEventListener(kind, () => done(kind), { once: true });
  });
  await app.queuePrompt(0, 1);
  const refused = Object.values(app.lastNodeErrors ?? {}).flatMap((node) => node.errors.map((one) => one.details));
  return refused.length ? "a refusal: " + refused.join("; ") : await ended;
}"""
# Of every node its box; in Nodes 2.0 that of its element in the page. clipped: pixels of a note that do not show.
MEASURE = """(vue) => app.graph.nodes.map((node) => {
  const box = { id: node.id, type: node.type, x: node.pos[0], y: node.pos[1] - 30,
                width: node.size[0], height: node.size[1] + 30, clipped: 0 };
  const element = vue ? document.querySelector(`[data-node-id="${node.id}"]`) : null;
  if (element) {
    const seen = element.getBoundingClientRect(), scale = app.canvas.ds.scale;
    box.height = seen.height / scale; box.width = seen.width / scale;
    for (const inner of element.querySelectorAll("*"))
      if (node.type === "MarkdownNote" && getComputedStyle(inner).overflowY !== "visible")
        box.clipped = Math.max(box.clipped, inner.scrollHeight - inner.clientHeight);
  } else {
    box.height = Math.max(box.height, node.computeSize()[1] + 30);
    for (const widget of node.widgets ?? [])
      if (node.type === "MarkdownNote" && widget.element) {
        const text = widget.element.querySelector(".tiptap, .comfy-markdown-content") ?? widget.element;
        box.clipped = Math.max(box.clipped, text.scrollHeight - text.clientHeight);
      }
  }
  return box;
})"""
GROUPS = "() => app.graph.groups.map((group) => [group.title, ...group._bounding])"


def check(name: str, found: dict[str, Any]) -> list[str]:
    """What is wrong with a workflow that the page has loaded."""
    page = json.loads(PAGES[name].read_text(encoding="utf-8"))
    api = json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))
    wrong = [f"the page does not know {kind}" for kind in found["missing"]]
    refused = [kind for kind in found["refused"] if kind not in found["missing"]]
    wrong += [
        f"{kind} has errors (is a file that it names not in ComfyUI's models or input folder?)" for kind in refused
    ]
    if sorted(found["links"]) != sorted(page["links"]):
        wrong.append(f"links: {found['links']} instead of {page['links']}")
    boxes = {one["id"] for one in page.get("definitions", {}).get("subgraphs", [])}
    for node in page["nodes"]:
        own, kind = node["type"].startswith("WanCore") or node["type"] in boxes, node["type"]
        given = [[entry["name"], entry["link"]] for entry in node["inputs"]]
        inputs = [entry for entry in found["inputs"][str(node["id"])] if own or entry in given]
        if inputs != given:
            wrong.append(f"inputs of {kind}: {inputs} instead of {given}")
        values = node["widgets_values"]
        shown = found["widgets"][str(node["id"])] or []
        if (shown if own else shown[: len(values)]) != values:
            wrong.append(f"widgets of {kind}: {shown} instead of {values}")
    for key in sorted(found["output"].keys() | api.keys()):
        sent, expected = found["output"].get(key), api.get(key)
        if sent is None or expected is None or not _same_call(sent, expected):
            wrong.append(f"prompt of node {key}: {sent} instead of {expected}")
    return wrong + [f"too small: {words}" for words in found["small"]]


class Box(NamedTuple):
    name: str
    x: float
    y: float
    width: float
    height: float

    def meets(self, other: Box) -> bool:
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


def layout_faults(nodes: list[dict[str, Any]], groups: list[list[Any]]) -> list[str]:
    """What is laid out badly. nodes: of MEASURE. groups: [title, x, y, width, height]."""
    boxes = [Box(f"{one['type']} {one['id']}", one["x"], one["y"], one["width"], one["height"]) for one in nodes]
    titles = [Box(f"the title of {title}", x, y, width, GROUP_TITLE) for title, x, y, width, _ in groups]
    wrong = [f"{a.name} overlaps {b.name}" for a, b in combinations(boxes, 2) if a.meets(b)]
    wrong += [f"{box.name} covers {title.name}" for box in boxes for title in titles if box.meets(title)]
    for title, x, y, width, height in groups:
        around = Box(title, x, y, width, height)
        for box in boxes:
            inside = box.y + box.height <= y + height and box.x >= x and box.x + box.width <= x + width
            if box.meets(around) and not inside:
                wrong.append(f"{box.name} reaches out of group {title} by {box.y + box.height - y - height:.0f}")
    return wrong + [f"{one['type']} {one['id']} hides {one['clipped']} pixels" for one in nodes if one["clipped"] > 2]


def _same_call(sent: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Whether a node of the page's prompt is the API graph's; one of ComfyUI's own may be given more inputs."""
    kind, inputs = expected["class_type"], sent["inputs"]
    if not kind.startswith("WanCore"):
        inputs = {name: value for name, value in inputs.items() if name in expected["inputs"]}
    return sent["class_type"] == kind and inputs == expected["inputs"]


def run(page: Page, workflow: dict[str, Any]) -> list[str]:
    """What is wrong after running the workflow that is open."""
    ended = page.evaluate(RUN)
    wrong = [] if ended == "execution_success" else [f"running it ended with {ended}"]
    counts = {node["id"]: len(node["widgets_values"] or []) for node in workflow["nodes"]}
    return wrong + [
        f"{kind} would be saved with {count} values instead of {counts[node]}: an input added later would read them"
        for node, kind, count in page.evaluate(SAVED)
        if count != counts[node]
    ]


def shown(name: str, found: dict[str, Any]) -> dict[str, list[str]]:
    """The inputs that each node of this pack has in the page, by its type."""
    page = json.loads(PAGES[name].read_text(encoding="utf-8"))
    own = [node for node in page["nodes"] if node["type"].startswith("WanCore")]  # those in boxes have no picture
    return {node["type"]: [entry[0] for entry in found["inputs"][str(node["id"])]] for node in own}


def picture(page: Page, name: str, renderer: str) -> None:
    """Groups of the graph without the page's bars, as a small PNG."""
    left, top, right, bottom = page.evaluate(BOUNDS)
    boxes = [box for title, *box in page.evaluate(GROUPS) if title in PICTURED[name][renderer]]
    scale = min((WIDTH - 2 * EDGE) / (right - left), 1.0)
    view = {"width": WIDTH, "height": round((bottom - top) * scale) + 2 * EDGE}
    page.set_viewport_size(view)
    page.evaluate(BARE)
    page.evaluate(FIT, [left - EDGE / scale, top - EDGE / scale, scale])
    raw = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    path = IMAGES / f"{name}{RENDERERS[renderer]}.png"
    begin, end = min(x for x, *_ in boxes) - left, max(x + width for x, _, width, _ in boxes) - left
    low = max(y + height for _, y, _, height in boxes) - top
    raw = raw.crop((round(begin * scale), 0, round(end * scale) + 2 * EDGE, round(low * scale) + 2 * EDGE))
    raw.quantize(COLOURS, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)


def open_page(context: BrowserContext, address: str) -> Page:
    page = context.new_page()
    page.goto(address, wait_until="domcontentloaded", timeout=120_000)
    page.wait_for_function("window.app?.graph && window.app.extensionManager", timeout=120_000)
    page.wait_for_timeout(3000)
    return page


def choose_renderer(address: str, renderer: str) -> None:
    """Set the page up for pictures: no tutorial, no map, and one of the two ways in which it draws nodes."""
    settings = SETTINGS | {"Comfy.VueNodes.Enabled": renderer == "nodes2"}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(
        f"{address}/api/settings", json.dumps(settings).encode(), {"Content-Type": "application/json"}
    )
    direct.open(request, timeout=30).close()


def visit(page: Page, name: str, renderer: str, options: argparse.Namespace) -> tuple[list[str], dict[str, list[str]]]:
    """Load a workflow, run it where asked, take its picture. Returns what is wrong, and the inputs that are shown."""
    workflow = json.loads(PAGES[name].read_text(encoding="utf-8"))
    found = page.evaluate(LOAD, [workflow, name])
    wrong = check(name, found)
    if options.run and EMBEDDED in (WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"):
        wrong += run(page, workflow)
    left, top, right, bottom = page.evaluate(BOUNDS)
    page.evaluate(
        FIT, [left, top, min(WIDTH / (right - left), HEIGHT / (bottom - top))]
    )  # only what is in view is drawn
    wrong += layout_faults(page.evaluate(MEASURE, renderer == "nodes2"), page.evaluate(GROUPS))
    if not options.check and renderer in PICTURED.get(name, {}):
        picture(page, name, renderer)
        page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    return wrong, shown(name, found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="where ComfyUI is, such as http://127.0.0.1:8188")
    parser.add_argument("--check", action="store_true", help="take no pictures")
    parser.add_argument(
        "--run", action="store_true", help="run each workflow first, so that results are in the picture"
    )
    parser.add_argument("--renderer", choices=RENDERERS, action="append", help="one alone; both if it is not given")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser")
    parser.add_argument("names", nargs="*", help="workflows; all if none is named")
    options = parser.parse_intermixed_args()
    names = options.names or list(PAGES)
    record = IMAGES / "shown.json"
    pictured = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    failed = False
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        for renderer in options.renderer or RENDERERS:
            choose_renderer(options.address, renderer)
            context = playwright.chromium.launch_persistent_context(
                profile, executable_path=options.chromium, headless=True, args=FLAGS,
                viewport={"width": WIDTH, "height": HEIGHT},
            )  # fmt: skip
            page = open_page(context, options.address)
            for name in names:
                wrong, inputs = visit(page, name, renderer, options)
                print(f"{renderer} {name}: {'; '.join(wrong) or 'whole'}", flush=True)
                failed = failed or bool(wrong)
                if renderer in PICTURED.get(name, {}) and not options.check:
                    pictured[f"{name}{RENDERERS[renderer]}.png"] = inputs
            context.close()
    if not options.check:
        record.write_text(json.dumps(pictured, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return failed


if __name__ == "__main__":
    sys.exit(main())
