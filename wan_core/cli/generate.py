"""The commands generate, warmup and decode."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from wan_core.cli.options import plan_numbers
from wan_core.cli.progress import ProgressLine
from wan_core.cli.workers import generate_on, worker_options
from wan_core.config import LoadOptions, Request, check_folder
from wan_core.sampling.cache.arguments import skip_options


def request_of(options: argparse.Namespace) -> Request:
    """The request that the parsed arguments describe. Raises OptionError."""
    arguments = vars(options)
    width, height = options.size or (None, None)
    settings = {f.name: arguments[f.name] for f in fields(Request) if f.name in arguments} | plan_numbers(options)
    settings["prompt"] = options.prompt or ""
    return Request(**{**settings, "width": width, "height": height, "skip": skip_options(options)})


def load_options_of(options: argparse.Namespace) -> LoadOptions:
    """The load options that the parsed arguments describe. Raises OptionError."""
    arguments = vars(options)
    return LoadOptions(**{f.name: arguments[f.name] for f in fields(LoadOptions)})


def run_warmup(options: argparse.Namespace) -> int:
    from wan_core.pipeline.pipeline import Pipeline
    from wan_core.pipeline.warmup import warm_up

    request = request_of(options)
    progress = ProgressLine()
    pipe = Pipeline.load(load_options_of(options), request=request)
    warm_up(pipe, request, progress.phase)
    print(pipe.report.text())
    return 0


def run_generate(options: argparse.Namespace) -> int:
    from wan_core.media.video import check_output, write_mp4, write_sheet
    from wan_core.pipeline.pipeline import Pipeline, metadata

    request = request_of(options)
    latents = options.save_latents or unused_name(options.out.with_suffix(".latents.safetensors"))
    check_output(options.out)
    for path in (latents, options.sheet, options.report):
        check_folder(path)
    load_options = load_options_of(options)
    progress, workers = ProgressLine(), worker_options(options)
    pipe = Pipeline.load(load_options, request=request) if workers is None else None
    try:
        if pipe is not None:
            result = pipe.generate(request, on_step=progress.step, on_phase=progress.phase, keep_latents=latents)
        else:
            assert workers is not None
            result = generate_on(workers, load_options, request, progress, latents)
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


def unused_name(path: Path) -> Path:
    """`path`, with a number added if it exists: latents kept after an earlier failed run are not overwritten."""
    numbered = (path.with_name(f"{path.name.split('.')[0]}-{n}.latents.safetensors") for n in range(1, 10_000))
    return path if not path.exists() else next(p for p in numbered if not p.exists())


def run_decode(options: argparse.Namespace) -> int:
    from wan_core.checkpoint.latents import load_latents
    from wan_core.execution.report import Report
    from wan_core.media.video import check_output, write_mp4
    from wan_core.pipeline.builder import load_vae_only
    from wan_core.pipeline.pipeline import decode_latents, metadata

    check_output(options.out)
    latents, fps, settings = load_latents(options.latents)
    vae, device = load_vae_only(options.model, options.vae, options.device, options.vae_precision)
    report = Report(device, settings=settings)
    frames = decode_latents(vae, latents.to(device), report)
    write_mp4(options.out, frames, fps=fps, metadata=metadata(settings))
    print(report.text())
    print(options.out)
    return 0
