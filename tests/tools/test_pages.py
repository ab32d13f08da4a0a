"""README and docs: every link leads somewhere, every node has its row and help page, both READMEs agree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("web/docs/**/*.md")])
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


NODE = re.compile(r"\bWanCore (?:from [A-Z]+|[A-Z][\w-]*)(?: (?:[A-Z0-9][\w-]*|to|for|with|over|and))*")


@pytest.mark.parametrize("page", [one for one in PAGES if one.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_nodes_and_templates_that_a_page_names_are_there(page: Path) -> None:
    """Nodes by their English names, on English pages; templates by their names."""
    lines = page.read_text(encoding="utf-8").splitlines()
    text = " ".join(line for line in lines if not line.startswith("#"))
    rows = re.findall(r"^\| \[(WanCore .*?)\]", (ROOT / "docs/nodes.md").read_text(encoding="utf-8"), re.MULTILINE)
    named = set() if "zh" in page.name else {match[0] for match in NODE.finditer(text)}
    assert not [name for name in named if not name.lower().startswith(tuple(row.lower() for row in rows))]
    titles = [path.stem for path in (ROOT / "workflows").rglob("*.json")]
    assert [
        name for name in re.findall(r"(?<!\*)\*((?:Wan 2\.2 (?!VAE)|Toy )[^*]*)\*", text) if name not in titles
    ] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}
    assert pages <= set(LINK.findall(index))
