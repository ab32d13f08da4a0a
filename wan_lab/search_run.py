"""The command `search`: finds presets on a model, and writes each as a file with the Pareto front that it is on.

Rows are written as they come, to the file beside the presets, and read again where a search was broken off.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from wan_core.config import OptionError, Request, SkipOptions
from wan_core.config.checks import parse_size
from wan_core.config.outputs import Outputs, write_text
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families import Task, find_task
from wan_core.pipeline.pipeline import Pipeline
from wan_core.sampling.cache.arguments import parse_setting
from wan_core.sampling.cache.skipping import check_cacheable, skip_words
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.schedule import with_costs
from wan_core.sampling.speed_presets import FORMAT, SUFFIX, find_speed
from wan_core.sampling.steps import Expert
from wan_lab.calibrate import CALIBRATION
from wan_lab.compare import Comparison, compare, find_perceptual, pareto, summary
from wan_lab.results import envelope
from wan_lab.run import chosen, make, plan_with, show, source
from wan_lab.samples import Batch, batches, driving_frames
from wan_lab.search import Candidate, Search, least_seconds

# Seconds of a dense forward and of what is beside the forwards, for the estimate of the embedded model's presets: A14B
# at 1280x720x81 in FP8 on one H200 (benchmarks/results/sparse-videos-h200-20261123.json).
FULL_TASKS = {"t2v-tiny": "t2v-A14B", "i2v-tiny": "i2v-A14B"}
H200_FORWARD, H200_BESIDE, H200_SIZE = 7.545, 2.06, "1280x720x81"


def run_search(
    options: argparse.Namespace, load: Callable[[argparse.Namespace], tuple[Pipeline, Request]], outputs: Outputs
) -> int:
    """Search every preset that `options` names, print them and write their files. load: called when the options are
    checked."""
    targets = [(name, value, True) for name, value in map(named, options.seconds or ())]
    targets += [(name, value, False) for name, value in map(named, options.psnr or ())]
    if not targets:
        raise OptionError("no preset to search: give --seconds NAME=SECONDS or --psnr NAME=DECIBELS")
    if options.first < 1:
        raise OptionError(f"--first {options.first} given; the first round takes at least 1 video")
    starts = [find_speed(name).setting for name in options.start or ()]
    names = [name for name, _, _ in targets]
    if len(set(names)) < len(names):
        raise OptionError(f"presets {', '.join(names)} given: each needs a name of its own")
    if options.of_task is not None:
        full_size(find_task(options.of_task), options.of_size or H200_SIZE)
    pipe, base = load(options)
    options.out.mkdir(parents=True, exist_ok=True)
    places = {name: outputs.add(f"preset {name}", options.out / f"{name}{SUFFIX}") for name in names}
    videos = Videos(pipe, base, options)
    outputs.say_renamed()
    search = Search(
        videos.phases,
        videos.seconds,
        videos.measure,
        options.count,
        min(options.first, options.count),
        options.seed,
        options.rounds,
        options.changes,
        tell=lambda text: show(f"search: {text}"),
    )
    search.starts = [Candidate.of(setting, videos.plan, search.axes) for setting in starts]
    winners: dict[str, Candidate] = {}
    for name, value, seconds in targets:
        full = videos.seconds("full")
        winners[name] = search.within(value) if seconds else least_seconds(search, value, full)
        videos.measure(winners[name].setting, options.count)
        show(f"{name}: {winners[name].setting}")
    front = videos.front()
    of = {name: value for name, value in videos.described.items() if name != "videos"} | {"seed": options.seed}
    for name, one in winners.items():
        preset = {"format": FORMAT, "name": name, "setting": one.setting, "source": source(pipe)}
        described = envelope("search", pipe.models.device, front)
        text = json.dumps({**preset, **videos.row(one.setting), "of": of, **described}, indent=1)
        print(f"{write_text(places[name], text + chr(10))}: {skip_words(parse_setting(one.setting) or SkipOptions())}")
    print(table(front, [one.setting for one in winners.values()]))
    return 0


def named(text: str) -> tuple[str, float]:
    """`NAME=NUMBER`. Raises OptionError."""
    name, _, number = text.partition("=")
    try:
        if not name or not all(c.isalnum() or c in "-_" for c in name) or not float(number) > 0:
            raise ValueError(text)
        return name, float(number)
    except ValueError:
        raise OptionError(f"{text!r} given; write a name of letters, digits and - and a number: balanced=100") from None


class Videos:
    """The sample videos, their full runs, and what settings did to them."""

    def __init__(self, pipe: Pipeline, base: Request, options: argparse.Namespace) -> None:
        self.pipe, self.options = pipe, options
        of_task = options.of_task or FULL_TASKS.get(pipe.models.task.name)
        full = None if of_task is None else full_size(find_task(of_task), options.of_size or H200_SIZE)
        if full is not None and (options.of_task or options.of_size) and not options.forward_seconds:
            raise OptionError("--of-task and --of-size need --forward-seconds: what one dense forward takes there")
        samples = chosen(options, tiny=pipe.models.task.name.endswith("-tiny"))
        Random(options.seed).shuffle(samples)  # the first few stand for all of them
        self.batches = list(batches(pipe, base, samples, options.batch))
        self.plan = self.batches[0].job.plan
        check_cacheable(self.plan.solver, CALIBRATION)
        self.phases = tuple(len(phase) for phase in self.plan.phases)
        self.full: list[Tensor] = []  # frames of the full runs, uint8, by batch
        self.perceptual_name, self.perceptual = find_perceptual()
        self.comparisons: dict[str, list[Comparison]] = {}
        job = self.batches[0].job
        self.described = {
            "task": self.plan.task,
            "steps": self.plan.count,
            "size": f"{job.width}x{job.height}x{job.frames}",
            "videos": [[sample.caption, sample.seed, sample.image] for sample in samples],
            "perceptual": self.perceptual_name,
            "batch": options.batch,
            "source": source(pipe),
            "precision": options.precision,
        }
        self.rows = options.out / f"{self.plan.task}-{len(self.plan.steps)}.rows.jsonl"
        self.resume()
        self.cost = self.costs(full)
        self.seconds = cache(self._seconds)

    # ----------------------------------------------------------------------------------------------------- estimate

    def costs(
        self, full: tuple[DiTConfig, tuple[int, int, int]] | None
    ) -> tuple[DiTConfig, tuple[int, int, int], float, float]:
        """Architecture, latent frames, rows and columns, seconds of a dense forward and of all else. full: the first
        two, where they are not this model's."""
        options, batch = self.options, self.batches[0]
        if full is not None:
            beside_seconds = H200_BESIDE if options.beside_seconds is None else options.beside_seconds
            return *full, options.forward_seconds or H200_FORWARD, beside_seconds
        forward = options.forward_seconds
        if not forward:
            run = make(self.pipe, batch, self.plan)
            forward = run.seconds / run.forwards / len(batch.samples)
        _, _, T, Y, X = batch.job.latent_shape
        return self.pipe.models.dit_config, (T, Y, X), forward, options.beside_seconds or 0.0

    def _seconds(self, setting: str) -> float:
        return estimated_seconds(self.planned(self.batches[0], setting), *self.cost)

    def planned(self, batch: Batch, setting: str) -> Plan:
        return plan_with(self.pipe, batch, parse_setting(setting))

    # ------------------------------------------------------------------------------------------------------ quality

    @torch.no_grad()
    def measure(self, setting: str, count: int) -> Sequence[float]:
        """The PSNR of the first `count` videos in `setting`, and of those that fill their batch."""
        done = self.comparisons.setdefault(setting, [])
        size = self.options.batch
        while len(done) < count:
            n = len(done) // size
            batch = self.batches[n]
            run = make(self.pipe, batch, self.planned(batch, setting))
            rows = [
                compare(video, full, s.caption, self.perceptual, driving_frames(batch.job, s), self.pipe.models.device)
                for video, full, s in zip(run.frames, self.exact(n), batch.samples, strict=True)
            ]
            done += rows
            self.keep(setting, rows)
        return [row.psnr for row in done]

    def exact(self, n: int) -> Tensor:
        """Frames of the full run of batch `n`."""
        while len(self.full) <= n:
            self.full.append(make(self.pipe, self.batches[len(self.full)], self.plan).frames)
        return self.full[n]

    def keep(self, setting: str, rows: Sequence[Comparison]) -> None:
        with self.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"setting": setting, "videos": [asdict(row) for row in rows]}) + "\n")

    def resume(self) -> None:
        """Read the rows of a search that was broken off; begin a new file where there is none. Raises OptionError where
        the rows are of other videos."""
        head = json.dumps({"of": self.described})
        if not self.rows.is_file():
            self.rows.write_text(head + "\n", encoding="utf-8")
            return
        lines = self.rows.read_text(encoding="utf-8").split("\n")
        if lines[0] != head:
            raise OptionError(
                f"{self.rows} has rows of other videos, steps or models: choose another --out, or delete it"
            )
        for line in lines[1:-1]:  # what follows the last line break was broken off
            try:
                row = json.loads(line)
                self.comparisons.setdefault(row["setting"], []).extend(Comparison(**one) for one in row["videos"])
            except (ValueError, KeyError, TypeError) as fault:
                raise OptionError(f"{self.rows} is damaged ({fault}): delete it to measure again") from fault
        self.rows.write_text("\n".join([*lines[:-1], ""]), encoding="utf-8")
        show(f"search: {len(self.comparisons)} settings were measured before")

    # ------------------------------------------------------------------------------------------------------- results

    def row(self, setting: str) -> dict[str, Any]:
        """What is said of a setting: seconds, forwards, quality with the standard errors of its means."""
        comparisons = self.comparisons[setting]
        row = {"setting": setting, "seconds": round(self.seconds(setting), 2)}
        return row | {
            "forwards": self.planned(self.batches[0], setting).forwards,
            "videos": len(comparisons),
            **summary(comparisons),
        }

    def front(self) -> list[dict[str, Any]]:
        """The Pareto front of seconds and PSNR of all settings that were measured on all videos, fastest first."""
        whole = {s: videos for s, videos in self.comparisons.items() if len(videos) >= self.options.count}
        points = {s: (-self.seconds(s), fmean(one.psnr for one in videos)) for s, videos in whole.items()}
        return [self.row(setting) for setting in reversed(pareto(points))]


def full_size(task: Task, size: str) -> tuple[DiTConfig, tuple[int, int, int]]:
    """Architecture of a task, and latent frames, rows and columns of its video of that size. Raises OptionError."""
    if task.full_size is None:
        raise OptionError(f"task {task.name} has no size of its own to estimate: give another one with --of-task")
    width, height, frames = size_of(size)
    vae = task.vae
    T = vae.latent_frames(frames)
    return task.full_size, (T, height // vae.spatial_stride, width // vae.spatial_stride)


def estimated_seconds(
    plan: Plan, config: DiTConfig, latents: tuple[int, int, int], forward: float, others: float
) -> float:
    """The seconds of a whole video by a plan. forward: seconds of a dense forward; others: of all else."""
    seconds: dict[Expert, float] = {"high": forward, "low": forward}
    return (with_costs(plan, config, latents).estimate(seconds) or 0.0) + others


def size_of(text: str) -> tuple[int, int, int]:
    """`WIDTHxHEIGHTxFRAMES`. Raises OptionError."""
    size, _, frames = text.rpartition("x")
    if not frames.isdecimal() or "x" not in size:
        raise OptionError(f"size {text!r} given; write WIDTHxHEIGHTxFRAMES: 1280x720x81")
    return *parse_size(size), int(frames)


def table(rows: Sequence[dict[str, Any]], chosen: Sequence[str]) -> str:
    """The front as text; `*` marks the presets."""
    lines = [f"  {'seconds':>8}{'forwards':>9}{'dB':>8}{'worst':>8}{'SSIM':>8}{'true':>8}  setting"]
    for row in rows:
        mark, truth = "*" if row["setting"] in chosen else " ", f"{row['truth']:.3f}" if "truth" in row else "-"
        lines.append(
            f"{mark} {row['seconds']:>8.1f}{row['forwards']:>9}{row['psnr']:>8.2f}{row['psnr_worst']:>8.2f}"
            f"{row['ssim']:>8.4f}{truth:>8}  {row['setting']}"
        )
    return "\n".join(lines)
