"""What a workflow must be, as the page saved it."""

from __future__ import annotations

import json
import math
import re
from itertools import combinations
from typing import Any

from tools.workflows import (
    WORKFLOWS,
    all_nodes,
    pages,
    read_schemas,
)

MATCHED, DYNAMIC_COMBO, AUTOGROW = "COMFY_MATCHTYPE_V3", "COMFY_DYNAMICCOMBO_V3", "COMFY_AUTOGROW_V3"
ABOVE, MARGIN = 30, 16  # pixels of the page: above a node, around a note's text
SIDEBAR, BARS = 60, 100  # pixels of the page that its bars take, on the left and on top
INSIDE, OUTSIDE = -10, -20  # the ends of a subgraph

PAGES = pages()
TITLES = {name: path.stem for name, path in PAGES.items() if path.parent == WORKFLOWS}  # those of the browser
SCHEMAS = read_schemas()
WIDGETS = ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")  # anything else is a socket
CONTROLS = ("fixed", "increment", "decrement", "randomize")
NOTE = "MarkdownNote"  # exists in the page only
LETTER = 5.9  # pixels of one in a note
FITTED = 20  # pixels that the page adds to the nodes' bounds where it fits them
TEXT = 8 / 14  # scale at which letters have the page's smallest size (LiteGraph.Canvas.MinFontSizeForLOD)


def page_form(name: str) -> dict[str, Any]:
    return json.loads(PAGES[name].read_text(encoding="utf-8"))


def api_form(name: str) -> dict[str, Any]:
    return json.loads((WORKFLOWS / "api" / f"{name}.json").read_text(encoding="utf-8"))


def graphs(page: dict[str, Any]) -> list[dict[str, Any]]:
    """The workflow and its subgraphs."""
    return [page, *page.get("definitions", {}).get("subgraphs", [])]


def notes_of(page: dict[str, Any]) -> list[str]:
    return [node["widgets_values"][0] for node in page["nodes"] if node["type"] == NOTE]


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
