"""The command line: generate, warmup, decode, plan, calibrate, quality, check, inspect, doctor.

User errors (a bad number, a file that is something else) end with one line on stderr and exit code 2; everything is
checked before work starts. Finished latents are on disk before they are decoded and stay there if anything after that
fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from wan_core.cli.generate import run_decode, run_generate, run_warmup
from wan_core.cli.inform import run_check, run_doctor, run_plan, run_quantize
from wan_core.cli.inspect import add_inspect_options, run_inspect
from wan_core.cli.options import (
    add_lora_options,
    add_memory_plan_options,
    add_model_options,
    add_plan_options,
    add_request_options,
)
from wan_core.cli.quality import run_calibrate, run_quality
from wan_core.cli.workers import add_worker_options
from wan_core.config import PRECISIONS, UserError
from wan_core.models.wan.tasks import TASKS
from wan_core.pipeline.evaluate.options import add_calibrate_options, add_quality_options

OUT_OF_MEMORY = "Try --residency stream, a smaller --size or fewer --frames."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns the exit code: 0 done, 1 a check that failed, 2 a user error, 3 out of memory,
    130 interrupted."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["bench"]:
        return run_benchmarks(given[1:])
    options = build_parser().parse_args(given)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(name)s: %(message)s")
    return report_faults(options.command, lambda: options.run(options))


def report_faults(command: str, run: Callable[[], int]) -> int:
    """The exit code of `run`. A user error, an interruption and out of memory become one line on stderr and a code."""
    try:
        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (UserError, OSError) as fault:
        logging.getLogger(__name__).info("raised here", exc_info=True)
        print(f"wan_core {command}: {fault}", file=sys.stderr)
        return 2
    except RuntimeError as fault:
        if type(fault).__name__ != "OutOfMemoryError":  # torch's, without importing torch
            raise
        print(f"wan_core {command}: out of memory ({fault}). {OUT_OF_MEMORY}", file=sys.stderr)
        return 3


def run_benchmarks(arguments: list[str]) -> int:
    """Run `python -m benchmarks` of the checkout that this package lies in."""
    checkout = Path(__file__).resolve().parents[2]
    spec = importlib.util.find_spec("benchmarks")
    if spec is None or spec.origin is None or Path(spec.origin).resolve().parents[1] != checkout:
        print(
            "wan_core bench: the benchmarks are in the source repository and not in the installed package. "
            "Run `python -m benchmarks SUITE` in a checkout.",
            file=sys.stderr,
        )
        return 2
    return int(importlib.import_module("benchmarks.__main__").main(arguments))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m wan_core", description="Video generation with Wan 2.2.")
    parser.add_argument("--verbose", action="store_true", help="log what was chosen and why")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    generate = commands.add_parser("generate", help="make a video from a prompt, and an image if the model takes one")
    add_model_options(generate)
    add_request_options(generate)
    generate.add_argument(
        "--out", type=Path, default=Path("wancore.mp4"), help="the video to write, .mp4 (default %(default)s)"
    )
    generate.add_argument("--save-latents", type=Path, help="also keep the finished latents in this .safetensors file")
    generate.add_argument("--sheet", type=Path, help="also write frames from first to last as one picture (.png)")
    generate.add_argument("--report", type=Path, help="write the report as JSON")
    add_worker_options(generate)
    generate.set_defaults(run=run_generate)

    warmup = commands.add_parser(
        "warmup", help="load the models and run one forward of each expert, to fill compilers' caches"
    )
    add_model_options(warmup)
    add_request_options(warmup, prompt=False)
    warmup.set_defaults(run=run_warmup)

    decode = commands.add_parser("decode", help="turn saved latents into a video")
    decode.add_argument("latents", type=Path, help="a file of --save-latents, or one that a failed run left behind")
    decode.add_argument("--model", help="tiny, or the folder of a release")
    decode.add_argument("--vae", help="VAE file or folder")
    decode.add_argument("--vae-precision", default="auto", choices=("auto", "bf16", "fp32"))
    decode.add_argument("--device", default="auto")
    decode.add_argument("--out", type=Path, default=Path("wancore.mp4"))
    decode.set_defaults(run=run_decode)

    quantize = commands.add_parser("quantize", help="write a transformer with its matrices in FP8, half the size")
    quantize.add_argument("source", help="transformer: file, shard index or folder")
    quantize.add_argument("out", type=Path, help="the .safetensors file to write")
    quantize.add_argument(
        "--precision", default="fp8", choices=PRECISIONS, help="one that quantises (default %(default)s)"
    )
    quantize.add_argument(
        "--keep-blocks", type=int, default=0, metavar="N", help="leave out the first and last N blocks"
    )
    quantize.add_argument("--device", default="auto")
    quantize.set_defaults(run=run_quantize)

    plan = commands.add_parser("plan", help="print the step table of a generation without running it")
    plan.add_argument("--task", default="t2v-A14B", help=f"one of {', '.join(TASKS)} (default %(default)s)")
    plan.add_argument("--high", type=Path, help="the expert's file or folder: a MagCache curve beside it is used")
    plan.add_argument("--low", type=Path, help="the low-noise expert's, whose name may say that it is step-distilled")
    plan.add_argument("--image", action="store_true", help="as for a video that starts from an image (TI2V-5B)")
    add_lora_options(plan)
    add_plan_options(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    add_memory_plan_options(plan)
    plan.set_defaults(run=run_plan)

    calibrate = commands.add_parser("calibrate", help="measure a model's MagCache curve, kept beside its checkpoint")
    add_model_options(calibrate)
    add_plan_options(calibrate)
    add_calibrate_options(calibrate)
    calibrate.set_defaults(run=run_calibrate)

    quality = commands.add_parser("quality", help="compare videos with forwards left out against the full run")
    add_model_options(quality)
    add_plan_options(quality)
    add_quality_options(quality)
    quality.set_defaults(run=run_quality)

    check = commands.add_parser(
        "check", help="judge from a video's frames whether the embedded model's caption came true"
    )
    check.add_argument("video", type=Path)
    check.add_argument("--prompt", help="the caption (default: the one in the file's metadata)")
    check.set_defaults(run=run_check)

    inspect = commands.add_parser("inspect", help="what a file is: family, layout, precision, a LoRA's rank, problems")
    add_inspect_options(inspect)
    inspect.set_defaults(run=run_inspect)

    doctor = commands.add_parser("doctor", help="what this machine can run, and why not what it cannot")
    doctor.add_argument("--device", default="auto")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=run_doctor)

    return parser
