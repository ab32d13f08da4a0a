"""Options that several commands share. Does not import torch, so that `--help` is fast."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wan_core.cli.parsing import add_options, argument
from wan_core.config import Keyframe, LoadOptions, OptionError, PlanNumbers, Request, SkipOptions
from wan_core.config.checks import near_file
from wan_core.config.limits import MAX_JSON
from wan_core.config.model_files import download_hint
from wan_core.config.outputs import Outputs
from wan_core.config.table import from_values, table
from wan_core.models.wan.families import TASKS
from wan_core.models.wan.families.task import NEGATIVE_SOURCE
from wan_core.sampling.plan import SCHEDULES
from wan_core.sampling.presets import CHOICES as PRESETS
from wan_core.sampling.schedules import Window

if TYPE_CHECKING:
    from wan_core.pipeline.pipeline import Engine
    from wan_core.workers.options import WorkerOptions

# Options and arguments that name a file or folder that is read.
INPUTS = (
    *(name for kind in (LoadOptions, Request) for name, one in table(kind).items() if one.path),
    *("latents", "samples", "source"),
)


MODEL_INPUTS = ("--lora", *(f"--{name.replace('_', '-')}" for name, one in table(LoadOptions).items() if one.path))


def add_model_options(parser: argparse.ArgumentParser) -> None:
    task = {"help": (table(LoadOptions)["task"].help or "").format(tasks=", ".join(TASKS))}
    add_options(parser.add_argument_group("models"), LoadOptions, task=task)


def add_memory_plan_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory (with --memory)")
    group.add_argument(
        "--memory", action="store_true", help="print the GPU memory of each phase and the place of each model instead"
    )
    add_options(group, Request, ["width", "frames"], width={"help": "WIDTHxHEIGHT in pixels (default: the task's)"})
    changed: dict[str, Any] = {
        "precision": {"default": "bf16", "help": "of transformer and text encoder"},
        "compile": {"help": "as `generate` would compile"},
    }
    names = ["precision", "compile", "residency", "resident_blocks", "memory_limit"]
    add_options(group, LoadOptions, names, **changed)


def add_request_options(parser: argparse.ArgumentParser, *, prompt: bool = True) -> None:
    group = parser.add_argument_group("video")
    which = group.add_mutually_exclusive_group(required=prompt)
    which.add_argument("--prompt")
    if prompt:
        which.add_argument(
            "--prompts",
            type=Path,
            metavar="FILE.jsonl",
            help="make many videos: a JSON object a line with options of one by name (prompt, seed, size, out, ...); "
            "names without `out` are those of --out with the number of the line. With --gpus each GPU makes one at a "
            "time, or each group of GPUs that --mesh needs. Videos that are there are not made again "
            "(docs/parallel.md)",
        )
    names = [name for name in table(Request) if name not in table(PlanNumbers)]
    negative = {"help": (table(Request)["negative_prompt"].help or "").format(negative=NEGATIVE_SOURCE)}
    add_options(group, Request, names, negative_prompt=negative, camera={"type": argument(camera)})
    add_plan_options(parser)


def add_window_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a part of the schedule, as the sampler node runs it")
    group.add_argument("--denoise", type=float, default=1.0, help="strength of video-to-video (default %(default)s)")
    group.add_argument("--start-step", type=int, default=0, metavar="N", help="the first step, from 0")
    group.add_argument("--end-step", type=int, metavar="N", help="the step before which the run ends")
    group.add_argument("--leftover-noise", action="store_true", help="where it ends early, leave the rest of the noise")


def window_of(options: argparse.Namespace) -> Window | None:
    given = {"start": options.start_step, "end": options.end_step, "leftover": options.leftover_noise}
    window = Window(denoise=options.denoise, **given)
    return None if window == Window() else window


def camera(text: str) -> str:
    """The text of a file of poses, or motions as they are: what they say is checked with the request."""
    path = Path(text)
    try:
        if not os.path.isfile(text):  # False also for what is no name: poses that were read are a default of lists
            return text
        if path.stat().st_size > MAX_JSON:
            raise argparse.ArgumentTypeError(f"{path} has more than {MAX_JSON} bytes: no file of camera poses")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise argparse.ArgumentTypeError(f"cannot read {path} as camera poses ({fault})") from fault


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the task's own)")
    add_options(group, PlanNumbers, solver={"choices": tuple(SCHEDULES)}, preset={"choices": PRESETS})
    group = parser.add_argument_group("step caching and sparse attention (default: off)")
    add_options(group, SkipOptions)


def add_overwrite_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that exist (default: write to a new name, x-1.mp4)"
    )


def inputs_of(options: argparse.Namespace) -> dict[str, str | Path]:
    """What messages call it -> each file or folder that is named to be read."""
    inputs: dict[str, str | Path] = {}
    for name in INPUTS:
        given = getattr(options, name, None)
        if isinstance(given, (str, Path)) and given != "tiny":
            inputs[f"the {name}" if name in ("latents", "source") else f"--{name.replace('_', '-')}"] = given
    for one in getattr(options, "keyframes", None) or ():
        if isinstance(one, Keyframe):
            inputs[f"--keyframe {one.frame}={one.path}: the picture"] = one.path
    for number, lora in enumerate(getattr(options, "loras", ())):
        inputs["--lora" if number == 0 else f"--lora (number {number + 1})"] = lora.path
    return inputs


def check_inputs(options: argparse.Namespace) -> None:
    """Raise OptionError for the first file or folder that is named and does not exist: before anything else is
    refused, as what is missing may be a consequence. `--model` may name what is no folder."""
    for name, given in inputs_of(options).items():
        path = Path(given)
        if getattr(options, "ray", None) is not None and name.startswith(MODEL_INPUTS):
            continue  # the nodes say which they lack
        if name != "--model" and not path.exists():
            hint = near_file(path) or download_hint(path) or ": give an existing file or folder"
            raise OptionError(f"{f'{name} ' if name.startswith('--') else ''}{given} does not exist{hint}")


def outputs_of(options: argparse.Namespace) -> Outputs:
    """The outputs of a command, which are none of its inputs."""
    inputs: dict[str, str | Path | None] = {**inputs_of(options)}
    return Outputs(inputs, overwrite=options.overwrite, tell=lambda words: print(words, file=sys.stderr))


def task_table() -> str:
    """The default options of every task, as a table for the end of a help text."""
    lines = [
        "defaults of the tasks:",
        f"  {'task':<22}{'size':>10}{'frames':>8}{'fps':>5}{'steps':>7}{'shift':>7}  guidance",
    ]
    for task in TASKS.values():
        guidance = f"{task.guidance_high:g}" + (f" high, {task.guidance_low:g} low" if task.two_experts else "")
        size = f"{task.width}x{task.height}"
        numbers = f"{size:>10}{task.frames:>8}{task.fps:>5}{task.steps:>7}{task.shift:>7g}"
        lines.append(f"  {task.name:<22}{numbers}  {guidance}")
    return "\n".join(lines)


def values_of(options: argparse.Namespace) -> dict[str, Any]:
    """The parsed arguments by the names of the fields of options. Raises OptionError."""
    values: dict[str, Any] = {}
    for name, value in vars(options).items():
        values |= value if isinstance(value, dict) else {name: value}
    return values | {"skip": skip_of(options)}


def skip_of(options: argparse.Namespace) -> SkipOptions | None:
    """None where every forward runs. Raises OptionError."""
    skip = from_values(SkipOptions, vars(options))
    return None if skip == SkipOptions() else skip


# ------------------------------------------------------------------------------------------------------- several GPUs


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several GPUs (docs/parallel.md)")
    group.add_argument("--gpus", metavar="N|LIST", help="number of GPUs, a list (0,1), or auto for all; cpu,cpu")
    group.add_argument(
        "--mesh",
        type=lambda text: text.strip().lower(),
        default="auto",
        help="GUIDANCExRINGxULYSSES, for example 2x1x2; layersN, timeN[+MESH] (docs/parallel.md; default %(default)s)",
    )
    group.add_argument(
        "--step-timeout", type=float, default=600.0, metavar="SECONDS", help="stop after so long without progress"
    )
    group.add_argument(
        "--ray",
        metavar="auto|HOST:PORT",
        help="GPUs of a Ray cluster: `auto` is the cluster that this machine belongs to (docs/cluster.md)",
    )


def devices_of(options: argparse.Namespace) -> tuple[str, ...] | None:
    """The GPUs that --gpus names; None without it. Raises OptionError."""
    if options.gpus is None:
        if options.mesh != "auto":
            raise OptionError("--mesh is for several GPUs: give --gpus as well")
        return None
    import torch

    from wan_core.workers.options import parse_devices

    if options.device != "auto":
        raise OptionError("--gpus chooses the devices: leave out --device")
    return parse_devices(options.gpus, torch.cuda.device_count())


def worker_options(options: argparse.Namespace, devices: tuple[str, ...]) -> WorkerOptions:
    from wan_core.workers.options import WorkerOptions

    return WorkerOptions(devices=devices, mesh=options.mesh, step_timeout=options.step_timeout)


def engine_of(options: argparse.Namespace) -> Engine:
    """This process, or the workers that --gpus names, here or on a cluster. Raises OptionError."""
    if options.ray is not None:
        from wan_core.cluster.ranks import cluster_workers
        from wan_core.workers.client import WorkerEngine

        timeout = options.step_timeout
        return WorkerEngine(cluster_workers(options.ray, options.gpus, mesh=options.mesh, step_timeout=timeout))
    devices = devices_of(options)
    if devices is None:
        from wan_core.pipeline.pipeline import LocalEngine

        return LocalEngine()
    from wan_core.workers.client import WorkerEngine
    from wan_core.workers.launcher import Workers

    return WorkerEngine(Workers(worker_options(options, devices)))
