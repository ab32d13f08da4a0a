"""The command line: generate, decode, plan, calibrate, quality, check, doctor, bench.

User errors (a bad number, a file that is something else) end with one line on stderr and exit code 2; everything is
checked before work starts. Finished latents are on disk before they are decoded and stay there if anything after that
fails.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from wan_core.bench.options import add_bench_options
from wan_core.cache.arguments import add_skip_options, skip_options
from wan_core.cache.skipping import skip_forwards
from wan_core.config import (
    COMPILES,
    GUIDANCE_MODES,
    PRECISIONS,
    QUANTIZED,
    RESIDENCIES,
    TASKS,
    LoadOptions,
    OptionError,
    Request,
    UserError,
    check_folder,
)
from wan_core.plan import SCHEDULES, make_plan
from wan_core.quality.options import SETTINGS, add_calibrate_options, add_quality_options

OUT_OF_MEMORY = "Try --residency swap, a smaller --size or fewer --frames."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns the exit code: 0 done, 1 a check that failed, 2 a user error, 3 out of memory,
    130 interrupted."""
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(name)s: %(message)s")
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (UserError, OSError) as fault:
        logging.getLogger(__name__).info("raised here", exc_info=True)
        print(f"wan_core {options.command}: {fault}", file=sys.stderr)
        return 2
    except RuntimeError as fault:
        if type(fault).__name__ != "OutOfMemoryError":  # torch's, without importing torch
            raise
        print(f"wan_core {options.command}: out of memory ({fault}). {OUT_OF_MEMORY}", file=sys.stderr)
        return 3


# -------------------------------------------------------------------------------------------------------------- parsers


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m wan_core", description="Video generation with Wan 2.2.")
    parser.add_argument("--verbose", action="store_true", help="log what was chosen and why")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    generate = commands.add_parser("generate", help="make a video from a prompt, and an image if the model takes one")
    _add_model_options(generate)
    _add_request_options(generate)
    generate.add_argument(
        "--out", type=Path, default=Path("wancore.mp4"), help="the video to write, .mp4 (default %(default)s)"
    )
    generate.add_argument("--save-latents", type=Path, help="also keep the finished latents in this .safetensors file")
    generate.add_argument("--sheet", type=Path, help="also write frames from first to last as one picture (.png)")
    generate.add_argument("--report", type=Path, help="write the report as JSON")
    generate.set_defaults(run=run_generate)

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
    _add_plan_options(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=run_plan)

    calibrate = commands.add_parser("calibrate", help="measure a model's MagCache curve, kept beside its checkpoint")
    _add_model_options(calibrate)
    _add_plan_options(calibrate)
    add_calibrate_options(calibrate)
    calibrate.set_defaults(run=run_calibrate)

    quality = commands.add_parser("quality", help="compare videos with forwards left out against the full run")
    _add_model_options(quality)
    _add_plan_options(quality)
    add_quality_options(quality)
    quality.set_defaults(run=run_quality)

    check = commands.add_parser(
        "check", help="judge from a video's frames whether the embedded model's caption came true"
    )
    check.add_argument("video", type=Path)
    check.add_argument("--prompt", help="the caption (default: the one in the file's metadata)")
    check.set_defaults(run=run_check)

    doctor = commands.add_parser("doctor", help="what this machine can run, and why not what it cannot")
    doctor.add_argument("--device", default="auto")
    doctor.add_argument("--json", action="store_true")
    doctor.set_defaults(run=run_doctor)

    bench = commands.add_parser("bench", help="time forwards of the transformer at given sizes; writes JSON")
    add_bench_options(bench)
    bench.set_defaults(run=run_bench)
    return parser


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models")
    group.add_argument("--model", help="tiny (the embedded model), random:TASK, or the folder of a release")
    group.add_argument("--task", help="override the recognised task: " + ", ".join(TASKS))
    group.add_argument("--high", help="high-noise expert: file, shard index or folder (alone: the only transformer)")
    group.add_argument("--low", help="low-noise expert")
    group.add_argument("--text-encoder", help="UMT5: file or folder")
    group.add_argument("--tokenizer", help="spiece.model, where the text encoder does not bring it")
    group.add_argument("--vae", help="VAE: file or folder")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N (default %(default)s)")
    group.add_argument(
        "--precision",
        default="checkpoint",
        choices=PRECISIONS,
        help="of transformer and text encoder; checkpoint: bf16 on a GPU, fp32 on a CPU. fp8 and te ones hold the "
        "transformer's matrices in FP8 (te: Transformer Engine), see docs/performance.md",
    )
    group.add_argument(
        "--keep-blocks", type=int, default=0, metavar="N", help="leave the first and last N blocks out of FP8"
    )
    group.add_argument("--vae-precision", default="auto", choices=("auto", "bf16", "fp32"))
    group.add_argument("--attention", default="auto", help="backend, see `doctor` (default %(default)s)")
    group.add_argument(
        "--compile", default="off", choices=COMPILES, help="compile the transformer's block, once for all (default off)"
    )
    group.add_argument(
        "--residency", default="auto", choices=RESIDENCIES, help="keep all models on the device, or one at a time"
    )


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("video")
    group.add_argument("--prompt", required=True)
    group.add_argument("--negative-prompt", help="default: the task's own; an empty text is allowed")
    group.add_argument("--image", help="first frame (image-to-video)")
    group.add_argument("--last-image", help="last frame (image-to-video)")
    group.add_argument("--size", type=_size, help="WIDTHxHEIGHT in pixels (default: the task's, or the image's aspect)")
    group.add_argument("--frames", type=int, help="4n + 1")
    group.add_argument("--fps", type=int)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument(
        "--guidance-mode", default="auto", choices=GUIDANCE_MODES, help="run the two branches apart or as one"
    )
    _add_plan_options(parser)


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling (default: the task's own)")
    group.add_argument("--steps", type=int)
    group.add_argument("--shift", type=float, help="larger spends more steps on high noise")
    group.add_argument("--boundary", type=float, help="the high-noise expert runs where timestep >= boundary * 1000")
    group.add_argument("--guidance", type=float, help="for both experts")
    group.add_argument("--guidance-high", type=float)
    group.add_argument("--guidance-low", type=float)
    group.add_argument("--solver", default="unipc", choices=tuple(SCHEDULES))
    add_skip_options(parser)


def _size(text: str) -> tuple[int, int]:
    width, x, height = text.lower().partition("x")
    if not (x and width.isdecimal() and height.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write WIDTHxHEIGHT, for example 1280x720")
    return int(width), int(height)


def _plan_numbers(options: argparse.Namespace) -> dict[str, Any]:
    if options.guidance is not None and (options.guidance_high is not None or options.guidance_low is not None):
        raise OptionError("--guidance sets both experts; leave out either it or --guidance-high and --guidance-low")
    return {
        "steps": options.steps,
        "shift": options.shift,
        "boundary": options.boundary,
        "guidance_high": options.guidance if options.guidance is not None else options.guidance_high,
        "guidance_low": options.guidance if options.guidance is not None else options.guidance_low,
        "solver": options.solver,
    }


# ------------------------------------------------------------------------------------------------------------- commands


def run_generate(options: argparse.Namespace) -> int:
    from wan_core.pipeline import Pipeline, metadata
    from wan_core.video import check_output, write_mp4, write_sheet

    given = vars(options)
    width, height = options.size or (None, None)
    wanted = {f.name: given[f.name] for f in fields(Request) if f.name in given} | _plan_numbers(options)
    request = Request(**{**wanted, "width": width, "height": height, "skip": skip_options(options)})
    latents = options.save_latents or fresh_name(options.out.with_suffix(".latents.safetensors"))
    check_output(options.out)
    for path in (latents, options.sheet, options.report):
        check_folder(path)
    loaded = LoadOptions(**{f.name: given[f.name] for f in fields(LoadOptions)})
    progress = ProgressLine()
    pipe = Pipeline.load(loaded, request=request)
    try:
        result = pipe.generate(request, on_step=progress.step, on_phase=progress.phase, keep_latents=latents)
        with result.report.phase("write"):
            write_mp4(options.out, result.frames, fps=result.fps, metadata=metadata(result.report.settings))
    except BaseException:
        progress.end()
        if latents.exists() and progress.name == "decode":
            print(
                f"the finished latents are in {latents}: `python -m wan_core decode` turns them into a video",
                file=sys.stderr,
            )
        raise
    if options.save_latents is None:
        latents.unlink(missing_ok=True)
    progress.end()
    print(result.report.text())
    if options.sheet is not None:
        write_sheet(options.sheet, result.frames)
    if options.report is not None:
        result.report.save(options.report)
    print(options.out)
    return 0


def fresh_name(path: Path) -> Path:
    """`path`, or with a number where that exists: what an earlier run left behind is not ours to overwrite."""
    numbered = (path.with_name(f"{path.name.split('.')[0]}-{n}.latents.safetensors") for n in range(1, 10_000))
    return path if not path.exists() else next(p for p in numbered if not p.exists())


def run_quantize(options: argparse.Namespace) -> int:
    import torch

    from wan_core.checkpoint import load_dit, save
    from wan_core.models import choose_device, find_quantization

    device = choose_device(options.device)
    quantization = find_quantization(options.precision, device, options.keep_blocks)
    if quantization is None:
        raise OptionError(f"precision {options.precision!r} quantises nothing; use one of: {', '.join(QUANTIZED)}")
    if not options.out.parent.is_dir():
        raise OptionError(f"there is no folder {options.out.parent} to write to")
    save(load_dit(options.source, device="cpu", dtype=torch.bfloat16, quantization=quantization), options.out)
    print(options.out)
    return 0


def run_decode(options: argparse.Namespace) -> int:
    from wan_core.latents import load_latents
    from wan_core.models import load_vae_only
    from wan_core.pipeline import decode_latents, metadata
    from wan_core.report import Report
    from wan_core.video import check_output, write_mp4

    check_output(options.out)
    latents, fps, settings = load_latents(options.latents)
    vae, device = load_vae_only(options.model, options.vae, options.device, options.vae_precision)
    report = Report(device, settings=settings)
    frames = decode_latents(vae, latents.to(device), report)
    write_mp4(options.out, frames, fps=fps, metadata=metadata(settings))
    print(report.text())
    print(options.out)
    return 0


def run_plan(options: argparse.Namespace) -> int:
    for path in (options.high, options.low):
        if path is not None and not path.exists():
            raise OptionError(f"{path} does not exist: give the file or folder of an expert, or leave it out")
    plan = make_plan(task=options.task, **_plan_numbers(options))
    plan = skip_forwards(plan, skip_options(options), options.high, options.low, image=options.image)
    print(json.dumps(plan.as_dict(), indent=1) if options.json else plan.table())
    return 0


def run_calibrate(options: argparse.Namespace) -> int:
    from wan_core.quality.run import run_calibrate

    return run_calibrate(options, *_pipeline(options))


def run_quality(options: argparse.Namespace) -> int:
    from wan_core.quality.run import run_quality

    pipe, base = _pipeline(options)
    return run_quality(options, pipe, base, options.setting or SETTINGS)


def _pipeline(options: argparse.Namespace) -> tuple[Any, Request]:
    """The models, and the request that every sample follows but for its caption and seed."""
    from wan_core.pipeline import Pipeline

    if skip_options(options) is not None:
        raise OptionError(f"{options.command} runs in full by itself: leave out --magcache and its like")
    given = vars(options)
    width, height = _size(options.size) if options.size else (None, None)
    wanted = {f.name: given[f.name] for f in fields(Request) if f.name in given} | _plan_numbers(options)
    request = Request(**{**wanted, "prompt": "", "width": width, "height": height})
    loaded = LoadOptions(**{f.name: given[f.name] for f in fields(LoadOptions)})
    # An image picks the embedded model's image variant. Without one there may be no job yet: the samples bring theirs.
    return Pipeline.load(loaded, request=request if request.image else None), request


def run_check(options: argparse.Namespace) -> int:
    import torch

    from wan_core.metrics import judge
    from wan_core.shapes import parse_caption
    from wan_core.video import read_metadata, read_video

    caption = options.prompt or read_metadata(options.video).get("prompt")
    if not caption:
        raise OptionError(f"{options.video} names no prompt in its metadata: give --prompt")
    try:
        parse_caption(caption)
    except ValueError as fault:
        raise OptionError(str(fault)) from fault
    verdict = judge(torch.from_numpy(read_video(options.video)), caption)
    words = ("background", "colour", "shape", "motion")
    print(f"{caption!r}: " + ", ".join(f"{word} {'true' if getattr(verdict, word) else 'FALSE'}" for word in words))
    return 0 if verdict.all_true else 1


def run_bench(options: argparse.Namespace) -> int:
    from wan_core.bench.run import run_bench

    return run_bench(options)


def run_doctor(options: argparse.Namespace) -> int:
    from wan_core.doctor import examine, text

    findings = examine(options.device)
    print(json.dumps(findings, indent=1) if options.json else text(findings))
    return 0


class ProgressLine:
    """One line on stderr that is rewritten: phase, step, expert, seconds a step and time left. Plain lines where it
    is no terminal."""

    def __init__(self) -> None:
        self.name = "load"
        self.begin = time.perf_counter()
        self.terminal = sys.stderr.isatty()

    def phase(self, name: str) -> None:
        self.end()
        self.name = name
        print(f"{name} ...", file=sys.stderr, flush=True)

    def step(self, progress: Any, seconds: float | None) -> None:
        done, total = progress.step.index + 1, progress.total
        step = 0.0 if seconds is None else seconds * len(progress.step.branches)
        pace = f"{step:.3f} s/step, {_clock(progress.left(seconds))} left" if seconds is not None else ""
        line = f"step {done:>3}/{total}  {progress.step.expert}-noise expert  {pace}"
        print(
            f"\r{line:<78}" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def end(self) -> None:
        if self.terminal and self.name == "denoise":
            print(file=sys.stderr)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
