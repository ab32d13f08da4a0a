"""From the page's form of a workflow, with subgraphs, to the form that ComfyUI's API takes.

The page does this itself; here it is done without a browser. Muted nodes go, bypassed ones hand on their input of the
same type, subgraphs are replaced by their nodes (`12:5` is node 5 of the subgraph at node 12).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Graph = dict[str, dict[str, Any]]
NOTES = ("Note", "MarkdownNote")
MUTED, BYPASSED = 2, 4
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")
INSIDE, OUTSIDE = -10, -20  # the ids of a subgraph's own ends


class NotExpanded(ValueError):
    """The workflow has something that this module does not understand."""


@dataclass(frozen=True)
class Link:
    node: int
    slot: int


class Level:
    """The workflow itself, or one use of a subgraph; `prefix` makes its nodes' names unique."""

    def __init__(self, graph: Mapping[str, Any], prefix: str, parent: Level | None, instance: Any) -> None:
        self.prefix, self.parent, self.instance, self.graph = prefix, parent, instance, graph
        self.nodes = {node["id"]: node for node in graph["nodes"]}
        self.links: dict[int, Link] = {}
        self.ends: dict[int, Link] = {}  # output of the subgraph -> where it comes from
        for link in graph["links"]:
            named = isinstance(link, dict)
            number, origin, slot, target, at = (
                (link[key] for key in ("id", "origin_id", "origin_slot", "target_id", "target_slot"))
                if named
                else link[:5]
            )
            self.links[number] = Link(origin, slot)
            if target == OUTSIDE:
                self.ends[at] = Link(origin, slot)

    def given(self, slot: int, name: str) -> Any:
        """What the node that stands for this subgraph gives its input: a value, ("link", ...) or None."""
        inner = self.graph["inputs"][slot]
        entry = next((entry for entry in self.instance.get("inputs", []) if entry["name"] == inner["name"]), {})
        if entry.get("link") is not None:
            return ("link", self.parent, self.parent.links[entry["link"]])  # type: ignore[union-attr]
        values = self.values()
        return ("value", values[inner["name"]]) if inner["name"] in values else None

    def values(self) -> dict[str, Any]:
        """The values of the widgets on the node that stands for this subgraph."""
        names = [entry["name"] for entry in self.graph["inputs"] if self._is_widget(entry)]
        given = self.instance.get("widgets_values") or []
        if not given:  # the older form: widgets show the inner nodes' own values
            return {}
        if len(given) != len(names):
            raise NotExpanded(f"{self.graph['name']} has {len(given)} values for {names}")
        return dict(zip(names, given, strict=True))

    def _is_widget(self, entry: Mapping[str, Any]) -> bool:
        targets = [link for link in self.graph["links"] if link["id"] in (entry.get("linkIds") or [])]
        for link in targets:
            inner = self.nodes.get(link["target_id"])
            if inner is not None and inner["inputs"][link["target_slot"]].get("widget"):
                return True
        return False


def expand(workflow: Mapping[str, Any], info: Mapping[str, Any]) -> Graph:
    """info: `/object_info` of the ComfyUI that is to run it; nodes that it does not know keep their links alone."""
    subgraphs = {one["id"]: one for one in workflow.get("definitions", {}).get("subgraphs", [])}
    made: Graph = {}
    for level, node in _walk(Level(workflow, "", None, None), subgraphs):
        inputs = _values(node, info) | _linked(level, node, subgraphs)
        title = {"_meta": {"title": node["title"]}} if node.get("title") else {}
        made[f"{level.prefix}{node['id']}"] = {"inputs": inputs, "class_type": node["type"], **title}
    return made


def _walk(level: Level, subgraphs: Mapping[str, Any]) -> Iterator[tuple[Level, Any]]:
    """Every node that runs."""
    for node in level.nodes.values():
        if node["type"] in NOTES or node.get("mode", 0) in (MUTED, BYPASSED):
            continue
        if node["type"] in subgraphs:
            yield from _walk(_inner(level, node, subgraphs), subgraphs)
        else:
            yield level, node


def _inner(level: Level, node: Any, subgraphs: Mapping[str, Any]) -> Level:
    return Level(subgraphs[node["type"]], f"{level.prefix}{node['id']}:", level, node)


def _linked(level: Level, node: Any, subgraphs: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in node.get("inputs", []):
        if entry.get("link") is None:
            continue
        source = _source(level, level.links[entry["link"]], entry["name"], subgraphs)
        if source is not None:
            found[entry["name"]] = source
    return found


def _source(level: Level, link: Link, name: str, subgraphs: Mapping[str, Any]) -> Any:
    """[node, slot], a value, or None where nothing is connected in the end."""
    if link.node == INSIDE:
        given = level.given(link.slot, name)
        if given is None or given[0] == "value":
            return None if given is None else given[1]
        return _source(given[1], given[2], name, subgraphs)
    node = level.nodes[link.node]
    if node["type"] in subgraphs and node.get("mode", 0) == 0:
        inner = _inner(level, node, subgraphs)
        return _source(inner, inner.ends[link.slot], name, subgraphs)
    if node.get("mode", 0) == MUTED:
        return None
    if node.get("mode", 0) == BYPASSED or node["type"] == "Reroute":
        kind = node["outputs"][link.slot]["type"]
        passed = [e for e in node.get("inputs", []) if e.get("link") is not None and kind in ("*", e["type"])]
        return _source(level, level.links[passed[0]["link"]], name, subgraphs) if passed else None
    return [f"{level.prefix}{link.node}", link.slot]


# ------------------------------------------------------------------------------------------------- values of widgets


def _values(node: Any, info: Mapping[str, Any]) -> dict[str, Any]:
    """Widget -> value, from the list that the page saves."""
    given, schema = node.get("widgets_values") or [], info.get(node["type"])
    if isinstance(given, dict) or schema is None:
        return dict(given) if isinstance(given, dict) else {}
    values: dict[str, Any] = {}
    rest = list(given)
    for group in ("required", "optional"):
        _take(schema["input"].get(group, {}), "", rest, values)
    return values


def _take(inputs: Mapping[str, Any], prefix: str, rest: list[Any], values: dict[str, Any]) -> None:
    for name, entry in inputs.items():
        kind, options = entry[0], entry[1] if len(entry) > 1 else {}
        if options.get("forceInput") or not (isinstance(kind, list) or kind in WIDGETS):
            continue
        if not rest:  # saved before the node had it
            if "default" in options:
                values[prefix + name] = options["default"]
            continue
        value = values[prefix + name] = rest.pop(0)
        if kind == "COMFY_DYNAMICCOMBO_V3":
            chosen = next(one for one in options["options"] if one["key"] == value)
            for group in ("required", "optional"):
                _take(chosen["inputs"].get(group, {}), f"{prefix}{name}.", rest, values)
        if options.get("control_after_generate") and rest:
            rest.pop(0)
