"""`generate --prompts FILE.jsonl`: many videos, on one device, on several GPUs, or on a cluster."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from wan_core.cli.generate import load_options_of
from wan_core.cli.options import devices_of, worker_options
from wan_core.cli.parsing import program
from wan_core.config import LoadOptions, OptionError

if TYPE_CHECKING:
    from wan_core.workers.video_list import ListMakers, Outcome

NOT_WITH_A_LIST = {
    "save_latents": "a list keeps no latents",
    "report": "each video of a list has a report beside it",
    "overwrite": "a list never replaces files: delete those that are to be made again",
}


def run_list(options: argparse.Namespace) -> int:
    """Returns 1 if a video could not be made."""
    from wan_core.cli.prompt_file import is_finished, read_list, set_aside
    from wan_core.workers.video_list import Outcome, VideoList, make_all

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
        outcome = make_all(VideoList(left, is_finished, tell), makers) if left else Outcome()
    return say(outcome, len(videos) - len(left))


def makers_of(options: argparse.Namespace, loaded: LoadOptions) -> ListMakers:
    """This process, groups of GPUs, or a cluster: each maker has as many devices as the mesh. Raises OptionError."""
    from wan_core.workers.options import group_size

    mesh = options.mesh
    if options.ray is None:
        from wan_core.workers.video_list import LocalMakers

        devices = devices_of(options)
        if devices is None:
            return LocalMakers(None, options.device, loaded)
        size = group_size(mesh, len(devices))
        groups = [devices[first : first + size] for first in range(0, len(devices), size)]
        return LocalMakers([worker_options(options, group) for group in groups], options.device, loaded)
    from wan_core.cluster.connect import Wanted, connect
    from wan_core.cluster.lists import ClusterMakers

    wanted = Wanted.parse(options.gpus)
    size = group_size(mesh, wanted.count)
    connect(options.ray)
    return ClusterMakers(wanted, size, (mesh, options.step_timeout), loaded, tell)


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
