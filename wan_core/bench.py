"""Time forwards of the transformer: ours in one or more settings, peers beside them on the same weights in the same
run.

    python -m wan_core bench --size 832x480 --setting forward --setting diffusers
    python -m wan_core bench --suite guidance

Results are JSON, in the form that tools/readme_tables.py reads: {"suite", "command", "commit", "device", "versions",
"rows"}; `seconds` is the median of the runs, `spread` their range, `peak_gib` device memory with weights, `ratio` =
seconds of the row `ratio_to` over ours, `error` the relative difference from that row's output.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from wan_core.model import WanModel

# suite -> (sizes as WIDTHxHEIGHTxFRAMES, settings, what ratios refer to)
SUITES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "forward": (("832x480x81", "1280x720x81"), ("diffusers", "forward"), "diffusers"),
    "guidance": (
        ("208x112x17", "416x240x17", "416x240x81", "832x480x33", "832x480x81"),
        ("sequential", "batched"),
        "sequential",
    ),
}
SETTINGS = {
    "forward": "one forward of one branch",
    "sequential": "both guidance branches, one forward each",
    "batched": "both guidance branches in one forward",
    "diffusers": "diffusers' WanTransformer3DModel, eager, on the same weights",
    "attention:NAME": "one forward with that attention backend",
}


def add_bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--suite", choices=tuple(SUITES), help="a fixed list of sizes and settings, as in the README's tables"
    )
    parser.add_argument(
        "--model", help="random:TASK, tiny, or a transformer file (default: random:t2v-A14B on a GPU, tiny on a CPU)"
    )
    parser.add_argument("--size", action="append", help="WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, repeatable")
    parser.add_argument(
        "--setting", action="append", help="repeatable: " + "; ".join(f"{k}: {v}" for k, v in SETTINGS.items())
    )
    parser.add_argument("--layers", type=int, help="only this many blocks (to measure on less memory)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs after one warm-up (default %(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--out", type=Path, help="JSON file, or a folder for one named after suite, device and day")


@dataclass
class Case:
    """One model at one size, and the inputs of a forward."""

    model: WanModel
    size: str
    tokens: int
    x: torch.Tensor
    timestep: torch.Tensor
    contexts: tuple[torch.Tensor, torch.Tensor]


def run_bench(options: argparse.Namespace) -> int:
    import torch

    from wan_core.models import choose_device

    device = choose_device(options.device)
    sizes, settings, reference = SUITES[options.suite] if options.suite else ((), (), "")
    name = options.model or ("random:t2v-A14B" if device.type == "cuda" else "tiny")
    sizes = options.size or sizes or (("832x480x81",) if device.type == "cuda" else ("96x96x17",))
    settings = options.setting or settings or ("forward", "sequential", "batched")
    first = reference if reference in settings else settings[0]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    model, stride = bench_model(name, device, dtype, options.layers)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for size in sizes:
            case = make_case(model, size, stride)
            rows += measure_case(case, [first, *(s for s in settings if s != first)], options.runs)
    result = envelope(options.suite or "bench", device, rows)
    result["model"] = {
        "name": name,
        "layers": model.config.num_layers,
        "dim": model.config.dim,
        "dtype": options.precision,
    }
    print(table(rows))
    path = write_result(result, options.out, device)
    if path is not None:
        print(path)
    return 0


def bench_model(name: str, device: torch.device, dtype: torch.dtype, layers: int | None) -> tuple[WanModel, int]:
    """The transformer to measure and the pixels per latent cell of its VAE."""
    from dataclasses import replace

    from wan_core.attention.registry import resolve_attention
    from wan_core.checkpoint import load_dit
    from wan_core.checkpoint.random import random_module
    from wan_core.config import OptionError, find_task
    from wan_core.model import WanModel
    from wan_core.models import RANDOM, TINY
    from wan_core.optimize import optimize

    if name.startswith("random:"):
        task = find_task(name.removeprefix("random:"))
        if task.name not in RANDOM:
            raise OptionError(f"random weights are made for {', '.join(RANDOM)}; for {task.name} use --model tiny")
        config, vae = RANDOM[task.name]
        model = random_module(replace(config, num_layers=layers or config.num_layers), device=device, dtype=dtype)
        stride = vae.spatial_stride
    else:
        model = load_dit(TINY / "t2v_high.safetensors" if name == "tiny" else name, device=device, dtype=dtype)
        stride = 16 if model.config.in_channels == 48 else 8
        if layers is not None:
            del model.blocks[layers:]
    assert isinstance(model, WanModel)
    return optimize(model, attend=resolve_attention("auto", device)[1]), stride


def make_case(model: WanModel, size: str, stride: int) -> Case:
    """Random inputs for WIDTHxHEIGHT[xFRAMES]. Raises OptionError for a size that the model cannot take."""
    import torch

    from wan_core.config import OptionError, check_size

    numbers = size.lower().split("x")
    if len(numbers) not in (2, 3) or not all(n.isdecimal() for n in numbers):
        raise OptionError(f"size {size!r} given; write WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES, for example 832x480x81")
    width, height, frames = (*map(int, numbers), 81)[:3]
    check_size(width, height, frames, multiple=stride * model.config.patch_size[1])
    weight = model.patch_embedding.weight
    generator = torch.Generator().manual_seed(0)
    shape = (1, model.config.in_channels, (frames - 1) // 4 + 1, height // stride, width // stride)
    x = torch.randn(shape, generator=generator).to(weight.device)
    contexts = [torch.randn(1, n, model.config.text_dim, generator=generator).to(weight) for n in (24, 12)]
    tokens = shape[2] * shape[3] * shape[4] // 4
    timestep = torch.tensor([900.0], device=weight.device)
    return Case(model, f"{width}x{height}x{frames}", tokens, x, timestep, (contexts[0], contexts[1]))


def measure_case(case: Case, settings: list[str], runs: int) -> list[dict[str, Any]]:
    """A row for each setting; ratios and errors refer to the first."""
    rows, reference = [], None
    for setting in settings:
        forward = SETTING_FACTORIES[setting.partition(":")[0]](case, setting.partition(":")[2])
        seconds, peak, output = timed(forward, case.x.device, runs)
        row = {
            "name": setting,
            "size": case.size,
            "tokens": case.tokens,
            "seconds": round(statistics.median(seconds), 5),
            "spread": round(max(seconds) - min(seconds), 5),
            "peak_gib": round(peak, 3),
        }
        if reference is None:
            reference = (row, output)
        row["ratio"] = round(reference[0]["seconds"] / row["seconds"], 4)
        row["ratio_to"] = reference[0]["name"]
        if output.shape == reference[1].shape:
            row["error"] = float(f"{float((output - reference[1]).norm() / reference[1].norm()):.3g}")
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    return rows


def timed(
    forward: Callable[[], torch.Tensor], device: torch.device, runs: int
) -> tuple[list[float], float, torch.Tensor]:
    """Seconds of `runs` calls after a warm-up, the peak of device memory in GiB (weights included), and the output."""
    import torch

    from wan_core.report import GIB

    cuda = device.type == "cuda"
    forward()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    seconds, output = [], None
    for _ in range(runs):
        output = None
        begin = time.perf_counter()
        output = forward()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    assert output is not None
    return seconds, torch.cuda.max_memory_allocated(device) / GIB if cuda else 0.0, output.float()


# ------------------------------------------------------------------------------------------------------------- settings


def _forward(case: Case, _: str) -> Callable[[], torch.Tensor]:
    text = case.model.prepare_text(case.contexts[0])
    return lambda: case.model(case.x, case.timestep, text)


def _sequential(case: Case, _: str) -> Callable[[], torch.Tensor]:
    import torch

    texts = [case.model.prepare_text(c) for c in case.contexts]
    return lambda: torch.cat([case.model(case.x, case.timestep, text) for text in texts])


def _batched(case: Case, _: str) -> Callable[[], torch.Tensor]:
    import torch

    from wan_core.denoise import stack_text

    text = case.model.prepare_text(stack_text(list(case.contexts), 1))
    x, timestep = torch.cat([case.x, case.x]), torch.cat([case.timestep, case.timestep])
    return lambda: case.model(x, timestep, text)


def _attention(case: Case, backend: str) -> Callable[[], torch.Tensor]:
    from wan_core.attention.registry import resolve_attention
    from wan_core.optimize import optimize

    attend = resolve_attention(backend, case.x.device)[1]
    text = case.model.prepare_text(case.contexts[0])

    def forward() -> torch.Tensor:
        before = case.model.blocks[0].self_attn.attend
        optimize(case.model, attend=attend)
        try:
            return case.model(case.x, case.timestep, text)
        finally:
            optimize(case.model, attend=before)

    return forward


def _diffusers(case: Case, _: str) -> Callable[[], torch.Tensor]:
    """The peer on the very same parameters, no copy; what diffusers keeps in float32 when it loads is float32 here
    too."""
    import torch
    import torch.nn.functional as F
    from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed, WanTransformer3DModel

    from wan_core.checkpoint.layouts import diffusers_dit_names

    config = case.model.config
    with torch.device("meta"):
        peer = WanTransformer3DModel(
            patch_size=config.patch_size,
            num_attention_heads=config.num_heads,
            attention_head_dim=config.head_dim,
            in_channels=config.in_channels,
            out_channels=config.out_channels,
            text_dim=config.text_dim,
            freq_dim=config.freq_dim,
            ffn_dim=config.ffn_dim,
            num_layers=config.num_layers,
            eps=config.eps,
        )
    names = diffusers_dit_names(peer.state_dict().keys())
    assert names is not None
    ours = case.model.state_dict()
    peer.load_state_dict({theirs: ours[name] for theirs, name in names.items()}, assign=True)
    peer.rope = WanRotaryPosEmbed(config.head_dim, config.patch_size, 1024).to(case.x.device)
    for name, module in peer.named_modules():
        if any(name.split(".")[-1] == kept for kept in peer._keep_in_fp32_modules):
            module.float()
    for name, parameter in peer.named_parameters():
        if "scale_shift_table" in name:
            parameter.data = parameter.data.float()
    context = F.pad(case.contexts[0], (0, 0, 0, config.text_len - case.contexts[0].shape[1]))
    x = case.x.to(context.dtype)
    return lambda: peer.eval()(x, case.timestep, context, return_dict=False)[0]


SETTING_FACTORIES: dict[str, Callable[[Case, str], Callable[[], torch.Tensor]]] = {
    "forward": _forward,
    "sequential": _sequential,
    "batched": _batched,
    "attention": _attention,
    "diffusers": _diffusers,
}

# -------------------------------------------------------------------------------------------------------------- results


def envelope(suite: str, device: torch.device, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What every committed result says about itself."""
    import torch

    from wan_core.report import device_name

    versions = {"python": platform.python_version(), "torch": torch.__version__}
    if device.type == "cuda":
        versions |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    if any(row["name"] == "diffusers" for row in rows):
        import diffusers

        versions["diffusers"] = diffusers.__version__
    return {
        "suite": suite,
        "command": " ".join(["python -m wan_core", *sys.argv[1:]]),
        "commit": commit(),
        "device": device_name(device),
        "versions": versions,
        "rows": rows,
    }


def commit() -> str | None:
    """The commit that is measured, where the code runs from a checkout."""
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parent,
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_result(result: dict[str, Any], out: Path | None, device: torch.device) -> Path | None:
    if out is None:
        return None
    if out.suffix != ".json":
        out.mkdir(parents=True, exist_ok=True)
        short = result["device"].split(",")[0].replace("NVIDIA ", "").replace(" ", "-").lower()
        out = out / f"{result['suite']}-{short}-{date.today():%Y%m%d}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    return out


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'size':<14}{'tokens':>8}  {'setting':<18}{'seconds':>10}{'spread':>9}{'peak GiB':>10}"
        f"{'ratio':>8}{'error':>10}"
    ]
    for r in rows:
        lines.append(
            f"{r['size']:<14}{r['tokens']:>8}  {r['name']:<18}{r['seconds']:>10.4f}{r['spread']:>9.4f}"
            f"{r['peak_gib']:>10.2f}{r['ratio']:>8.3f}{r.get('error', float('nan')):>10.2g}"
        )
    return "\n".join(lines)
