"""`generate --prompts FILE.jsonl`: many videos, on one device, on several GPUs, or on a cluster. Each line of the file
is one video, as a JSON object of command-line options."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from wan_core.cli.generate import load_options_of, request_of
from wan_core.cli.list_keys import contents, key_of
from wan_core.cli.options import add_request_options, devices_of, worker_options
from wan_core.cli.parsing import finite, plain_words, program
from wan_core.config import RANDOM_SEED, LoadOptions, OptionError, Request
from wan_core.config.checks import meant_hint, near_file
from wan_core.config.outputs import check_place, folded
from wan_core.config.table import table
from wan_core.media.mp4 import check_video_name
from wan_core.media.video import read_metadata
from wan_core.workers.video_list import KEY, ListedVideo

MOST_VIDEOS = 100_000
REPEATED = {name for name, one in table(Request).items() if one.several}  # fields that may be a list of texts
TEXTS = {name for name, one in table(Request).items() if one.text}  # that may hold any characters


class LineParser(argparse.ArgumentParser):
    """Raises OptionError where argparse would end the program."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.register("type", float, finite)

    def error(self, message: str) -> NoReturn:
        raise OptionError(plain_words(message))


def read_list(path: Path, options: argparse.Namespace, loaded: LoadOptions) -> list[ListedVideo]:
    """The videos of a file, each line checked. Options of the command line hold for every line that does not name
    them. Raises OptionError."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as fault:
        raise OptionError(f"cannot read the list {path}: {fault.strerror}{near_file(path)}") from fault
    except UnicodeDecodeError as fault:
        raise OptionError(f"the list {path} is no text in UTF-8: write one JSON object a line") from fault
    parser = _line_parser(options)
    contents.cache_clear()
    videos: list[ListedVideo] = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            videos.append(_video(number, _fields(text), parser, options.out, loaded))
        except OptionError as fault:
            raise OptionError(f"line {number} of {path}: {fault}") from fault
    if not 1 <= len(videos) <= MOST_VIDEOS:
        raise OptionError(f"{len(videos)} videos in {path}; allowed are 1 to {MOST_VIDEOS}, one JSON object a line")
    _check_names(path, videos)
    return videos


def _line_parser(options: argparse.Namespace) -> argparse.ArgumentParser:
    """Knows the options of one video, with those of the command line as defaults."""
    parser = LineParser(add_help=False, allow_abbrev=False)
    add_request_options(parser, prompt=False)
    parser.add_argument("--out", type=Path)
    known = {action.dest for action in parser._actions} - {"prompt", "out"}
    parser.set_defaults(**{name: value for name, value in vars(options).items() if name in known})
    return parser


def _fields(text: str) -> Mapping[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise OptionError(f"field {twice[0]!r} is there twice")
        return dict(pairs)

    try:
        found = json.loads(text, object_pairs_hook=once)
    except OptionError:
        raise
    except (ValueError, RecursionError) as fault:
        raise OptionError(f"no JSON object: {fault}") from fault
    if not isinstance(found, dict):
        raise OptionError('no JSON object; write {"prompt": "...", "seed": 1}')
    return found


def _video(
    line: int, found: Mapping[str, Any], parser: argparse.ArgumentParser, out: Path, loaded: LoadOptions
) -> ListedVideo:
    known = {action.dest: action.option_strings[0] for action in parser._actions}
    switches = {action.dest: action.option_strings for action in parser._actions if action.nargs == 0}
    words = []
    for name, value in found.items():
        if name not in known:
            hint = meant_hint(name, known) or f"; allowed are {', '.join(sorted(known))}"
            raise OptionError(f"field {name!r} is not known{hint}")
        if isinstance(value, bool) and name in switches:
            words += switches[name][:1] if value else switches[name][-1:]  # --svi, --no-svi
            continue
        for one in value if name in REPEATED and isinstance(value, list) else [value]:
            if isinstance(one, bool) or not isinstance(one, (str, int, float)):
                raise OptionError(f"field {name!r} is {json.dumps(value)[:60]}; write a text or a number")
            if name not in TEXTS and not can_be_a_path(str(one)):
                raise OptionError(f"field {name!r} is {json.dumps(value)[:60]}: no name of a file has such characters")
            words.append(f"{known[name]}={one}")  # with =, so that a text may begin with a dash
    given = parser.parse_args(words)
    if not (given.prompt or "").strip() and not given.prompts_at:
        raise OptionError("field 'prompt' is missing or empty")
    if given.seed == RANDOM_SEED:
        raise OptionError("seed random given: a list needs numbers, by which videos that are there are known again")
    request = request_of(given)
    name = out.with_name(f"{out.stem}-{line:04}{out.suffix}") if given.out is None else given.out
    check_video_name(name)
    return ListedVideo(line, request, name, key_of(request, loaded))


def can_be_a_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a character
        return False


def is_finished(video: ListedVideo) -> bool:
    """Whether the file is there and holds this video. Raises OptionError where another has its name."""
    if not video.out.exists():
        return False
    if read_metadata(video.out).get(KEY) != video.key:
        raise OptionError(
            f"{video.out} exists and was not made by this line: choose another name in the field 'out', or delete it"
        )
    return True


def _check_names(path: Path, videos: list[ListedVideo]) -> None:
    """Raise OptionError where two lines write one file, or a file cannot be written or is another video."""
    taken: dict[str, int] = {}
    for folder in {video.out.parent for video in videos}:
        check_place(folder / ".wancore-list")
    for video in videos:
        try:
            other = taken.setdefault(folded(video.out), video.line)
            if other != video.line:
                raise OptionError(f"{video.out} is written by line {other} too: choose another name in the field 'out'")
            if not is_finished(video) and video.report.exists():
                raise OptionError(f"{video.report} exists and its video does not: delete it, or choose another 'out'")
        except OptionError as fault:
            raise OptionError(f"line {video.line} of {path}: {fault}") from fault


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
    from wan_core.cli.prompt_list import is_finished, read_list
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

        from wan_core.pipeline.check import check_request
        from wan_core.pipeline.settings import choose_device

        device = choose_device(self.device) if self.groups is None else torch.device(self.groups[0].devices[0])
        notes: dict[str, None] = {}  # in their order
        for video in videos:
            try:
                notes |= dict.fromkeys(check_request(self.loaded, video.request, device).job.plan.notes)
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
