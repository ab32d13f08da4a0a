"""A graph with ComfyUI's loop (0.36 and newer) as one without, for versions that have none: what Start Loop expands to.

The nodes between Start Loop and End Loop stand there once for each pass. A carried value that is not there yet is left
out where an input is optional, and `nothing` stands for it where it is needed and not used.
"""

from __future__ import annotations

from typing import Any

from tools.workflows import read_schemas

Graph = dict[str, Any]
INDEX, FIRST, LAST, ITEM, CARRIED = range(5)  # outputs of Start Loop


def of_kind(graph: Graph, kind: str) -> str:
    return next(key for key, one in graph.items() if one["class_type"] == kind)


def links_of(node: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: value for name, value in node["inputs"].items() if isinstance(value, list)}


def reached(graph: Graph, key: str) -> set[str]:
    """All nodes that `key` takes something from, and itself."""
    keys, todo = set[str](), [key]
    while todo:
        if (one := todo.pop()) not in keys:
            keys.add(one)
            todo += [link[0] for link in links_of(graph[one]).values()]
    return keys


def unrolled(graph: Graph, passes: int, nothing: list[Any]) -> Graph:
    """`graph` with so many passes of its loop, of which End Loop gives the last value."""
    start, end = of_kind(graph, "StartLoop"), of_kind(graph, "EndLoop")
    body = {key for key in reached(graph, end) if start in reached(graph, key)} - {start, end}
    schemas, closing = read_schemas(), graph[end]["inputs"]
    assert not closing["accumulate"] and graph[start]["inputs"]["mode"] == "simple"
    nodes = {key: one for key, one in graph.items() if key not in body | {start, end}}
    carried: list[Any] | None = None

    def copied(link: list[Any], number: int) -> list[Any]:
        return [f"{number}_{link[0]}", link[1]] if link[0] in body else link

    for number in range(passes):
        constants = {INDEX: number, FIRST: number == 0, LAST: number == passes - 1}
        for key in body:
            inputs = dict(graph[key]["inputs"])
            optional = {entry["name"] for entry in schemas[graph[key]["class_type"]]["inputs"] if entry["optional"]}
            for name, (source, slot) in links_of(graph[key]).items():
                if source != start:
                    inputs[name] = copied([source, slot], number)
                elif slot in constants:
                    inputs[name] = constants[slot]
                elif carried is None and name in optional:
                    del inputs[name]
                else:
                    inputs[name] = nothing if carried is None else carried
            nodes[f"{number}_{key}"] = {**graph[key], "inputs": inputs}
        carried = copied(closing["next_iteration_value"], number)
    result = copied(closing["output_value"], passes - 1)
    for one in nodes.values():
        one["inputs"] = {name: result if value == [end, 0] else value for name, value in one["inputs"].items()}
    return nodes
