"""The commands `calibrate` and `quality`: run, print and write their measurements."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from wan_core.config import MagCacheOptions, OptionError, Request, SkipOptions
from wan_core.config.outputs import Outputs, keep_old
from wan_core.config.skipping import parse_setting
from wan_core.execution.report import Report
from wan_core.media.mp4 import write_mp4
from wan_core.media.pictures import save_picture
from wan_core.models.wan.families import family_of
from wan_core.pipeline.decode import decode_latents
from wan_core.pipeline.denoise import sample_latents
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.curves import ASSETS, curve_path, write_curve
from wan_core.sampling.cache.skipping import check_cacheable, leave_out
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import Ready
from wan_core.sampling.plan import Plan
from wan_core.sampling.start import Start
from wan_lab.calibrate import CALIBRATION, measure_curve
from wan_lab.compare import Comparison, compare, find_perceptual, pareto, summary, truth
from wan_lab.pictures import draw_quality, side_by_side
from wan_lab.results import envelope, result_path, write_result
from wan_lab.samples import (
    Batch,
    Sample,
    batches,
    choose_samples,
    driving_frames,
    read_samples,
)

FULL = "full"


def run_calibrate(options: argparse.Namespace, pipe: Pipeline, base: Request, outputs: Outputs) -> int:
    """Measure the curve of `pipe`'s model, write it beside the checkpoint or to `options.out`.

    Beside the checkpoint it takes the place of an older curve, because that is where it is found. The older one is
    kept as NAME.bak: it may have been tuned by hand, or come with the model.
    """
    models, out = pipe.models, options.out
    samples = chosen(options, tiny=pipe.models.task.name.endswith("-tiny"))
    if out is None:
        image = base.image is not None or samples[0].image is not None
        beside = curve_path_of(models.facts.high, models.task.name, image=image)
        out = outputs.add("the curve", beside, overwrite=True, sealed=True)
    plan = next(batches(pipe, base, samples[:1], 1)).job.plan  # of all: they differ in caption, seed and picture
    videos = shown(pipe, base, samples, options.batch)
    outputs.say_renamed()
    with torch.no_grad():
        curve = measure_curve(plan, pipe.models.expert, videos, source=source(pipe))
    older = None if options.overwrite else keep_old(out)
    if older is not None:
        show(f"the older {out.name} is kept as {older}")
    write_curve(curve, out)
    for numbers in ("0.12/2/0.2", "0.24/2/0.1"):
        skip = SkipOptions(magcache=MagCacheOptions.parse(numbers))
        print(f"{numbers:<10} {leave_out(plan, skip, curve).forward_words()}")
    print(out)
    return 0


def source(pipe: Pipeline) -> str:
    embedded = pipe.models.task.name.endswith("-tiny")
    return f"measured on {'the embedded model' if embedded else pipe.report.settings['models']['high']}"


def shown(pipe: Pipeline, base: Request, samples: Sequence[Sample], size: int) -> Iterator[tuple[Conditioning, Tensor]]:
    """Conditioning and noise of `samples` in batches of `size`; says how far it is."""
    for n, batch in enumerate(batches(pipe, base, samples, size)):
        show(f"calibrate: {n * size + len(batch.samples)} of {len(samples)} videos")
        yield batch.conditioning, batch.noise


def curve_path_of(checkpoint: Path | None, task: str, *, image: bool) -> Path:
    """The path of the curve beside a checkpoint. Raises OptionError for random weights and the embedded model."""
    if checkpoint is None:
        raise OptionError("random weights have no file to write the curve beside: give its path with --out")
    if ASSETS in checkpoint.absolute().parents:
        raise OptionError("the curve of the embedded model cannot be replaced: give another path with --out")
    return curve_path(checkpoint, task, image=image)


# ------------------------------------------------------------------------------------------------------------- quality


def run_quality(
    options: argparse.Namespace, pipe: Pipeline, base: Request, names: Sequence[str], outputs: Outputs
) -> int:
    """Compare every setting with the full run; prints a table and writes the requested files."""
    settings = {name: parse_setting(name) for name in names}  # all are checked before the first runs
    out = options.out
    if out is not None:
        named = result_path(out, "quality", pipe.models.device)
        out = outputs.add("--out", named, overwrite=None if named == out else True)  # that name is of this day alone
    samples = chosen(options, tiny=pipe.models.task.name.endswith("-tiny"))
    measured = measure_quality(pipe, base, samples, settings, options.batch, outputs.say_renamed)
    rows = measured.rows()
    print(table(rows, measured.perceptual_name))
    result = envelope("quality", pipe.models.device, rows) | {
        "samples": len(samples),
        "perceptual": measured.perceptual_name,
        "full": measured.full,
    }
    if out is not None:
        print(write_result(result, out))
    if options.plot is not None:  # pictures come last, after the measurements are on disk
        save_picture(draw_quality(rows, f"{measured.plan_words}   {len(samples)} videos"), options.plot)
    if options.video is not None:
        write_mp4(options.video, side_by_side(measured.first).numpy(), fps=pipe.models.task.fps)
    return 0


@dataclass
class Measured:
    """The result of a comparison, by setting: each video compared with the full run's, forwards and seconds of all."""

    perceptual_name: str
    comparisons: dict[str, list[Comparison]]
    forwards: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)
    first: dict[str, Tensor] = field(default_factory=dict)  # frames of the first sample, the full run's among them
    plan_words: str = ""

    def add(self, name: str, run: Run) -> Tensor:
        """Add seconds and forwards of a batch to `name`. Returns its frames [B, F, H, W, 3]."""
        self.seconds[name] = self.seconds.get(name, 0.0) + run.seconds
        # All videos of a batch run the same forwards.
        self.forwards[name] = self.forwards.get(name, 0) + run.forwards * len(run.frames)
        return run.frames

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the result file; `front`: the setting is on the Pareto front of savings and PSNR."""
        count = len(next(iter(self.comparisons.values()), []))
        rows: list[dict[str, Any]] = []
        for name, videos in self.comparisons.items():
            forwards = self.forwards[name] / count
            rows.append(
                {
                    "name": name,
                    "size": self.full["size"],
                    "samples": count,
                    "saved": round(1 - self.forwards[name] / self.forwards[FULL], 4),
                    "forwards": int(forwards) if forwards.is_integer() else round(forwards, 2),
                    **summary(videos),
                    "seconds": round(self.seconds[name] / count, 4),
                    "ratio": round(self.seconds[FULL] / self.seconds[name], 3),
                    "ratio_to": FULL,
                }
            )
        front = pareto({row["name"]: (row["saved"], row["psnr"]) for row in rows})
        return [{**row, "front": row["name"] in front} for row in rows]


@dataclass(frozen=True)
class Run:
    """A finished batch: frames uint8 [B, F, H, W, 3] on the CPU, seconds of denoising and forwards per video."""

    frames: Tensor
    seconds: float
    forwards: int


@torch.no_grad()
def measure_quality(
    pipe: Pipeline,
    base: Request,
    samples: Sequence[Sample],
    settings: Mapping[str, SkipOptions | None],
    size: int,
    on_checked: Callable[[], None] = lambda: None,
    *,
    pipes: Mapping[str, Pipeline] = MappingProxyType({}),
    judged: Callable[[Tensor, str], bool | None] = truth,
    full_run: Callable[[Pipeline, Batch, Plan], Run] | None = None,
    on_batch: Callable[[Batch, Mapping[str, Tensor]], None] = lambda batch, videos: None,
) -> Measured:
    """Make every sample in full and in each setting, in batches of `size`, from the same noise.

    Bounds are kept over the whole batch. on_checked: called before the first run, after every check. pipes: of settings
    that have a model of their own. judged: whether a video shows its caption. full_run: what makes a batch in full, if
    not `make`. on_batch: called with a batch and its videos [B, F, H, W, 3] by setting.
    """
    full_run = full_run or make
    name, perceptual = find_perceptual()
    measured = Measured(name, {s: [] for s in settings})
    verdicts: list[bool | None] = []
    for batch in batches(pipe, base, samples, size):
        plan = batch.job.plan
        if not measured.seconds:
            check_cacheable(plan.solver, CALIBRATION)
            for one in settings.values():
                batch.job.plan_with(one)  # raises for what this model cannot skip
            on_checked()
            for each in dict.fromkeys([pipe, *pipes.values()]):
                warm_up(each, batch, plan, full_run if each is pipe else make)
            measured.plan_words = f"{plan.name}   {len(plan.steps)} steps"
        exact = measured.add(FULL, full_run(pipe, batch, plan))
        measured.first.setdefault(FULL, exact[0])
        verdicts += [judged(frames, sample.caption) for frames, sample in zip(exact, batch.samples, strict=True)]
        videos = {FULL: exact}
        for setting, options in settings.items():
            frames = exact
            if setting != FULL:
                own = pipes.get(setting, pipe)
                frames = measured.add(setting, make(own, batch, batch.job.plan_with(options)))
            videos[setting] = frames
            measured.first.setdefault(setting, frames[0])
            for video, full, sample in zip(frames, exact, batch.samples, strict=True):
                driving = driving_frames(batch.job, sample)
                compared = compare(video, full, sample.caption, perceptual, driving, pipe.models.device, judged)
                measured.comparisons[setting].append(compared)
            newest = summary(measured.comparisons[setting])
            show(
                f"{setting}: {len(measured.comparisons[setting])} of {len(samples)} videos, {newest['psnr']} dB so far"
            )
        on_batch(batch, videos)
        measured.full["size"] = f"{batch.job.width}x{batch.job.height}x{batch.job.frames}"
    judged_videos = [t for t in verdicts if t is not None]
    measured.full["seconds"] = round(measured.seconds[FULL] / len(samples), 4)
    measured.full |= {"truth": round(sum(judged_videos) / len(judged_videos), 4)} if judged_videos else {}
    return measured


def warm_up(pipe: Pipeline, batch: Batch, plan: Plan, full_run: Callable[[Pipeline, Batch, Plan], Run]) -> None:
    """A full run that is not timed, so that loading, compiling and tuning do not count for any setting."""
    show("warming up")
    full_run(pipe, batch, plan)


def make(pipe: Pipeline, batch: Batch, plan: Plan) -> Run:
    models, report = pipe.models, Report(pipe.models.device)
    forwards = 0

    def count(progress: Any, _: float | None) -> None:
        nonlocal forwards
        forwards += progress.forwards

    begin = time.perf_counter()
    batched = batch.job.plan.batched and len(batch.samples) == 1
    latents = sample_latents(
        replace(plan, guidance_mode="batched" if batched else "sequential"),
        Ready(models.expert),
        batch.conditioning,
        batch.noise,
        models.vae_config,
        report,
        start=Start(shape=tuple(batch.noise.shape), seed=batch.job.request.seed),
        on_step=count,
    )
    seconds = time.perf_counter() - begin
    rules = family_of(models.task).clips
    own = latents[:, :, rules.leading if rules is not None and rules.always else 0 :]
    images = torch.from_numpy(decode_latents(models.vae(), own, report))
    return Run(images.unflatten(0, (len(batch.samples), -1)), seconds, forwards)


# ------------------------------------------------------------------------------------------------------------- shared


def chosen(options: argparse.Namespace, *, tiny: bool) -> list[Sample]:
    """The samples that the options name. tiny: for the embedded model. Raises OptionError."""
    if options.count < 1 or options.batch < 1:
        raise OptionError(f"count {options.count} and batch {options.batch} given; both must be at least 1")
    if options.samples is not None:
        if options.prompts or options.image:
            raise OptionError("--samples has prompts and images: leave --prompt and --image out")
        return read_samples(options.samples, options.count, options.seed)
    return choose_samples(options.prompts, options.count, options.seed, tiny)


def show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def table(rows: Sequence[Mapping[str, Any]], perceptual: str) -> str:
    """The rows as text; `*` marks the Pareto front."""
    names = {"perceptual": perceptual, "psnr_worst": "worst"}
    columns = [
        c
        for c in ("saved", "psnr", "psnr_worst", "ssim", "perceptual", "flicker", "truth", "look", "motion")
        if c in rows[0]
    ]
    lines = [f"  {'setting':<38}" + "".join(f"{names.get(c, c):>10}" for c in columns) + f"{'speed-up':>10}"]
    for row in rows:
        numbers = "".join(f"{row[c]:>10.4g}" for c in columns) + f"{row['ratio']:>10.2f}"
        lines.append(f"{'*' if row['front'] else ' '} {row['name']:<38}{numbers}")
    return "\n".join(lines)
