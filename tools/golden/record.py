"""Record: command lines in copies of this process, and beside them one ComfyUI in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import version
from pathlib import Path

from tools.golden.comfyui import Server, make_base
from tools.golden.commands import Case, line_case, preload, run_all
from tools.golden.compare import write
from tools.golden.doors import command_cases, run_doors
from tools.golden.environment import ROOT
from tools.golden.files import make_files
from tools.golden.nodes import model_names, run_nodes

Wanted = Callable[[str], bool]


def record(out: Path, only: str, jobs: int) -> int:
    """Run every case that matches and write OUT/golden.json.gz."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        work = Path(name).resolve()
        files = work / "files"
        files.mkdir()
        make_files(ROOT, files)
        wanted = partial(fnmatchcase, pat=only)
        comfyui = start_comfyui(work, files, wanted)
        preload(work, files)
        cases: dict[str, Case] = {}
        for made in (line_cases(files), door_cases(files)):
            cases |= run_all({name: run for name, run in made.items() if wanted(name)}, work, jobs)
        if comfyui is not None:
            cases |= finished(comfyui, work)
    about = {"commit": commit(), "only": only, "comfyui": comfyui is not None, "python": sys.version.split()[0]}
    about |= {package: version(package) for package in ("torch", "numpy", "pillow", "av")}
    path = write(out, about, dict(sorted(cases.items())))
    size, seconds = path.stat().st_size, time.monotonic() - begin
    print(f"\n{len(cases)} cases in {seconds:.0f} s -> {path}, {size / 2**20:.2f} MiB")
    for name, case in cases.items():
        if "died" in case or "Traceback" in json.dumps(case):
            print(f"note: {name} ends in a traceback")
    return 0


def read_lines() -> dict[str, str]:
    """Name of each case of lines.txt, as its line is written there -> its command line."""
    short: dict[str, str] = {}
    found: dict[str, str] = {}
    group = common = ""
    for line in Path(__file__).with_name("lines.txt").read_text().splitlines():
        if named := re.match(r"(\$[A-Z]+) = (.*)", line):
            short[named[1]] = named[2]
        elif begun := re.match(r"(\w+):(.*)", line):
            group, common = begun[1], begun[2].strip()
        elif line.startswith("  "):
            more = "" if line == "  -" else line.strip()
            whole = name = f"{common} {more}".strip()
            while replaced := re.search(r"\$[A-Z]+", whole):
                whole = whole.replace(replaced[0], short[replaced[0]], 1)
            found[f"{group}/{name}"] = whole
    return found


def line_cases(files: Path) -> dict[str, Callable[[], Case]]:
    """Every case of the command line."""

    def run(name: str, line: str) -> Callable[[], Case]:
        return partial(line_case, line, files, plain=line.startswith("plan"), own_process=name.startswith("ranks/"))

    return {name: run(name, line) for name, line in read_lines().items()}


def door_cases(files: Path) -> dict[str, Callable[[], Case]]:
    """The doors of the command line, which offer what their help lists."""
    helps = {name: partial(line_case, f"{name} --help", files) for name in ("plan", "generate")}
    told = {name: case["command 1"]["out"] for name, case in run_all(helps, files.parent, 2).items()}
    offered = {name: set(re.findall(r"(?m)^ +(?:-h, )?(--[a-z-]+)", text)) for name, text in told.items()}
    return {f"doors/{name}": case for name, case in command_cases(files, offered).items()}


# -------------------------------------------------------------------------------------------------------------- ComfyUI


def start_comfyui(work: Path, files: Path, wanted: Wanted) -> int | None:
    """The id of a copy of this process that runs all graphs; None without a ComfyUI."""
    path = os.environ.get("COMFYUI_PATH")
    if path is None:
        print("note: without COMFYUI_PATH, cases that need ComfyUI are left out", file=sys.stderr)
        return None
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            base = work / "base"
            make_base(base, files, model_names(files))
            server = Server(Path(path), base)
            try:
                found = run_nodes(server, wanted)
                found |= {f"doors/{n}": one for n, one in run_doors(server, lambda n: wanted(f"doors/{n}")).items()}
            finally:
                server.stop()
            (work / "comfyui.json").write_text(json.dumps(found))
            code = 0
        except BaseException:  # noqa: BLE001 - the copy must not go on as its parent
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def finished(comfyui: int, work: Path) -> dict[str, Case]:
    _, status = os.waitpid(comfyui, 0)
    if status:
        raise RuntimeError("ComfyUI's part failed: see above")
    return json.loads((work / "comfyui.json").read_text())


def commit() -> str:
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()
