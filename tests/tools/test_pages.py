"""README and docs: every link leads somewhere, every node has its row and help page, both READMEs agree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_link_leads_nowhere(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        aim = (page.parent / path).resolve() if path else page
        assert aim.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(aim), f"{page.name}: {target}"


def test_every_node_has_a_row_and_a_help_page() -> None:
    nodes = set(json.loads((ROOT / "tests/nodes/node_schemas.json").read_text(encoding="utf-8")))
    rows = re.findall(
        r"^\| \[.*?\]\(\.\./web/docs/(\w+)\.md\)", (ROOT / "docs/nodes.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(rows) == sorted(nodes), "docs/nodes.md needs one row a node"


def pictures_of_graphs() -> set[str]:
    """The pictures of workflows that a page shows."""
    names = {path.stem for path in (ROOT / "workflows/api").glob("*.json")}
    shown = {Path(target).name for page in PAGES for target in LINK.findall(page.read_text(encoding="utf-8"))}
    return {name for name in shown if name.endswith(".png") and name[:-4].removesuffix("_nodes2") in names}


def test_no_picture_is_older_than_the_nodes_that_it_shows() -> None:
    """What the pictures show was recorded when they were taken, by tools/screenshots.py."""
    recorded = json.loads((ROOT / "docs/images/shown.json").read_text(encoding="utf-8"))
    schemas = json.loads((ROOT / "tests/nodes/node_schemas.json").read_text(encoding="utf-8"))
    assert pictures_of_graphs() >= {"text_to_video.png", "text_to_video_nodes2.png"}
    for picture in sorted(pictures_of_graphs()):
        for kind, inputs in recorded[picture].items():
            now = [entry["name"] for entry in schemas[kind]["inputs"]]
            assert sorted(inputs) == sorted(now), f"{picture} shows an older {kind}: run tools/screenshots.py --run"
