"""Command lines, each run in a copy of this process that has imported the product, and what they print and write."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tools.golden.environment import ROOT

Case = dict[str, Any]
LIMIT = 240.0  # seconds for a case
PROMPT = "a red circle moving right on a blue background"
# Measured, of the machine, or of the moment.
VOLATILE = ("seconds", "seconds_per_step", "total_seconds", "peak_device_gib", "peak_host_gib", "device", "versions",
            "command", "commit", "date", "spread", "ratio", "forward_seconds", "beside_seconds")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ in copies


def preload(work: Path, files: Path) -> None:
    """Import here what a first video imports, so that copies need not. The video is made in a copy: what a run leaves
    behind stays there."""
    listed = work / "modules"
    line = f"generate --model tiny --size 64x48 --frames 5 --steps 2 --device cpu --out first --prompt '{PROMPT}'"

    def first() -> Case:
        case = line_case(line, files)
        listed.write_text("\n".join(sys.modules))
        return case

    run_all({"first": first}, work, 1)
    for name in listed.read_text().split():
        if name.partition(".")[0] in ("wan_core", "av", "PIL", "safetensors", "torch", "sentencepiece"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    gc.freeze()


def run_all(cases: Mapping[str, Callable[[], Case]], work: Path, jobs: int) -> dict[str, Case]:
    """Run each case in a copy of this process, `jobs` at a time. work: a folder for their results."""
    waiting, running, found = list(cases), dict[int, tuple[str, float]](), dict[str, Case]()
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                _run_here(cases[name], work / f"result-{os.getpid()}")
            running[pid] = name, time.monotonic()
        for pid, (name, begin) in list(running.items()):
            late = time.monotonic() - begin > LIMIT
            if late:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                del running[pid]
                result = work / f"result-{pid}"
                died = {"died": f"after more than {LIMIT:g} s" if late else f"status {status}"}
                found[name] = json.loads(result.read_text()) if result.exists() else died
                result.unlink(missing_ok=True)
                print(f"\r{len(found):>4} of {len(cases)}  {name[:90]:<90}", end="", file=sys.stderr, flush=True)
        time.sleep(0.005)
    return {name: found[name] for name in cases}


def _run_here(case: Callable[[], Case], result: Path) -> None:
    """In a copy: run the case, write what it gives and end."""
    os.setsid()
    try:
        written = case()
    except BaseException:  # noqa: BLE001 - the copy must not go on as its parent
        written = {"died": traceback.format_exc()}
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(written))
    partial.rename(result)
    os._exit(0)


def command(line: str, folder: Path) -> tuple[int | str, str, str]:
    """Run `python -m wan_core LINE` in this process: exit code, what it wrote to stdout and to stderr."""
    streams = [folder.parent / f"{folder.name}.{name}" for name in ("out", "err")]
    kept = [os.dup(number) for number in (1, 2)]
    sys.argv = [str(ROOT / "wan_core" / "__main__.py"), *shlex.split(line)]
    os.chdir(folder)
    for number, path in enumerate(streams, 1):
        with path.open("wb") as file:
            os.dup2(file.fileno(), number)
    try:
        sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
        runpy.run_module("wan_core", run_name="__main__", alter_sys=True)
        code: int | str = "no exit code"
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else str(end.code)
    except BaseException as fault:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
        code = f"raised {type(fault).__name__}"
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, old in enumerate(kept, 1):
            os.dup2(old, number)
    return code, *(path.read_text(errors="replace") for path in streams)


def apart(line: str, folder: Path) -> tuple[int, str, str]:
    """The same in a process of its own, which may start others. Ranks that get no CPU for long are ended by the
    product, so on a busy machine it is tried three times."""
    for _ in range(3):
        words = [sys.executable, "-m", "wan_core", *shlex.split(line)]
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode == 0:
            break
    return done.returncode, done.stdout, done.stderr


def line_case(lines: str, files: Path, *, plain: bool = False, own_process: bool = False) -> Case:
    """What command lines, separated by `&&`, print and write in a folder of links to `files`. plain: numbers of seconds
    and GiB are results, not measured."""
    folder = files.parent / f"{os.getpid()}" / "case"
    shutil.copytree(files, folder, copy_function=os.link)
    os.environ["WANCORE_CACHE"] = str(folder.parent / "cache")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    case: Case = {}
    for number, line in enumerate(lines.split(" && "), 1):
        code, out, err = (apart if own_process else command)(line, folder)
        texts = {"out": normal(out, folder, plain), "err": normal(err, folder, plain)}
        case[f"command {number}"] = {"exit": code, **{name: text for name, text in texts.items() if text}}
        if code != 0:
            break
    written = {path: path for path in sorted(folder.rglob("*")) if before.get(path) != path.stat().st_mtime_ns}
    case["files"] = {str(path.relative_to(folder)): contents(path, folder) for path in written if described(path)}
    os.chdir(files)
    shutil.rmtree(folder.parent)
    return case


# --------------------------------------------------------------------------------------------------- what is kept of it


def normal(text: str, folder: Path, plain: bool = False) -> str:
    """`text` without what differs from run to run: folders, times, sizes of memory, addresses, versions."""
    comfyui = [os.environ.get(name) or "no path" for name in ("COMFYUI_PYTHON", "COMFYUI_PATH")]
    for path in (sys.executable, comfyui[0]):
        text = text.replace(path, "PYTHON")
    for path, name in ((comfyui[1], "COMFYUI"), (folder, "FOLDER"), (folder.parent, "WORK"), (ROOT, "CHECKOUT")):
        text = text.replace(str(path), name)
    text = re.sub(r"0x[0-9a-f]{6,}", "0xADDRESS", text)
    text = re.sub(r"\.\d+\.partial", ".PROCESS.partial", text)
    text = re.sub(r"/tmp/\S+", "/tmp/NAME", text)
    text = re.sub(r"127\.0\.0\.1:\d+|localhost:\d+", "HOST:PORT", text)
    text = re.sub(r"step +(\d+/\d+) .*?(\w+ noise)\n", r"step \1 \2\n", text)
    text = re.sub(r"(?m)^(load +\d+ %|frame +\d+/\d+|waiting|still).*\n", "", text)  # shown where it takes long
    if not plain:
        text = re.sub(r"\d+(\.\d+)? (s|ms|min|GiB|MiB)\b", r"N \2", text)
        text = re.sub(r"\b\d+:\d\d\b", "TIME", text)
        text = re.sub(r"\(host N GiB at peak\)", "(memory)", text)
    return re.sub(r" +\n", "\n", text)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def numbers(array: np.ndarray) -> Case:
    """A sum over all of it, and a few numbers that say how far off another array is."""
    array = np.ascontiguousarray(array)
    values = array.astype(np.float64).ravel()
    some = values[np.linspace(0, values.size - 1, 12).astype(int)] if values.size else values
    figures = [values.mean(), values.std(), values.min(), values.max()] if values.size else []
    return {
        "sha256": digest(array.tobytes()), "shape": list(array.shape), "dtype": str(array.dtype),
        "mean, std, min, max": [float(f"{one:.6g}") for one in figures],
        "samples": [float(f"{one:.6g}") for one in some],
    }  # fmt: skip


def described(path: Path) -> bool:
    """Whether it is a file of its own; a folder of pictures is described as one video."""
    return bool(list(path.glob("00001.png"))) if path.is_dir() else not (path.parent / "00001.png").exists()


def contents(path: Path, folder: Path) -> Any:
    """What a file that was written holds."""
    if path.is_dir():
        return numbers(np.stack([pixels(one) for one in sorted(path.glob("*.png"))]))
    if path.suffix == ".json":
        return json.loads(normal(json.dumps(without_volatile(json.loads(path.read_text()))), folder, plain=True))
    if path.suffix == ".safetensors":
        return tensors(path, folder)
    if path.suffix == ".png":
        return numbers(pixels(path))
    if path.suffix in (".mp4", ".webm", ".gif"):
        import av

        with av.open(str(path)) as video:
            frames = [frame.to_ndarray(format="rgb24") for frame in video.decode(video=0)]
            sound = [stream.type for stream in video.streams if stream.type == "audio"]
            return {**numbers(np.stack(frames)), "streams": sound, "rate": str(video.streams.video[0].average_rate)}
    return digest(path.read_bytes())


def pixels(path: Path) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(path))


def tensors(path: Path, folder: Path) -> Case:
    """Each tensor where there are few, else one sum over all."""
    import torch

    from tools.golden.files import read_safetensors

    state, notes = read_safetensors(path)
    kept = {name: normal(value, folder, plain=True) for name, value in notes.items()}
    if "settings" in kept:
        kept["settings"] = without_volatile(json.loads(kept["settings"]))
    if len(state) <= 4:
        found = {name: numbers(value.float().numpy()) for name, value in state.items()}
        return {"metadata": kept, **found}
    sums = hashlib.sha256()
    for name, value in sorted(state.items()):
        sums.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        sums.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return {"metadata": kept, "tensors": len(state), "sha256": sums.hexdigest()[:16]}


def without_volatile(value: Any) -> Any:
    """JSON without measured times and what describes the machine."""
    if isinstance(value, dict):
        return {key: without_volatile(inner) for key, inner in value.items() if key not in VOLATILE}
    return [without_volatile(inner) for inner in value] if isinstance(value, list) else value
