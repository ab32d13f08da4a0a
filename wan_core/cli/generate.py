"""The commands that make videos: generate, and decode of latents that were kept."""

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
    """The video that the options describe."""
    given = vars(options)
    width, height = options.size or (None, None)
    wanted = {f.name: given[f.name] for f in fields(Request) if f.name in given} | plan_numbers(options)
    wanted["prompt"] = options.prompt or ""
    return Request(**{**wanted, "width": width, "height": height, "skip": skip_options(options)})


def run_warmup(options: argparse.Namespace) -> int:
    from wan_core.pipeline.pipeline import Pipeline
    from wan_core.pipeline.warmup import warm_up

    request, given = request_of(options), vars(options)
    progress = ProgressLine()
    pipe = Pipeline.load(LoadOptions(**{f.name: given[f.name] for f in fields(LoadOptions)}), request=request)
    warm_up(pipe, request, progress.phase)
    print(pipe.report.text())
    return 0


def run_generate(options: argparse.Namespace) -> int:
    from wan_core.media.video import check_output, write_mp4, write_sheet
    from wan_core.pipeline.pipeline import Pipeline, metadata

    given, request = vars(options), request_of(options)
    latents = options.save_latents or fresh_name(options.out.with_suffix(".latents.safetensors"))
    check_output(options.out)
    for path in (latents, options.sheet, options.report):
        check_folder(path)
    loaded = LoadOptions(**{f.name: given[f.name] for f in fields(LoadOptions)})
    progress, workers = ProgressLine(), worker_options(options)
    pipe = Pipeline.load(loaded, request=request) if workers is None else None
    try:
        if pipe is not None:
            result = pipe.generate(request, on_step=progress.step, on_phase=progress.phase, keep_latents=latents)
        else:
            assert workers is not None
            result = generate_on(workers, loaded, request, progress, latents)
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
