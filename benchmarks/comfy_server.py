"""A ComfyUI server that measures prompts: seconds of each group of nodes, device memory, what its log said."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from benchmarks.comfy_graphs import with_defaults
from benchmarks.comfy_small import CORE_SPARSE, STAND_INS, small_graph
from benchmarks.comfyui import ComfyUI, Graph, Run, find_checkout, make_base, without_page
from benchmarks.device_memory import DeviceMemory
from benchmarks.rows import Row
from wan_core.config import OptionError

PATIENCE = 400.0
# Lines of a server's log that say what was left out, and what computed a native model
SAYS = re.compile(
    r"step cache: \d+ of \d+|read \d+ % of the keys|EasyCache.*(skipped|speedup)|sol_attn|self-attention calls:",
    re.IGNORECASE,
)


@contextmanager
def server_files(scratch: Path | None) -> Iterator[Path]:
    """A base folder for servers. Model files in `scratch` are kept and used again."""
    if scratch is not None and not scratch.is_dir():
        raise OptionError(f"--scratch {scratch} is no folder: make it, or leave it out")
    with tempfile.TemporaryDirectory(prefix="wancore-everyday-", dir=scratch) as temporary:
        has_sparse = (find_checkout() / "comfy_extras" / "nodes_sparse_attention.py").is_file()
        base = make_base(Path(temporary), STAND_INS if has_sparse else STAND_INS | CORE_SPARSE)
        if scratch is not None:
            (base / "models").rmdir()
            (scratch / "models").mkdir(exist_ok=True)
            (base / "models").symlink_to(scratch / "models", target_is_directory=True)
        yield base


def serving(base: Path, device: torch.device) -> Server:
    """A server on a base folder that is used for measuring alone. Raises OptionError where there is no ComfyUI."""
    arguments, cpu = without_page(base), device.type == "cpu"
    environment = {"PYTHONUNBUFFERED": "1"}
    return Server(ComfyUI(find_checkout(), base, environment, arguments, cpu=cpu, patience=PATIENCE), device)


class Server:
    """Measures the prompts of a ComfyUI server, which ends with this context."""

    def __init__(self, comfyui: ComfyUI, device: torch.device) -> None:
        self.comfyui, self.device, self.kinds = comfyui, device, comfyui.get("/object_info")
        self.memory = DeviceMemory()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.stop()
        self.comfyui.stop()

    def run(self, graph: Graph) -> tuple[Row, Run]:
        """Seconds of a prompt by group of nodes, with what the log said. Raises RuntimeError with what failed."""
        graph = small_graph(graph) if self.device.type == "cpu" else graph
        self.memory.reset()
        before = len(self.comfyui.log())
        run = self.comfyui.watch(with_defaults(graph, self.kinds))
        if not run.ok:
            raise RuntimeError(run.fault)
        said = [line.strip() for line in self.comfyui.log()[before:].splitlines() if SAYS.search(line)]
        peak = self.memory.peak_gib
        return times(run) | ({} if peak is None else {"peak_gib": peak}) | ({"said": said[-4:]} if said else {}), run


def times(run: Run) -> Row:
    """Seconds from POST to the end of the last node, and of each group of nodes. What ComfyUI does then, before the
    prompt is over, is left out: every 10 s it collects garbage, for half a second, and tells nothing meanwhile."""
    groups: dict[str, float] = defaultdict(float)
    current, since = "start", run.begin
    for event in run.events:
        if event["type"] == "executing" and event["data"]["node"] is not None:
            groups[current] += event["at"] - since
            current, since = event["data"]["node"].split(".")[0], event["at"]
    over = run.message("execution_success")["timestamp"] / 1000
    groups[current] += over - since
    return {
        "seconds": round(over - run.begin, 3),
        "nodes": {name: round(seconds, 3) for name, seconds in groups.items() if seconds >= 0.0005},
    }


def saved_latents(server: Server, run: Run) -> torch.Tensor:
    """What the prompt's SaveLatent wrote, float32."""
    from safetensors.torch import load_file

    return load_file(server.comfyui.output_file(run, "save.latent"))["latent_tensor"].float()
