"""`generate --prompts FILE.jsonl`: many videos, on one device, on several GPUs, or on a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from wan_core.cli.generate import load_options_of
from wan_core.cli.options import devices_of, worker_options
from wan_core.cli.parsing import program
from wan_core.config import LoadOptions, OptionError

if TYPE_CHECKING:
    from wan_core.pipeline.pipeline import Engine
    from wan_core.workers.options import WorkerOptions
    from wan_core.workers.video_list import ListedVideo, Outcome, VideoList

NOT_WITH_A_LIST = {
    "save_latents": "a list keeps no latents",
    "sheet": "a list makes no sheets",
    "report": "each video of a list has a report beside it",
    "overwrite": "a list never replaces files: delete those that are to be made again",
}


def run_list(options: argparse.Namespace) -> int:
    """Returns 1 if a video could not be made."""
    from wan_core.cli.prompt_file import is_finished, read_list, set_aside
    from wan_core.workers.video_list import Outcome, VideoList

    for name, advice in NOT_WITH_A_LIST.items():
        if getattr(options, name):
            raise OptionError(f"--{name.replace('_', '-')} does not go with --prompts: {advice}")
    loaded = load_options_of(options)
    with closing(makers_of(options, loaded)) as makers:
        videos = read_list(options.prompts, options, loaded)
        left = [video for video in videos if not is_finished(video)]
        for note in makers.check(left, options.prompts) if left else ():
            tell(note)
        if len(left) < len(videos):
            tell(f"{len(videos) - len(left)} of {len(videos)} videos are there already and are not made again")
        for words in filter(None, map(set_aside, left)):
            tell(words)
        outcome = makers.make(VideoList(left, is_finished, tell)) if left else Outcome()
    return say(outcome, len(videos) - len(left))


class ListMakers(Protocol):
    """Those that make the videos of a list: here, or on a cluster."""

    def check(self, videos: Sequence[ListedVideo], source: Path) -> Iterable[str]:
        """The notes of all videos, each once. Raises OptionError for a line of the file `source` that cannot run."""
        ...

    def make(self, videos: VideoList) -> Outcome: ...

    def close(self) -> None: ...


def makers_of(options: argparse.Namespace, loaded: LoadOptions) -> ListMakers:
    """Raises OptionError."""
    if options.ray is None:
        return LocalMakers(options, loaded)
    from wan_core.cluster.connect import Wanted, connect
    from wan_core.cluster.lists import ClusterList, Makers
    from wan_core.parallel.mesh import Mesh

    mesh = options.mesh.strip().lower()
    size = 1 if mesh == "auto" else Mesh.parse(mesh).size
    makers = Makers(Wanted.parse(options.gpus), size, mesh, options.step_timeout)
    connect(options.ray)
    return ClusterList(makers, loaded, tell)


class LocalMakers:
    """This process, or the groups of GPUs that --gpus names."""

    def __init__(self, options: argparse.Namespace, loaded: LoadOptions) -> None:
        self.groups, self.device, self.loaded = list_groups(options), options.device, loaded

    def check(self, videos: Sequence[ListedVideo], source: Path) -> Iterable[str]:
        import torch

        from wan_core.pipeline.check import ListCheck
        from wan_core.pipeline.settings import choose_device

        device = choose_device(self.device) if self.groups is None else torch.device(self.groups[0].devices[0])
        check, notes = ListCheck(self.loaded, device), dict[str, None]()  # in their order
        for video in videos:
            try:
                notes |= dict.fromkeys(check.notes(video.request))
            except OptionError as fault:
                raise OptionError(f"line {video.line} of {source}: {fault}") from fault
        return notes

    def make(self, videos: VideoList) -> Outcome:
        """The ranks of all groups end with it."""
        from wan_core.pipeline.pipeline import LocalEngine
        from wan_core.workers.client import WorkerEngine
        from wan_core.workers.launcher import Workers
        from wan_core.workers.video_list import Maker, make_all, make_video

        with ExitStack() as stack:
            running = [stack.enter_context(Workers(group)) for group in self.groups or ()]
            engines: dict[str, Engine] = {
                f"group {number} ({', '.join(workers.options.devices)})": WorkerEngine(workers)
                for number, workers in enumerate(running, 1)
            }
            engines = engines or {"this process": LocalEngine()}
            makers = [Maker(name, partial(make_video, engine, self.loaded)) for name, engine in engines.items()]
            return make_all(videos, makers, lambda: [workers.kill() for workers in running])

    def close(self) -> None:
        pass


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
