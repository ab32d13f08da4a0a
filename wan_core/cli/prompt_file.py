"""The file of `generate --prompts`: one video in a line, as a JSON object of command-line options."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from wan_core.cli.generate import request_of
from wan_core.cli.list_keys import contents, key_of
from wan_core.cli.options import add_request_options
from wan_core.cli.parsing import finite, plain_words
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
