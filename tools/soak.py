"""Send many prompts to a ComfyUI, every tenth interrupted or wrong, and look for what they leave behind.

    python -m tools.soak                                     # 1,000 prompts, then 200 with two workers on the CPU
    python -m tools.soak --prompts 30 --worker-prompts 0     # a short one

The server is started from COMFYUI_PATH (see benchmarks/comfyui.py) with --cache-classic: by default ComfyUI keeps the
results of earlier prompts while memory is free. Its list of finished prompts is cleared, as it grows with every prompt.
The exit code is 1 if memory changes, if a file, thread or process is left over, if an output cannot be read or if a
prompt ends in another way than it must.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from benchmarks.comfy_graphs import with_defaults
from benchmarks.comfyui import Client, ComfyUI, Refused, Run, find_checkout, make_base
from tools.processes import State, below, hidden, look, mapped_memory, parents, ranks_below, resident, wait_until
from tools.soak_prompts import Prompt, make_files, prompts
from wan_core.config import OptionError
from wan_core.media.video import read_video
from wan_lab.results import envelope, result_path, write_result

WINDOW = 100  # prompts whose median memory is compared
OUTCOMES = ("completed", "interrupted", "refused", "failed", "killed")
MIB = 2**20


@dataclass
class Observed:
    """A server, and what was seen of it."""

    server: ComfyUI
    memory: list[int] = field(default_factory=list)  # bytes, after each prompt
    seconds: list[float] = field(default_factory=list)  # of those that completed
    outcomes: Counter[str] = field(default_factory=Counter)
    outputs: list[tuple[Prompt, list[Path]]] = field(default_factory=list)
    processes: set[int] = field(default_factory=set)  # every one that was seen below the server
    shared: set[Path] = field(default_factory=set)  # memory that these processes shared
    violations: list[str] = field(default_factory=list)
    killed: int = 0  # workers

    def send(self, number: int, prompt: Prompt) -> None:
        begun = time.monotonic()
        try:
            run = self._run(prompt)
            outcome, error = outcome_of(run)
            self.server.post("/history", {"delete": [run.id]})
        except Refused as refused:
            run, outcome, error = None, "refused", str(refused)
        if prompt.outcome == "killed":
            allowed = ("killed", "completed") if prompt.step == 0 else ("killed",)
            outcome = "killed" if outcome == "failed" else outcome
        else:
            allowed = (prompt.outcome,)
        self.outcomes[outcome] += 1
        if outcome not in allowed or (outcome in ("refused", "failed", "killed") and prompt.words not in error):
            self.violations.append(
                f"prompt {number} ({prompt.kind}) {outcome} and not {allowed[0]} {prompt.words}: {error[:600]}"
            )
        if run is not None and outcome == "completed":
            self.seconds.append(time.monotonic() - begun)
            self.outputs.append((prompt, self.server.output_files(run, "save")))
        self.memory.append(resident(self.server.process.pid))

    def _run(self, prompt: Prompt) -> Run:
        if prompt.outcome == "killed" and prompt.step == 0:
            self._stop(prompt)
            return self.server.run(prompt.graph)
        if prompt.outcome not in ("interrupted", "killed"):
            return self.server.run(prompt.graph)
        client = Client(self.server.port)
        identity = self.server.queue(prompt.graph, client.name)
        stopped = False
        for event in client.events():
            sampling = event["type"] == "progress" and event["data"]["node"] == "sampler"
            if sampling and event["data"]["value"] >= prompt.step and not stopped:
                stopped = True
                self._stop(prompt)
            if event["type"] in ("execution_interrupted", "execution_error", "execution_success"):
                break
        client.close()
        return self.server.wait(identity)

    def _stop(self, prompt: Prompt) -> None:
        if prompt.outcome == "interrupted":
            self.server.post("/interrupt", {})
            return
        ranks = ranks_below(self.server.process.pid)
        self.note_processes()
        os.kill(ranks[self.killed % len(ranks)], signal.SIGKILL)
        self.killed += 1

    def note_processes(self) -> None:
        found = below(self.server.process.pid)
        self.processes |= found
        self.shared |= {path for pid in (self.server.process.pid, *found) for path in mapped_memory(pid)}

    def state(self, seconds: float = 5.0) -> State:
        """Counts of an idle server: the least of several looks, as what ended takes a moment to go."""
        looks = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            looks.append(look(self.server.process.pid))
            time.sleep(0.25)
        return min(looks, key=lambda one: (one.threads, one.files.total()))


def outcome_of(run: Run) -> tuple[str, str]:
    if run.ok:
        return "completed", ""
    kinds = {kind for kind, _ in run.status["messages"]}
    if "execution_interrupted" in kinds:
        return "interrupted", ""
    return "failed", run.message("execution_error")["exception_message"]


# --------------------------------------------------------------------------------------------------------------- checks


def check_memory(observed: Observed, window: int, tolerance: float) -> dict[str, Any]:
    """Medians of the second and the last `window` prompts."""
    early, late = (
        statistics.median(part) for part in (observed.memory[window : 2 * window], observed.memory[-window:])
    )
    change = late / early - 1
    if abs(change) > tolerance:
        observed.violations.append(f"memory: {early / MIB:.1f} MiB, then {late / MIB:.1f} MiB")
    medians = [statistics.median(observed.memory[at : at + window]) for at in range(0, len(observed.memory), window)]
    return {
        "window": window,
        "early_mib": round(early / MIB, 1),
        "late_mib": round(late / MIB, 1),
        "change": round(change, 5),
        "medians_mib": [round(median / MIB, 1) for median in medians],
    }


def check_state(observed: Observed, before: State) -> dict[str, Any]:
    after = observed.state()
    more = after.files - before.files
    if after.files.total() > before.files.total():
        observed.violations.append(f"open files left over: {dict(more)}")
    if after.threads > before.threads:
        observed.violations.append(f"threads: {before.threads}, then {after.threads}")
    files = {"open_files_early": before.files.total(), "open_files_late": after.files.total()}
    return files | {"threads_early": before.threads, "threads_late": after.threads}


def check_outputs(observed: Observed) -> dict[str, Any]:
    """Open every output; what lies in the folders besides them."""
    unreadable = 0
    for prompt, paths in observed.outputs:
        try:
            assert paths, "no output"
            read_outputs(prompt, paths)
        except (AssertionError, OSError, ValueError) as fault:
            unreadable += 1
            observed.violations.append(f"{prompt.kind}: {[path.name for path in paths]}: {fault}")
    written = {path for _, paths in observed.outputs for path in paths}
    found = {path for path in (observed.server.base / "output").rglob("*") if path.is_file()}
    left = sorted(str(path.relative_to(observed.server.base)) for path in found - written)
    left += sorted(str(path.relative_to(observed.server.base)) for path in hidden(observed.server.base) - found)
    left += sorted(str(path) for path in observed.shared if path.exists())
    if left:
        observed.violations.append(f"files left over: {left[:20]}")
    return {"outputs": len(written), "unreadable": unreadable, "files_left": len(left)}


def read_outputs(prompt: Prompt, paths: list[Path]) -> None:
    """Raises AssertionError, or what reading raises."""
    width, height, frames = prompt.size
    if paths[0].suffix == ".latent":
        latents = load_file(paths[0])["latent_tensor"]
        assert latents.shape[2:] == ((frames + 3) // 4, height // 8, width // 8), tuple(latents.shape)
        assert bool(torch.isfinite(latents).all()), "not finite"
        return
    read = read_video(paths[0]) if paths[0].suffix == ".mp4" else np.stack([np.asarray(Image.open(p)) for p in paths])
    assert read.shape == (frames, height, width, 3), read.shape
    assert read.std() > 0, "one colour"


# ------------------------------------------------------------------------------------------------------------------ run


def soak(name: str, count: int, options: argparse.Namespace, workers: bool) -> tuple[dict[str, Any], list[str]]:
    """A row of the result, and what is wrong."""
    window = min(WINDOW, count // 4)
    with tempfile.TemporaryDirectory() as place:
        base = make_base(Path(place, "base"))
        make_files(base)
        (base / "tmp").mkdir()
        begun = time.monotonic()
        server = ComfyUI(find_checkout(), base, {"TMPDIR": str(base / "tmp")}, ["--cache-classic"])
        observed, before = Observed(server), None
        try:
            kinds = server.get("/object_info")
            for number, prompt in enumerate(prompts(count, options.seed, workers), 1):
                prompt.graph = with_defaults(prompt.graph, kinds)
                observed.send(number, prompt)
                if before is None and number >= 2 * window and prompt.outcome != "killed":
                    before = observed.state()
                if number % 50 == 0:
                    now = observed.memory[-1] / MIB
                    print(f"{name}: {number} of {count}, {now:.0f} MiB", file=sys.stderr, flush=True)
            assert before is not None, "more prompts follow"
            row: dict[str, Any] = {"name": name, "prompts": count}
            row |= {"seconds": round(statistics.median(observed.seconds), 3)}
            row |= {outcome: observed.outcomes[outcome] for outcome in OUTCOMES}
            row |= {"memory": check_memory(observed, window, options.tolerance)} | check_state(observed, before)
            row |= {"workers_killed": observed.killed, "processes_left": end_workers(observed)}
        finally:
            server.stop()
        row |= check_outputs(observed)
        row |= {"minutes": round((time.monotonic() - begun) / 60, 1), "violations": len(observed.violations)}
        if options.keep_log:
            options.keep_log.with_suffix(f".{name.replace(' ', '-')}.log").write_text(server.log())
    return row, observed.violations


def left_by_workers(base: Path) -> set[Path]:
    """Without the folder of the server's own process, which goes when it ends."""
    return {path for path in hidden(base) if not path.name.startswith(".wancore.")}


def end_workers(observed: Observed) -> int:
    """Free the models, which ends the workers; how many processes stay."""
    observed.note_processes()

    def ended() -> bool:
        # Again: ComfyUI does not notice it while it cleans up after a prompt.
        observed.server.post("/free", {"unload_models": True})
        return not parents().keys() & observed.processes and not left_by_workers(observed.server.base)

    try:
        wait_until(ended, 30, "workers, or the folder of their logs")
    except AssertionError as fault:
        observed.violations.append(f"left over after /free: {fault}: {sorted(left_by_workers(observed.server.base))}")
    return len(parents().keys() & observed.processes)


def table(rows: list[dict[str, Any]]) -> str:
    columns = ("prompts", *OUTCOMES, "seconds")
    memory_and_rest = ("MiB early", "MiB late", "change", "open files", "threads", "outputs", "unreadable", "left")
    head = ["run", *columns, *memory_and_rest]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        memory = row["memory"]
        cells = [row["name"], *(str(row[column]) for column in columns)]
        cells += [str(memory["early_mib"]), str(memory["late_mib"]), f"{memory['change']:+.2%}"]
        cells += [f"{row[f'{what}_early']}, {row[f'{what}_late']}" for what in ("open_files", "threads")]
        cells += [str(row["outputs"]), str(row["unreadable"]), str(row["files_left"] + row["processes_left"])]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=1000, help="prompts in ComfyUI's process; 0: none")
    parser.add_argument("--worker-prompts", type=int, default=200, help="prompts with two workers; 0: none")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--tolerance", type=float, default=0.01, help="the share by which memory may change")
    parser.add_argument("--out", type=Path, default=None, help="folder or .json file of the result")
    parser.add_argument("--keep-log", type=Path, default=None, help="copy the server's logs: FILE.<run>.log")
    options = parser.parse_args(arguments)
    for count in (options.prompts, options.worker_prompts):
        if 0 < count < 20 or count < 0:
            parser.error(f"{count} prompts given: 0, or at least 20 of a kind")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        find_checkout()
    except OptionError as absent:
        sys.exit(f"tools.soak: {absent}")
    rows, violations = [], []
    for name, count, workers in (
        ("one process", options.prompts, False),
        ("two workers", options.worker_prompts, True),
    ):
        if count:
            row, found = soak(name, count, options, workers)
            rows.append(row)
            violations += [f"{name}: {one}" for one in found]
    print(table(rows))
    for one in violations:
        print(one)
    if options.out:
        device = torch.device("cpu")
        result = envelope("soak", device, rows, program="tools.soak") | {"seed": options.seed, "violations": violations}
        print(write_result(result, result_path(options.out, "soak", device)))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
