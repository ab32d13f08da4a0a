"""The command line: generate, warmup, decode, quantize, plan, calibrate, quality, report-card, check, inspect, models,
doctor.

User errors (a number out of range, a wrong file) end with one line on stderr and exit code 2. Everything is checked
before work starts. Finished latents are written to disk before decoding, and stay there if a later phase fails.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from wan_core import __version__
from wan_core.cli.generate import run_decode, run_generate, run_warmup
from wan_core.cli.inform import PLANNED_TASK, run_check, run_doctor, run_inspect, run_plan, run_quantize
from wan_core.cli.libraries import missing_library
from wan_core.cli.models import add_models_options, run_models
from wan_core.cli.options import (
    add_memory_plan_options,
    add_model_options,
    add_overwrite_option,
    add_plan_options,
    add_request_options,
    add_window_options,
    add_worker_options,
    check_inputs,
    task_table,
)
from wan_core.cli.parsing import Parser, add_options, program
from wan_core.cli.prompt_list import run_list
from wan_core.cli.quality import (
    add_calibrate_options,
    add_card_options,
    add_quality_options,
    run_calibrate,
    run_card,
    run_quality,
)
from wan_core.config import PRECISIONS, LoadOptions, PlanNumbers, Request, UserError
from wan_core.config.printing import plain_output
from wan_core.config.table import table
from wan_core.models.wan.families import TASKS
from wan_core.sampling.build import PlanRequest

PIPE_CLOSED = 141  # as a shell says of a program that SIGPIPE ended
OUT_HELP = "the video to write: .mp4; without ending, a folder of PNG files (default %(default)s)"
OUT_OF_MEMORY = "Try --residency stream, a smaller --size or fewer --frames."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns the exit code: 0 done, 1 a check failed, 2 user error, 3 out of memory,
    130 interrupted, 141 nobody reads the output any more."""
    with plain_output():
        return _main(sys.argv[1:] if arguments is None else list(arguments))


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:
        return run_benchmarks(arguments[1:])
    if not arguments:
        build_parser().print_help(sys.stderr)
        return 2
    try:
        options = parse(arguments)
        code = run_command(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # what reads the output has ended, as in `... | head`
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # a stream without a descriptor has nothing left to flush at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return PIPE_CLOSED


def run_command(options: argparse.Namespace) -> int:
    level, form = (logging.INFO, "%(name)s: ") if options.verbose else (logging.WARNING, "warning: ")
    logging.basicConfig(level=level, format=f"{form}%(message)s")

    def run() -> int:
        check_inputs(options)
        return options.run(options)

    return report_faults(f"{program()} {options.command}", run)


def report_faults(name: str, run: Callable[[], int]) -> int:
    """Call `run` and return its exit code. User errors and out of memory print a line that begins with `name`."""
    try:
        return run()
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as fault:
        advice = missing_library(fault.name or "")
        if advice is None:
            raise
        print(f"{name}: {advice}", file=sys.stderr)
        return 2
    except (UserError, OSError) as fault:
        logging.getLogger(__name__).info("raised here", exc_info=True)
        print(f"{name}: {fault}", file=sys.stderr)
        return 2
    except RuntimeError as fault:
        if type(fault).__name__ != "OutOfMemoryError":  # torch's, without importing torch
            raise
        print(f"{name}: out of memory ({fault}). {OUT_OF_MEMORY}", file=sys.stderr)
        return 3


def run_benchmarks(arguments: Sequence[str]) -> int:
    """Run `python -m benchmarks` in the checkout that this package lies in."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        print(
            f"{program()} bench: the benchmarks are in the source repository and not in the installed package. "
            "Run `python -m benchmarks SUITE` in a checkout.",
            file=sys.stderr,
        )
        return 2
    search = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": search}).returncode


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command. Ends the program with exit code 2 where they are wrong, 0 after --help."""
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


class MainParser(Parser):
    """With the parser of each command by name."""

    commands: dict[str, Parser]


def build_parser() -> MainParser:
    parser = MainParser(prog=program(), description="Video generation with Wan 2.2.")
    parser.add_argument("--version", action="version", version=f"wancore {__version__}")
    parser.add_argument("--verbose", action="store_true", help="log every automatic choice and its reason")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command", parser_class=Parser)
    parser.commands = {}
    for name, (help, add, run) in COMMANDS.items():
        command = parser.commands[name] = commands.add_parser(name, help=help, description=f"{name}: {help}.")
        add(command)
        command.usage = command.short_usage().removeprefix("usage: ").partition(";")[0].replace("%", "%%")
        command.set_defaults(run=run)
    return parser


def add_generate_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = task_table()
    add_model_options(parser)
    add_request_options(parser)
    parser.add_argument("--out", type=Path, default=Path("wancore.mp4"), help=OUT_HELP)
    parser.add_argument(
        "--save-latents",
        type=Path,
        help="also keep the finished latents in this .safetensors file, for `decode` (not of clips that overlap)",
    )
    parser.add_argument("--report", type=Path, help="write the report as JSON")
    add_overwrite_option(parser)
    add_worker_options(parser)


def add_warmup_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = task_table()
    add_model_options(parser)
    add_request_options(parser, prompt=False)


def add_decode_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("latents", type=Path, help="a file written by --save-latents, or kept after a failed run")
    helps = {"model": "tiny, the folder of a release, or ComfyUI's models folder", "vae": "VAE file or folder"}
    changed: dict[str, Any] = {name: {"help": help} for name, help in helps.items()}
    add_options(parser, LoadOptions, ["model", "vae", "vae_precision", "device"], **changed)
    parser.add_argument("--out", type=Path, default=Path("wancore.mp4"), help=OUT_HELP)
    add_overwrite_option(parser)


def add_quantize_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="transformer: file, shard index or folder")
    parser.add_argument("out", type=Path, help="the .safetensors file to write")
    parser.add_argument(
        "--precision",
        default="fp8",
        choices=PRECISIONS,
        help="fp8 and int8 files load in ComfyUI too (default %(default)s)",
    )
    add_options(parser, LoadOptions, ["keep_blocks", "device"])
    add_overwrite_option(parser)


def add_plan_command_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = task_table()
    parser.add_argument("--model", help=f"{table(LoadOptions)['model'].help}: the plan is for its task and files")
    parser.add_argument("--task", help=f"one of {', '.join(TASKS)} (default: that of --model, else {PLANNED_TASK})")
    parser.add_argument("--high", help="the expert's file or folder: uses the MagCache curve beside it")
    parser.add_argument("--low", help="the low-noise expert's; its name may say that it is step-distilled")
    parser.add_argument("--image", action="store_true", help="plan a video that starts from an image (TI2V-5B)")
    known = {"type": int, "metavar": "FRAME", "help": "show this frame as known; may be repeated"}
    starts = {**known, "help": "a prompt begins at this frame, counted from 0; may be repeated"}
    add_options(parser, Request, ["keyframes", "prompts_at"], keyframes=known, prompts_at=starts)
    add_options(parser, LoadOptions, ["loras"])
    add_plan_options(parser)
    add_window_options(parser)
    add_options(parser, Request, ["nag", "control"])
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    clips = "print the clips of a video of --frames, this many frames each"
    otherwise = (*table(PlanNumbers), "image", "control", "nag", "width", "height", "frames", "skip")
    names = [name for name in table(Request) if name in table(PlanRequest) and name not in otherwise]
    add_options(parser, Request, names, clip_frames={"help": clips})
    parser.add_argument(
        "--seconds-per-forward",
        type=float,
        metavar="S",
        help="of one clip, dense: print the time of all steps and clips",
    )
    add_memory_plan_options(parser)


def add_check_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("video", type=Path)
    parser.add_argument("--prompt", help="the caption (default: the one in the file's metadata)")


def add_inspect_options(parser: argparse.ArgumentParser) -> None:
    kinds = "safetensors, gguf, pth, a shard index, a LoRA; a folder of one part, of a release, or ComfyUI's models"
    parser.add_argument("file", type=Path, help=kinds)
    parser.add_argument("--json", action="store_true")


def add_doctor_options(parser: argparse.ArgumentParser) -> None:
    add_options(parser, LoadOptions, ["device"])
    parser.add_argument("--json", action="store_true")


Command = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]

# name -> (help, function that adds its options, function that runs it and returns the exit code)
COMMANDS: dict[str, Command] = {
    "generate": (
        "make a video from a prompt, and from an image",
        add_generate_options,
        lambda options: run_generate(options) if options.prompts is None else run_list(options),
    ),
    "warmup": (
        "load the models and run one forward of each expert, to fill the compilers' caches",
        add_warmup_options,
        run_warmup,
    ),
    "decode": ("decode saved latents to a video", add_decode_options, run_decode),
    "quantize": ("write a transformer with FP8 or INT8 matrices, half the size", add_quantize_options, run_quantize),
    "plan": ("print the steps of a generation without running it", add_plan_command_options, run_plan),
    "calibrate": (
        "measure a model's MagCache curve and write it beside the checkpoint",
        add_calibrate_options,
        run_calibrate,
    ),
    "quality": (
        "compare step caching and sparse attention with the full run",
        add_quality_options,
        run_quality,
    ),
    "report-card": (
        "measure seconds and quality of the words of speed on this model and machine, for posting",
        add_card_options,
        run_card,
    ),
    "check": ("check whether a video of the embedded model shows its caption", add_check_options, run_check),
    "inspect": ("show a file's model, layout, precision, LoRA rank and problems", add_inspect_options, run_inspect),
    "models": (
        "say which files a task needs and which are there; download them into ComfyUI's folders",
        add_models_options,
        run_models,
    ),
    "doctor": ("test what this machine can run; give the reason for what it cannot", add_doctor_options, run_doctor),
}
