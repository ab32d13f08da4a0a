"""Graphs of ComfyUI nodes described in Python, written as the page saves them and as the API takes them.

The page form is LiteGraph's serialised graph, version 0.4 (what `app.graph.serialize()` gives and
`app.loadGraphData()` takes): nodes with their inputs by position, links as rows
[id, from node, from slot, to node, to slot, type]. A node's inputs stand there sockets first, then widgets; its
`widgets_values` follow the schema, with one more value after a seed and after an image to upload.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OWN_SCHEMAS = ROOT / "tests" / "nodes" / "node_schemas.json"
NATIVE_SCHEMAS = ROOT / "tools" / "native_nodes.json"
WIDGETS = ("COMBO", "INT", "FLOAT", "STRING", "BOOLEAN")  # anything else is a socket
MATCHED = "COMFY_MATCHTYPE_V3"  # a socket of any type, the same for all of a node
DYNAMIC_COMBO = "COMFY_DYNAMICCOMBO_V3"  # a COMBO whose values bring further widgets
AUTOGROW = "COMFY_AUTOGROW_V3"  # as many inputs as are connected
UPLOADED = {"image_upload": ["image"], "audio_upload": [None, None]}  # files to upload; what the page keeps after one
FILE_LISTS = ("clip_name", "audio_encoder_name")  # inputs of ComfyUI's own nodes that list the files of one machine
NOTE = "MarkdownNote"  # exists in the page only
COMPARE = "WanCoreCompare"
TITLE, SLOT, WIDGET, GAP, MARGIN = 30, 20, 28, 30, 16  # pixels of the page
NOTE_WIDTH, NOTE_LETTERS = 560, 88  # of a note, and of a line in it
LINES = 88  # of a text field
FOOTER = 24  # where Nodes 2.0 writes the name of a node's pack

Schema = dict[str, Any]


SPELLED = {"wan21": "Wan 2.1", "wan22": "Wan 2.2", "5b": "5B", "14b": "14B", "gpu": "GPU"}


def title_of(name: str) -> str:
    """The name of a workflow's file for the page: ComfyUI's template browser shows it as the title."""
    words = " ".join(SPELLED.get(word, word) for word in name.split("_"))
    return words[0].upper() + words[1:]


def read_schemas() -> dict[str, Schema]:
    """Node id -> {"inputs": [{"name", "type", "optional", "default"?, ...}], "outputs": [{"name", "type"}]}, this
    pack's and those of ComfyUI that the workflows use."""
    return {**json.loads(NATIVE_SCHEMAS.read_text()), **json.loads(OWN_SCHEMAS.read_text())}


def native_schema(info: dict[str, Any]) -> Schema:
    """A node of ComfyUI's `/object_info` in the same form."""
    inputs = []
    for group in ("required", "optional"):
        for name in info["input_order"].get(group, []):
            kind, *rest = info["input"][group][name]
            given = rest[0] if rest else {}
            options = kind if isinstance(kind, list) else given.get("options")
            entry: dict[str, Any] = {"name": name, "type": "COMBO" if isinstance(kind, list) else kind}
            entry["optional"] = group == "optional"
            entry |= {key: given[key] for key in ("default", "multiline", *UPLOADED) if key in given}
            of_one_machine = name in FILE_LISTS or any(given.get(key) for key in UPLOADED)
            if options is not None and not of_one_machine:
                entry["options"] = options
            inputs.append(entry)
    outputs = [{"name": name, "type": kind} for name, kind in zip(info["output_name"], info["output"], strict=True)]
    return {"inputs": inputs, "outputs": outputs}


def incompatibilities(described: Schema, running: Schema) -> list[str]:
    """What keeps a graph made for the node `described` from running in a ComfyUI where it is `running`, in words."""
    now = {entry["name"]: entry for entry in running["inputs"]}
    grown = {name for name, entry in now.items() if entry["type"] in (DYNAMIC_COMBO, AUTOGROW)}
    own = [
        entry
        for entry in described["inputs"]
        if entry["name"].partition(".")[0] not in grown or "." not in entry["name"]
    ]
    names = [entry["name"] for entry in own]
    found = [f"input {name} is gone" for name in names if name not in now]
    found += [f"input {name} is new and needed" for name, entry in now.items()
              if name not in names and not entry["optional"] and entry["type"] != AUTOGROW]  # fmt: skip
    if [name for name in now if name in names] != [name for name in names if name in now]:
        found.append(f"the order of the inputs is {list(now)} instead of {names}")
    for entry in own:
        found += _changes(entry, now[entry["name"]]) if entry["name"] in now else []
    outputs = zip(described["outputs"], running["outputs"], strict=False)
    same = len(running["outputs"]) >= len(described["outputs"])
    if not same or any(
        one["name"] != other["name"] or one["type"] not in ("*", other["type"]) for one, other in outputs
    ):
        found.append(f"the outputs are {running['outputs']} instead of {described['outputs']}")
    return found


def _changes(entry: Schema, now: Schema) -> list[str]:
    name, kind = entry["name"], now["type"]
    if kind != entry["type"] and (entry["type"], kind) != ("COMBO", DYNAMIC_COMBO):
        return [f"input {name} is {kind} instead of {entry['type']}"]
    options = [option["key"] if kind == DYNAMIC_COMBO else option for option in now.get("options", [])]
    return [f"input {name} has no option {option!r}" for option in entry.get("options", []) if option not in options]


@dataclass(frozen=True)
class Output:
    """An output of a node, to be given as another's input."""

    node: Node
    slot: int
    type: str


@dataclass(eq=False)
class Node:
    id: int
    kind: str
    schema: Schema
    values: dict[str, Any]  # input -> Output, or a widget's value
    title: str | None
    width: int
    height: int
    x: int = 0
    y: int = 0

    def __getitem__(self, name: str) -> Output:
        for slot, output in enumerate(self.schema["outputs"]):
            if output["name"] == name:
                return Output(self, slot, self.matched(output["type"]))
        raise KeyError(f"{self.kind} has no output {name!r}: {[o['name'] for o in self.schema['outputs']]}")

    def matched(self, kind: str) -> str:
        """The type of a socket: what is connected to matched ones says what they are."""
        sources = [self.values.get(entry["name"]) for entry in self.schema["inputs"] if entry["type"] == MATCHED]
        connected = [source.type for source in sources if isinstance(source, Output)]
        return connected[0] if kind == MATCHED and connected else kind

    @property
    def sockets(self) -> list[Schema]:
        return [entry for entry in self.schema["inputs"] if entry["type"] not in WIDGETS]

    @property
    def widgets(self) -> list[Schema]:
        return [entry for entry in self.schema["inputs"] if entry["type"] in WIDGETS]


@dataclass
class Workflow:
    """Nodes in columns, a titled group each; notes stand outside groups."""

    name: str
    schemas: dict[str, Schema]
    nodes: list[Node] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    _x: int = 0
    _y: int = 0
    _width: int = 0
    _title: str | None = None
    _members: list[Node] = field(default_factory=list)

    def column(self, title: str | None, x: int, width: int, y: int = 0) -> None:
        """Nodes added from now on stand below each other, in a group of this title."""
        self._close()
        self._x, self._y, self._width, self._title = x, y, width, title

    def add(self, kind: str, *, title: str | None = None, space: int = 0, lines: int = LINES, **values: Any) -> Node:
        """A node; what is not named has its default. `space`: pixels left below it for what it shows when it has run;
        `lines`: the height of each of its text fields. ValueError for an input that the node does not have, or for
        a needed one that is missing."""
        schema = self.schemas[kind]
        known = {entry["name"] for entry in schema["inputs"]}
        if unknown := values.keys() - known:
            raise ValueError(f"{kind} has no input {sorted(unknown)}: {sorted(known)}")
        for entry in schema["inputs"]:
            if entry["name"] not in values and not (entry["optional"] and entry["type"] not in WIDGETS):
                if "default" not in entry and "options" not in entry:
                    raise ValueError(f"{kind} needs {entry['name']!r}")
                values[entry["name"]] = entry["default"] if "default" in entry else entry["options"][0]
        node = Node(len(self.nodes) + 1, kind, schema, values, title, self._width, 0)
        node.height = _height(node, lines) + space
        self._place(node)
        return node

    def note(self, text: str, title: str = "Read me") -> None:
        """A note in Markdown, to the left of all nodes."""
        text = readable(text)
        self._close()
        self._title = None
        node = Node(len(self.nodes) + 1, NOTE, {"inputs": [], "outputs": []}, {"text": text}, title, NOTE_WIDTH, 0)
        node.height = note_height(text)
        self.nodes.append(node)

    def place_notes(self) -> None:
        """Left of the leftmost column, one below the other."""
        left = min(node.x for node in self.nodes if node.kind != NOTE)
        y = min(node.y for node in self.nodes if node.kind != NOTE)
        for node in self.nodes:
            if node.kind == NOTE:
                node.x, node.y = left - NOTE_WIDTH - 3 * MARGIN, y
                y += node.height + TITLE + GAP

    def _place(self, node: Node) -> None:
        node.x, node.y = self._x, self._y + TITLE
        self._y = node.y + node.height + GAP
        self.nodes.append(node)
        self._members.append(node)

    def _close(self) -> None:
        if self._title is not None and self._members:
            first, last = self._members[0], self._members[-1]
            top = first.y - TITLE - MARGIN - 40
            bounding = [first.x - MARGIN, top, first.width + 2 * MARGIN, last.y + last.height + MARGIN - top]
            self.groups.append(
                {
                    "id": len(self.groups) + 1,
                    "title": self._title,
                    "bounding": bounding,
                    "color": "#3f789e",
                    "font_size": 24,
                    "flags": {},
                }
            )
        self._members = []

    # ------------------------------------------------------------------------------------------------------ the forms

    def api(self) -> dict[str, Any]:
        """What `POST /prompt` takes as "prompt"."""
        prompt = {}
        for node in self.nodes:
            if node.kind == NOTE:
                continue
            inputs = {}
            for entry in [*node.widgets, *node.sockets]:
                value = node.values.get(entry["name"])
                if isinstance(value, Output):
                    inputs[entry["name"]] = [str(value.node.id), value.slot]
                elif value is not None:
                    inputs[entry["name"]] = value
            meta = {"title": node.title} if node.title else {}
            prompt[str(node.id)] = {"inputs": inputs, "class_type": node.kind, **({"_meta": meta} if meta else {})}
        return prompt

    def page(self) -> dict[str, Any]:
        """What the page loads."""
        self._close()
        self.place_notes()
        links: list[list[Any]] = []
        incoming: dict[tuple[int, str], int] = {}
        outgoing: dict[tuple[int, int], list[int]] = {}
        for node in self.nodes:
            for slot, entry in enumerate([*node.sockets, *node.widgets]):
                value = node.values.get(entry["name"])
                if isinstance(value, Output):
                    number = len(links) + 1
                    links.append([number, value.node.id, value.slot, node.id, slot, value.type])
                    incoming[node.id, entry["name"]] = number
                    outgoing.setdefault((value.node.id, value.slot), []).append(number)
        order = {node.id: place for place, node in enumerate(self._sorted())}
        compares = any(node.kind == COMPARE for node in self.nodes)  # videos of one seed, in every run
        seeds = "fixed" if compares else "randomize"
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"wancore/workflows/{self.name}")),
            "revision": 0,
            "last_node_id": len(self.nodes),
            "last_link_id": len(links),
            "nodes": [_page_node(node, order[node.id], incoming, outgoing, seeds) for node in self.nodes],
            "links": links,
            "groups": self.groups,
            "config": {},
            "extra": {"ds": {"scale": 0.7, "offset": [40 - min(n.x for n in self.nodes), 120]}},
            "version": 0.4,
        }

    def _sorted(self) -> list[Node]:
        """Every node after those it takes from."""
        done: dict[int, Node] = {}

        def visit(node: Node) -> None:
            if node.id not in done:
                for value in node.values.values():
                    if isinstance(value, Output):
                        visit(value.node)
                done[node.id] = node

        for node in self.nodes:
            visit(node)
        return list(done.values())


def readable(text: str) -> str:
    """Markdown that both node renderers show: Nodes 2.0 draws inline code dark on dark, and cuts wide tables off. Rows
    of tables become entries of a list."""
    lines = []
    for line in text.replace("`", "").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and not set("".join(cells)) <= set("-: ") and cells[0] != "folder in models/":
            lines.append(f"- **{cells[0]}**: {' | '.join(cells[1:])}")
        elif not cells:
            lines.append(line)
    return "\n".join(lines)


def note_height(text: str) -> int:
    """Of the taller renderer."""
    height = 2 * MARGIN
    for line in text.splitlines():
        height += 12 if not line else 40 if line.startswith("#") else 20 * -(-len(line) // NOTE_LETTERS)
    return height


def _height(node: Node, lines: int) -> int:
    rows = max(len(node.sockets), len(node.schema["outputs"]))
    height = rows * SLOT + 16 + (FOOTER if node.kind.startswith("WanCore") else FOOTER // 2)
    for entry in node.widgets:
        height += lines if is_text_field(node.kind, entry) else WIDGET
        height += WIDGET * len(extra_values(entry))
    return height


def is_text_field(kind: str, entry: Schema) -> bool:
    return entry["type"] == "STRING" and (entry.get("multiline", False) or kind == "WanCoreTextEncode")


def extra_values(entry: Schema, seeds: str = "randomize") -> list[Any]:
    """What the page keeps in `widgets_values` after this input's own value. seeds: what it does with a seed after a
    run, unless the input names it itself."""
    if control := entry.get("control_after_generate"):
        return [control if isinstance(control, str) else seeds]
    return next((values for key, values in UPLOADED.items() if entry.get(key)), [])


def _page_node(
    node: Node, order: int, incoming: dict[tuple[int, str], int], outgoing: dict[tuple[int, int], list[int]], seeds: str
) -> dict[str, Any]:
    inputs: list[dict[str, Any]] = []
    for entry in [*node.sockets, *node.widgets]:
        shown: dict[str, Any] = {"name": entry["name"], "type": node.matched(entry["type"])}
        if entry["optional"]:
            shown["shape"] = 7  # a hollow circle
        if entry["type"] in WIDGETS:
            shown["widget"] = {"name": entry["name"]}
        inputs.append({**shown, "link": incoming.get((node.id, entry["name"]))})
    outputs = [
        {**output, "type": node.matched(output["type"]), "links": outgoing.get((node.id, slot))}
        for slot, output in enumerate(node.schema["outputs"])
    ]
    values: list[Any] = [node.values["text"]] if node.kind == NOTE else []
    for entry in node.widgets:
        value = node.values[entry["name"]]
        values += [entry.get("default") if isinstance(value, Output) else value, *extra_values(entry, seeds)]
    if node.kind == NOTE:
        properties, colours = {}, {"color": "#432", "bgcolor": "#653"}
    else:
        pack = "wancore" if node.kind.startswith("WanCore") else "comfy-core"
        properties, colours = {"cnr_id": pack, "Node name for S&R": node.kind}, {}
    return {
        "id": node.id,
        "type": node.kind,
        "pos": [node.x, node.y],
        "size": [node.width, node.height],
        "flags": {},
        "order": order,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        **({"title": node.title} if node.title else {}),
        "properties": properties,
        "widgets_values": values,
        **colours,
    }
