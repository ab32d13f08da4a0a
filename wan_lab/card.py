"""The report card of a model on a machine: prompts x (full run, words of speed), as one Markdown file and one picture.

Finished videos are kept in a folder until the card is written, so that a card that was broken off goes on there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from PIL import Image
from torch import Tensor

from wan_core import __version__
from wan_core.config import EXACT, SPEEDS, LoadOptions, OptionError, Request, SkipOptions
from wan_core.config.changes import stamps
from wan_core.config.outputs import Outputs, write_text
from wan_core.execution.report import GIB, Report, device_name
from wan_core.media.pictures import clock, save_picture
from wan_core.models.wan.families import Task
from wan_core.pipeline.check import check_request
from wan_core.pipeline.first_use import forward_each_kind
from wan_core.pipeline.pipeline import LocalEngine
from wan_core.pipeline.run import Watch
from wan_core.pipeline.settings import choose_device
from wan_core.pipeline.sources import find_models, for_request
from wan_core.sampling.plan import Plan
from wan_lab.card_page import FULL, Card, Video
from wan_lab.commits import commit
from wan_lab.compare import compare, find_perceptual
from wan_lab.run import chosen, show
from wan_lab.samples import Sample, drawn_media

SIZE = (832, 480)
SHORTER = (49, 33, 17)  # frames that are tried where more do not fit
TOO_LARGE = "did not fit into this card's memory"
REFUSED = "cannot run with these weights and steps"


class Maker(Protocol):
    """Makes videos of one model at one size, with so many frames."""

    def plan(self, skip: SkipOptions | None, frames: int) -> Plan:
        """The plan of a video, checked without weights. Raises OptionError."""
        ...

    def forward_seconds(self, frames: int) -> float:
        """Seconds of one dense forward. Raises torch.cuda.OutOfMemoryError where it does not fit."""
        ...

    def make(self, sample: Sample, skip: SkipOptions | None, frames: int) -> tuple[Tensor, Report]:
        """The frames, uint8 [F, H, W, 3], and the report of the run."""
        ...


class PipelineMaker:
    """Makes videos from files, as the command line does. watch: observes every run."""

    def __init__(
        self, options: LoadOptions, base: Request, samples: Sequence[Sample], task: Task, watch: Watch
    ) -> None:
        self.options, self.base, self.samples, self.task, self.watch = options, base, samples, task, watch
        self.device, self.engine = choose_device(options.device), LocalEngine()

    @contextmanager
    def request(self, sample: Sample, skip: SkipOptions | None, frames: int) -> Iterator[Request]:
        request = replace(self.base, prompt=sample.caption, seed=sample.seed, frames=frames, skip=skip)
        with drawn_media(self.task.name, request, sample) as filled:
            yield filled

    def plan(self, skip: SkipOptions | None, frames: int) -> Plan:
        with self.request(self.samples[0], skip, frames) as request:
            return check_request(self.options, request, self.device).plan

    def forward_seconds(self, frames: int) -> float:
        """Seconds of one forward of the expert that begins: the second is timed, the first also loads the weights."""
        with self.request(self.samples[0], None, frames) as request, torch.no_grad():
            pipe = self.engine.load(self.options, request, self.watch)
            pipe.warm_up(request, self.watch.phase)
            job, report = pipe.prepare(request).job, Report(self.device)
            model, first = pipe.models.expert(job.plan.experts[0]), job.plan.steps[:1]
            with report.phase("forward") as phase:
                forward_each_kind(model, job.plan, first, self.device)
            return phase.seconds / (2 if job.plan.batched else 1)

    def make(self, sample: Sample, skip: SkipOptions | None, frames: int) -> tuple[Tensor, Report]:
        with self.request(sample, skip, frames) as request:
            result = self.engine.generate(self.options, request, self.watch)
        return torch.from_numpy(result.frames), result.report


def card_settings() -> dict[str, SkipOptions | None]:
    """The settings of a card."""
    return {FULL: None, **{name: SkipOptions(speed=name) for name in SPEEDS if name != EXACT}}


def card_size(task: Task, width: int | None, height: int | None) -> tuple[int | None, int | None]:
    """Width and height of a card's videos: 480p; None, its own, of the embedded model. Raises OptionError for a model
    that needs more than a prompt and an image."""
    if task.family != "wan":
        raise OptionError(f"{task.name} given; a report card is made of text-to-video and image-to-video models")
    return SIZE if width is None and task.release != "embedded" else (width, height)


def measure_card(
    maker: Maker,
    samples: Sequence[Sample],
    settings: Mapping[str, SkipOptions | None],
    frames: int,
    device: torch.device,
    folder: Path,
    tell: Callable[[str], None],
    on_checked: Callable[[], None] = lambda: None,
) -> Card:
    """Make every video that is not in the folder `kept` yet, and compare. Raises OptionError before the weights are
    read where the full run is refused. on_checked: called before that."""
    name, perceptual = find_perceptual()
    card = Card(settings, {}, name, device)

    def plan_all() -> None:
        for name, skip in settings.items():
            try:
                card.plans[name] = maker.plan(skip, frames)
            except OptionError as fault:
                if name == FULL:
                    raise
                card.left_out[name] = REFUSED
                tell(f"{name} is left out: {fault}")

    plan_all()
    on_checked()
    asked, (frames, forward) = frames, fitting(maker, frames, tell)
    if frames != asked:
        card.notes.append(f"{frames} frames: a forward of {asked} {TOO_LARGE}")
        plan_all()
    expected = {name: plan.estimate(dict.fromkeys(plan.experts, forward)) or 0.0 for name, plan in card.plans.items()}
    planned = [name for name in settings if name not in card.left_out]
    paths = {(n, name): folder / f"{n}-{name}-{frames}.npz" for n in range(len(samples)) for name in planned}
    needed = [key for key, path in paths.items() if not path.is_file()]
    seconds = sum(expected[name] for _, name in needed)
    there = len(paths) - len(needed)
    tell(
        f"{len(samples)} prompts x {', '.join(planned)}: about {clock(seconds)} by a timed forward of {forward:.3g} s, "
        f"without text and decoding{f'; {there} finished videos are there' * bool(there)}"
    )
    exact = torch.empty(0)
    for n, sample in enumerate(samples):
        card.sheets.append({})
        for name in planned:
            if name in card.left_out:
                continue
            video = Video.read(paths[n, name])
            if video is None:
                begin = time.perf_counter()
                try:
                    frames_and_forwards = maker.make(sample, settings[name], frames)
                except torch.cuda.OutOfMemoryError:
                    if name == FULL:
                        raise
                    card.left_out[name] = TOO_LARGE
                    tell(f"{name} is left out: it {TOO_LARGE}")
                    continue
                video = Video.measured(*frames_and_forwards, time.perf_counter() - begin)
                video.write(paths[n, name])
            exact = video.frames if name == FULL else exact
            card.add(name, video, compare(video.frames, exact, sample.caption, perceptual, device=device))
            seconds -= expected[name] if (n, name) in needed else 0.0
            more = f"about {clock(seconds)} left" if seconds > 0.5 else "done"
            tell(f"prompt {n + 1} of {len(samples)}, {name}: {clock(video.facts['seconds'])}; {more}")
    return card


def fitting(maker: Maker, frames: int, tell: Callable[[str], None]) -> tuple[int, float]:
    """The most frames up to `frames` of which a forward fits, and its seconds. Raises torch.cuda.OutOfMemoryError where
    none does."""
    lengths = [frames, *(fewer for fewer in SHORTER if fewer < frames)]
    for length in lengths:
        try:
            return length, maker.forward_seconds(length)
        except torch.cuda.OutOfMemoryError:
            if length == lengths[-1]:
                raise
            tell(f"{length} frames: a forward {TOO_LARGE}")
        torch.cuda.empty_cache()
    raise AssertionError("unreachable")


def make_card(
    maker: Maker,
    samples: Sequence[Sample],
    settings: Mapping[str, SkipOptions | None],
    size: tuple[int, int, int],
    device: torch.device,
    out: Path,
    outputs: Outputs,
    tell: Callable[[str], None],
    identity: object,
    with_prompts: bool,
) -> tuple[str, Image.Image, list[Path]]:
    """Measure a card and write its files into the folder `out`, which is made. size: width, height and frames.
    identity: decides with all else whether videos that were kept are of this card. Returns the text, the picture, and
    their files. Raises OptionError before weights are read, as `measure_card` does."""
    whole = repr((__version__, commit(), device_name(device), samples, settings, size, identity))
    folder = out / ".report-card" / hashlib.sha256(whole.encode()).hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise OptionError(f"cannot write into the folder {out} ({fault.strerror}): choose another") from fault
    try:
        endings = ("png", "md", "json")
        picture, text, data = (outputs.add("the card", out / f"report-card.{ending}") for ending in endings)

        def on_checked() -> None:
            check_room(folder, len(samples) * len(settings) * math.prod(size) * 3)
            outputs.say_renamed()

        card = measure_card(maker, samples, settings, size[2], device, folder, tell, on_checked)
    except BaseException:
        if finished := len(list(folder.glob("*.npz"))):
            tell(f"{finished} finished videos are kept in {folder}: the same card goes on from them")
        else:
            remove_kept(folder)
        raise
    markdown, image = card.markdown(picture.name, [s.caption for s in samples if with_prompts]), card.picture()
    save_picture(image, picture)
    write_text(text, markdown)
    write_text(data, json.dumps(card.as_dict(), indent=1, ensure_ascii=False) + "\n")
    remove_kept(folder)
    return markdown, image, [text, picture, data]


def check_room(folder: Path, needed: int) -> None:
    """Raise OptionError where the disk has no room for so many bytes, less those that are in `kept`."""
    needed -= sum(path.stat().st_size for path in folder.glob("*.npz"))
    if needed > (free := shutil.disk_usage(folder).free):
        raise OptionError(
            f"the finished videos take {needed / GIB:.2g} GiB until the card is written, and the disk has "
            f"{free / GIB:.2g}: choose another folder, or fewer frames"
        )


def remove_kept(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # of another card, whose videos stay
        folder.parent.rmdir()


def run_card(options: argparse.Namespace, load: LoadOptions, base: Request, outputs: Outputs, watch: Watch) -> int:
    """The command `report-card`. base: what all videos share except for caption, seed, frames and settings."""
    load = for_request(load, base)
    parts = find_models(load, image=base.image is not None)
    task = parts.task
    samples = chosen(options, tiny=task.name.endswith("-tiny"))
    width, height = card_size(task, base.width, base.height)
    base = replace(base, width=width, height=height)
    size = width or task.width, height or task.height, base.frames or task.frames
    settings = card_settings()
    files = stamps(part.path for part in parts.of.values() if part.path is not None)
    maker = PipelineMaker(load, base, samples, task, watch)
    markdown, _, written = make_card(
        maker,
        samples,
        settings,
        size,
        maker.device,
        options.out,
        outputs,
        show,
        (load, base, files),
        options.with_prompts,
    )
    print(markdown, *written, sep="\n")
    return 0
