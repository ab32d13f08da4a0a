"""The doors of the product: what the same option set gives through each, and where they disagree."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from tools.golden.comfyui import Server
from tools.golden.commands import PROMPT, Case, line_case
from tools.golden.graphs import door
from tools.golden.options import command_line, model_line, option_sets

COMFYUI_DOORS = ("sampler", "preview", "calibrate", "native")
DOORS = ("plan", "generate", *COMFYUI_DOORS)
KINDS = ("first refuses", "second refuses", "other plan", "other latents", "other words")
OUT = f"--prompt '{PROMPT}' --negative-prompt '' --device cpu --save-latents l.safetensors --report r.json"


# --------------------------------------------------------------------------------------------------------------- record


def command_cases(files: Path, offered: dict[str, set[str]]) -> dict[str, Callable[[], Case]]:
    """offered: the options that the help of each command lists."""
    found: dict[str, Callable[[], Case]] = {}
    for one in option_sets():
        words = model_line(one.task)
        line = command_line(one, offered["plan"])
        if line is not None and "--size" not in line:  # it takes a size with --memory alone
            named = " ".join(re.findall(r"--(?:model|high|low) \S+", words)) + f" --task {one.task}"
            line = f"plan {named} {line}"
            found[f"{one.name}/plan"] = partial(line_case, f"{line} && {line} --json", files, plain=True)
        line = command_line(one, offered["generate"])
        if line is not None:
            start = "--from-video video.avi" if "--denoise" in line else ""
            out = "" if "--out" in words else "--out v"
            line = f"generate {words} --size 64x64 --frames 5 {OUT} {out} {start} {line}"
            found[f"{one.name}/generate"] = partial(line_case, line, files)
    return found


def run_doors(server: Server, wanted: Callable[[str], bool]) -> dict[str, Case]:
    info, found = server.get("/object_info"), {}
    for one in option_sets():
        for name in COMFYUI_DOORS:
            if wanted(f"{one.name}/{name}") and (graph := door(name, one, info)) is not None:
                found[f"{one.name}/{name}"] = server.run(graph)
    return found


# ----------------------------------------------------------------------------------------------------------- comparison


class Answer(NamedTuple):
    """What a door says of an option set. refused: its words; None where it accepts. plan: the first line of the plan
    that it shows; "": it shows none. latents: a sum over those that it made."""

    refused: str | None
    plan: str = ""
    latents: str | None = None


def command_answer(case: Case) -> Answer:
    last = case[max(name for name in case if name.startswith("command"))]
    text = last.get("err", "")
    if last["exit"] not in (0, 1) or "Traceback" in text:
        errors = [line.partition(": ")[2] for line in text.splitlines() if line.startswith("python -m wan_core")]
        return Answer(errors[-1] if errors else f"exit code {last['exit']}: {text[-300:]}")
    report = case["files"].get("r.json")
    if report is None:
        return Answer(None, case["command 1"]["out"].partition("\n")[0])
    settings, phases = report["settings"], report["phases"]
    steps = [f"{phases[name]['steps']} {name.split()[1]}-noise" for name in phases if name.startswith("denoise")]
    plan = f"{settings['task']}: {settings['steps']} steps, {settings['solver']}, shift {settings['shift']:g}, boundary"
    latents = case["files"].get("l.safetensors", {}).get("latents", {})
    return Answer(None, f"{plan} {settings['boundary']:g} ({', '.join(steps)})", latents.get("sha256"))


def node_answer(case: Case) -> Answer:
    if "refused" in case:
        return Answer("; ".join(f"{node}: {word}" for node, words in case["refused"].items() for word in words))
    if "failed" in case:
        return Answer(case["failed"].partition(": ")[2])
    shown = next((one["text"][0].partition("\n")[0] for name, one in case.items() if name.endswith(" door")), "")
    latents = [one["latents"][0]["sha256"] for one in case.values() if "latents" in one]
    return Answer(None, shown if "steps" in shown else "", latents[0] if latents else None)


def answer(case: Case) -> Answer:
    if "died" in case:
        return Answer(f"DIED {case['died'][-300:]}")
    return command_answer(case) if "command 1" in case else node_answer(case)


def comparable(words: str) -> str:
    """Refusals are the same where they differ only in how an input is called, and where ComfyUI itself refuses a value
    by the range or the list of a widget."""
    if re.search(r"Value \S+ (smaller|bigger) than (min|max)|Value not in list", words):
        return ""
    named = r"argument --[\w-]+: |--[\w-]+ |WanCore\w+: |Exception when validating inner node: |`.*?`|\w+/|\W"
    return re.sub(named, "", words).lower()


def disagreement(first: Answer, second: Answer, native: bool) -> str | None:
    """The kind of difference between two answers; None: they agree. native: one is a plan of ComfyUI's own sampler,
    which has its own schedule."""
    if first.refused is None and second.refused is None:
        plans = [re.sub(r" from sigma \S+ to \S+,", ",", one.plan) for one in (first, second)]
        length = min(map(len, plans)) if any(plan.endswith(")") for plan in plans) else None  # a report's has no more
        if not native and all(plans) and plans[0][:length] != plans[1][:length]:
            return "other plan"
        both = first.latents and second.latents
        return "other latents" if both and first.latents != second.latents else None
    if first.refused is None or second.refused is None:
        return "second refuses" if first.refused is None else "first refuses"
    words = [comparable(one.refused) for one in (first, second)]
    return None if words[0] == words[1] or "" in words else "other words"


def disagreements(cases: dict[str, Case]) -> list[tuple[str, str, str, str, str, str]]:
    """(first door, second door, kind, option set, what each says), of the cases doors/SET/DOOR of a recording."""
    sets: dict[str, dict[str, Answer]] = {}
    for name, case in cases.items():
        if name.startswith("doors/"):
            options, _, one = name.removeprefix("doors/").rpartition("/")
            sets.setdefault(options, {})[one] = answer(case)
    found = []
    for options, by_door in sets.items():
        for first, second in combinations([name for name in DOORS if name in by_door], 2):
            kind = disagreement(by_door[first], by_door[second], native="native" in (first, second))
            if kind is not None:
                told = (by_door[name] for name in (first, second))
                field = "latents" if kind == "other latents" else "plan"
                found.append((first, second, kind, options, *(one.refused or getattr(one, field) for one in told)))
    return found


def table(cases: dict[str, Case]) -> str:
    """How often each pair of doors disagrees, and a short example of each way in which they do."""
    found = disagreements(cases)
    lines = [f"| doors | {' | '.join(KINDS)} |", "|---" * (len(KINDS) + 1) + "|"]
    for pair in combinations(DOORS, 2):
        counts = [sum(one[:3] == (*pair, kind) for one in found) for kind in KINDS]
        lines.append(f"| {', '.join(pair)} | {' | '.join(str(count or '') for count in counts)} |")
    ways: dict[tuple[str, ...], tuple[str, ...]] = {}
    for one in sorted(found, key=lambda one: len(one[3])):
        ways.setdefault((*one[:3], *(re.sub(r"[\d.]+", "N", words)[:60] for words in one[4:])), one)
    for first, second, kind, options, *told in sorted(ways.values()):
        lines += ["", f"{first} / {second}, {kind}: {options}", f"    {first}: {told[0]}", f"    {second}: {told[1]}"]
    return "\n".join(lines)
