"""`generate --prompts FILE.jsonl`: many videos, on one device, on several GPUs, or on several hosts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from wan_core.cli.generate import load_options_of, sound_of
from wan_core.cli.options import devices_of, worker_options
from wan_core.cli.parsing import program
from wan_core.config import LoadOptions, OptionError

if TYPE_CHECKING:
    from wan_core.pipeline.engine import Engine
    from wan_core.workers.options import WorkerOptions
    from wan_core.workers.video_list import ListedVideo, Outcome

NOT_WITH_A_LIST = {
    "save_latents": "a list keeps no latents",
    "sheet": "a list makes no sheets",
    "report": "each video of a list has a report beside it",
    "overwrite": "a list never replaces files: delete those that are to be made again",
    "rdzv": "start the same command on every host, in a folder that all of them share",
}


def run_list(options: argparse.Namespace) -> int:
    """Returns 1 if a video could not be made."""
    import torch

    from wan_core.cli.prompt_file import is_finished, read_list
    from wan_core.pipeline.check import check_request
    from wan_core.pipeline.settings import choose_device
    from wan_core.workers.video_list import Outcome

    for name, advice in NOT_WITH_A_LIST.items():
        if getattr(options, name):
            raise OptionError(f"--{name.replace('_', '-')} does not go with --prompts: {advice}")
    loaded = load_options_of(options)
    groups = list_groups(options)
    videos = read_list(options.prompts, options, loaded)
    left = [video for video in videos if not is_finished(video)]
    device = choose_device(options.device) if groups is None else torch.device(groups[0].devices[0])
    notes: dict[str, None] = {}  # of all videos, each once, in their order
    for video in left:
        try:
            notes |= dict.fromkeys(check_request(loaded, video.request, device).job.plan.notes)
        except OptionError as fault:
            raise OptionError(f"line {video.line} of {options.prompts}: {fault}") from fault
    for note in notes:
        tell(note)
    if len(left) < len(videos):
        tell(f"{len(videos) - len(left)} of {len(videos)} videos are there already and are not made again")
    outcome = make_left(left, groups, loaded) if left else Outcome()
    return say(outcome, len(videos) - len(left))


def make_left(left: Sequence[ListedVideo], groups: Sequence[WorkerOptions] | None, loaded: LoadOptions) -> Outcome:
    """Make the videos that are not there. The ranks of all groups end with it."""
    from wan_core.cli.prompt_file import is_finished
    from wan_core.pipeline.engine import LocalEngine
    from wan_core.workers.client import WorkerEngine
    from wan_core.workers.launcher import Workers
    from wan_core.workers.video_list import Maker, SharedClaims, VideoList, make_all

    with ExitStack() as stack:
        running = [stack.enter_context(Workers(group)) for group in groups or ()]
        engines: dict[str, Engine] = {
            f"group {number} ({', '.join(workers.options.devices)})": WorkerEngine(workers)
            for number, workers in enumerate(running, 1)
        }
        engines = engines or {"this process": LocalEngine()}
        makers = [Maker(name, partial(make_video, engine, loaded)) for name, engine in engines.items()]
        claims = stack.enter_context(SharedClaims())
        listed = VideoList(left, [maker.name for maker in makers], claims, is_finished, tell)
        return make_all(listed, makers, lambda: [workers.kill() for workers in running])


def tell(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def say(outcome: Outcome, before: int) -> int:
    """Print what became of the list. Returns the exit code."""
    parts = [f"{len(outcome.made)} made", f"{before} were there before"]
    parts += [f"{len(outcome.elsewhere)} made by other programs"] * bool(outcome.elsewhere)
    parts += [f"{len(outcome.failed)} not made"] * bool(outcome.failed)
    print(f"videos: {', '.join(parts)}")
    if outcome.failed:
        lines = ", ".join(map(str, sorted(outcome.failed)))
        tell(f"{program()} generate: not made are lines {lines}; the same command tries them again")
    return int(bool(outcome.failed))


def list_groups(options: argparse.Namespace) -> list[WorkerOptions] | None:
    """The devices of each maker: one, or as many as the mesh needs. None without --gpus. Raises OptionError."""
    from wan_core.parallel.mesh import Mesh

    devices, mesh = devices_of(options), options.mesh.strip().lower()
    if devices is None:
        return None
    size = 1 if mesh == "auto" else Mesh.parse(mesh).size
    if len(devices) % size:
        raise OptionError(
            f"mesh {mesh} needs {size} GPUs for each video, and {len(devices)} are given: give a multiple of {size}"
        )
    return [worker_options(options, devices[first : first + size]) for first in range(0, len(devices), size)]


def make_video(engine: Engine, loaded: LoadOptions, video: ListedVideo) -> None:
    """Have the engine make the video, and write its report beside it. Raises OptionError where a file of that name came
    meanwhile."""
    from wan_core.cli.prompt_file import KEY, report_of
    from wan_core.media.mp4 import write_mp4
    from wan_core.pipeline.pipeline import metadata

    def write(frames: Iterator[Any], /, *, fps: int, settings: Mapping[str, Any]) -> None:
        if os.path.lexists(video.out):
            raise OptionError(f"{video.out} came while this video was made, and is not replaced")
        sound = sound_of(video.request.audio)
        write_mp4(video.out, frames, fps=fps, sound=sound, metadata={**metadata(settings), KEY: video.key})

    engine.generate(loaded, video.request, write=write).report.save(report_of(video))
