"""Take the pictures of workflows in docs/images/ from ComfyUI's page.

    python tools/screenshots.py http://127.0.0.1:8188

Written, for each workflow of PICTURED and cut to the groups named there: docs/images/<workflow>.png, and
docs/images/shown.json: which inputs of which nodes the graph has. A test compares that file with the schemas, so that
no picture is older than its nodes. Each is run first, so that its results are in the picture. What a page makes of a
workflow is checked by tests/nodes/test_page_templates.py.

Needs `pip install playwright` and a Chromium (`--chromium PATH`, by default the `chromium` of the system), and a
ComfyUI that has this pack in custom_nodes.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
import urllib.request
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright  # pyright: ignore[reportMissingImports]

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.workflows import ROOT, pages

IMAGES, PAGES = ROOT / "docs" / "images", pages()
WIDTH, HEIGHT, EDGE = 1920, 1080, 16  # pixels: of a picture, of the page, around a graph
# Workflow -> the groups to be seen: as wide as a page, in letters that can be read.
PICTURED = {"text_to_video": ("Sampling", "Video")}
COLOURS = 128  # of a picture's palette; a page has few
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--no-proxy-server"]

LOAD = """async ([workflow, name]) => {
  await app.loadGraphData(workflow, true, true, name);
  await new Promise((done) => setTimeout(done, 1000));
  return Object.fromEntries(app.graph.serialize().nodes.map((n) => [n.id, (n.inputs ?? []).map((i) => i.name)]));
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
SETTINGS |= {"Comfy.Graph.CanvasInfo": False, "Comfy.VueNodes.Enabled": False}
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
GROUPS = "() => app.graph.groups.map((group) => [group.title, ...group._bounding])"


def picture(page: Page, name: str) -> dict[str, list[str]]:
    """Load and run a workflow, write its groups without the page's bars as a small PNG. Returns the inputs of its nodes
    by their type; those in boxes have no picture."""
    workflow = json.loads(PAGES[name].read_text(encoding="utf-8"))
    inputs = page.evaluate(LOAD, [workflow, name])
    if (ended := page.evaluate(RUN)) != "execution_success":
        raise RuntimeError(f"running {name} ended with {ended}")
    left, top, right, bottom = page.evaluate(BOUNDS)
    boxes = [box for title, *box in page.evaluate(GROUPS) if title in PICTURED[name]]
    scale = min((WIDTH - 2 * EDGE) / (right - left), 1.0)
    page.set_viewport_size({"width": WIDTH, "height": round((bottom - top) * scale) + 2 * EDGE})
    page.evaluate(BARE)
    page.evaluate(FIT, [left - EDGE / scale, top - EDGE / scale, scale])
    raw = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    begin, end = min(x for x, *_ in boxes) - left, max(x + width for x, _, width, _ in boxes) - left
    low = max(y + height for _, y, _, height in boxes) - top
    raw = raw.crop((round(begin * scale), 0, round(end * scale) + 2 * EDGE, round(low * scale) + 2 * EDGE))
    raw.quantize(COLOURS, method=Image.Quantize.MEDIANCUT).save(IMAGES / f"{name}.png", optimize=True)
    own = [node for node in workflow["nodes"] if node["type"].startswith("WanCore")]
    return {node["type"]: inputs[str(node["id"])] for node in own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="where ComfyUI is, such as http://127.0.0.1:8188")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser")
    options = parser.parse_args()
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(
        f"{options.address}/api/settings", json.dumps(SETTINGS).encode(), {"Content-Type": "application/json"}
    )
    direct.open(request, timeout=30).close()
    shown = {}
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path=options.chromium, headless=True, args=FLAGS,
            viewport={"width": WIDTH, "height": HEIGHT},
        )  # fmt: skip
        page = context.new_page()
        page.goto(options.address, wait_until="domcontentloaded", timeout=120_000)
        page.wait_for_function("window.app?.graph && window.app.extensionManager", timeout=120_000)
        page.wait_for_timeout(3000)
        for name in PICTURED:
            shown[f"{name}.png"] = picture(page, name)
        context.close()
    (IMAGES / "shown.json").write_text(json.dumps(shown, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
