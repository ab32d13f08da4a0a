"""Check in ComfyUI's page, in both of its node renderers, that no nodes of a workflow overlap, no note is clipped and
no group's title is covered.

    python tools/page_layout.py http://127.0.0.1:8188 [WORKFLOW ...]

Needs what tools/screenshots.py needs. In Nodes 2.0 the size of a node is that of its element in the page.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import urllib.request
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.page_form import title_of
from tools.screenshots import BOUNDS, FIT, FLAGS, RUN, SETTINGS, WIDTH, WORKFLOWS, open_page

RENDERERS = {"classic": False, "nodes 2.0": True}
TITLE = 30  # of a node, above its position
GROUP_TITLE = 34  # below a group's upper edge

LOAD = """async ([workflow, name]) => {
  await app.loadGraphData(workflow, true, true, name);
  await new Promise((done) => setTimeout(done, 1500));
}"""
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


def faults(nodes: list[dict[str, Any]], groups: list[list[Any]]) -> list[str]:
    """In words. nodes: of MEASURE. groups: [title, x, y, width, height]."""
    boxes = [Box(f"{one['type']} {one['id']}", one["x"], one["y"], one["width"], one["height"]) for one in nodes]
    titles = [Box(f"the title of {title}", x, y, width, GROUP_TITLE) for title, x, y, width, _ in groups]
    found = [f"{a.name} overlaps {b.name}" for a, b in combinations(boxes, 2) if a.meets(b)]
    found += [f"{box.name} covers {title.name}" for box in boxes for title in titles if box.meets(title)]
    for title, x, y, width, height in groups:
        around = Box(title, x, y, width, height)
        for box in boxes:
            inside = box.y + box.height <= y + height and box.x >= x and box.x + box.width <= x + width
            if box.meets(around) and not inside:
                found.append(f"{box.name} reaches out of group {title} by {box.y + box.height - y - height:.0f}")
    return found + [f"{one['type']} {one['id']} hides {one['clipped']} pixels" for one in nodes if one["clipped"] > 2]


def setting(address: str, values: dict[str, Any]) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    body, headers = json.dumps(values).encode(), {"Content-Type": "application/json"}
    direct.open(urllib.request.Request(f"{address}/api/settings", body, headers), timeout=30).close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="where ComfyUI is, such as http://127.0.0.1:8188")
    parser.add_argument("--chromium", default=shutil.which("chromium"), help="the browser")
    parser.add_argument("--run", action="store_true", help="run each first: previews and texts make nodes taller")
    parser.add_argument("--sizes", action="store_true", help="print the height of every node")
    parser.add_argument("--pictures", type=Path, help="a folder for a picture of each")
    parser.add_argument("names", nargs="*", help="workflows; all if none is named")
    options = parser.parse_intermixed_args()
    names = options.names or sorted(path.stem for path in (WORKFLOWS / "api").glob("*.json"))
    failed = False
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        for renderer, vue in RENDERERS.items():
            setting(options.address, SETTINGS | {"Comfy.VueNodes.Enabled": vue})
            context = playwright.chromium.launch_persistent_context(
                profile, executable_path=options.chromium, headless=True, args=FLAGS,
                viewport={"width": WIDTH, "height": 1080},
            )  # fmt: skip
            page = open_page(context, options.address)
            for name in names:
                workflow = json.loads((WORKFLOWS / f"{title_of(name)}.json").read_text(encoding="utf-8"))
                page.evaluate(LOAD, [workflow, name])
                if options.run:
                    assert page.evaluate(RUN) == "execution_success", name
                left, top, right, bottom = page.evaluate(BOUNDS)
                scale = min(WIDTH / (right - left), 1080 / (bottom - top))
                page.evaluate(FIT, [left, top, scale])  # what is outside the view is not drawn
                nodes = page.evaluate(MEASURE, vue)
                wrong = faults(nodes, page.evaluate(GROUPS))
                print(f"{renderer}, {name}: {'; '.join(wrong) or 'whole'}", flush=True)
                failed = failed or bool(wrong)
                if options.sizes:
                    for one in nodes:
                        print(f"    {one['type']} {one['id']}: {one['width']:.0f} x {one['height']:.0f}")
                if options.pictures is not None:
                    options.pictures.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=options.pictures / f"{name} {renderer}.png")
            context.close()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
