"""The file of `generate --prompts`: one video in a line, as a JSON object of command-line options."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from wan_core.cli.generate import request_of
from wan_core.cli.options import add_request_options
from wan_core.cli.parsing import MOST_REPEATED, Parser, plain_words
from wan_core.config import RANDOM_SEED, LoadOptions, OptionError, Request
from wan_core.config.changes import until_changed
from wan_core.config.checks import meant_hint, near_file
from wan_core.config.durable import DamagedFile, check_seal
from wan_core.config.keys import in_keys, key_of
from wan_core.config.limits import MAX_LINE, MAX_LIST
from wan_core.config.outputs import check_place, folded, numbered
from wan_core.config.table import table
from wan_core.media.mp4 import check_video_name
from wan_core.media.video import read_metadata
from wan_core.workers.video_list import KEY, ListedVideo

MOST_VIDEOS = 100_000
REPEATED = {name for name, one in table(Request).items() if one.several}  # fields that may be a list of texts
TEXTS = {name for name, one in table(Request).items() if one.text}  # that may hold any characters


class LineParser(Parser):
    """Raises OptionError where the command line would end the program."""

    def error(self, message: str) -> NoReturn:
        raise OptionError(plain_words(message))


def read_list(path: Path, options: argparse.Namespace, loaded: LoadOptions) -> list[ListedVideo]:
    """The videos of a file, each line checked. Options of the command line hold for every line that does not name
    them. Limits and names are checked before files are read. Raises OptionError."""
    lines = _lines(path)
    reader = _LineReader(options)
    requests: list[tuple[int, Request, Path]] = []
    for number, text in lines:
        with _in_line(number, path):
            requests.append((number, *reader.read(number, text)))
    _check_names(path, [(number, out) for number, _, out in requests])
    models = in_keys(loaded)
    videos = [ListedVideo(number, request, out, key_of(request, loaded, models)) for number, request, out in requests]
    for video in videos:
        with _in_line(video.line, path):
            if not is_finished(video) and not os.path.lexists(video.out) and os.path.lexists(video.report):
                raise OptionError(f"{video.report} exists and its video does not: delete it, or choose another 'out'")
    return videos


def _lines(path: Path) -> list[tuple[int, str]]:
    """The lines of the file that are not empty, with their numbers. Raises OptionError for more than a list has."""
    lines: list[tuple[int, str]] = []
    number, characters = 0, 0
    try:
        with path.open(encoding="utf-8-sig") as file:
            while text := file.readline(MAX_LINE + 1):
                number, characters = number + 1, characters + len(text)
                if len(text) > MAX_LINE or characters > MAX_LIST:
                    what, most = ("line", MAX_LINE) if len(text) > MAX_LINE else ("list", MAX_LIST)
                    raise OptionError(f"line {number} of {path}: the {what} has more than {most} characters")
                if text.strip():
                    lines.append((number, text))
                if len(lines) > MOST_VIDEOS:
                    raise OptionError(f"{path} has more than {MOST_VIDEOS} videos: make several lists of it")
    except OSError as fault:
        raise OptionError(f"cannot read the list {path}: {fault.strerror}{near_file(path)}") from fault
    except UnicodeDecodeError as fault:
        raise OptionError(f"the list {path} is no text in UTF-8: write one JSON object a line") from fault
    if not lines:
        raise OptionError(f"0 videos in {path}; allowed are 1 to {MOST_VIDEOS}, one JSON object a line")
    return lines


@contextmanager
def _in_line(number: int, path: Path) -> Iterator[None]:
    """An OptionError inside says in which line of which file."""
    try:
        yield
    except OptionError as fault:
        raise OptionError(f"line {number} of {path}: {fault}") from fault


def _fields(text: str) -> Mapping[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise OptionError(f"field {name!r} is there twice")
            found[name] = value
        return found

    try:
        found = json.loads(text, object_pairs_hook=once)
    except OptionError:
        raise
    except (ValueError, RecursionError) as fault:
        raise OptionError(f"no JSON object: {fault}") from fault
    if not isinstance(found, dict):
        raise OptionError('no JSON object; write {"prompt": "...", "seed": 1}')
    return found


class _LineReader:
    """Knows the options of one video, with those of the command line as defaults."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.parser, self.out = LineParser(add_help=False, allow_abbrev=False), options.out
        add_request_options(self.parser, prompt=False)
        self.parser.add_argument("--out", type=Path)
        actions = self.parser._actions
        defaults = {name: value for name, value in vars(options).items() if name not in ("prompt", "out")}
        self.known = {action.dest: action.option_strings[0] for action in actions}
        self.switches = {action.dest: action.option_strings for action in actions if action.nargs == 0}
        self.parser.set_defaults(**{name: value for name, value in defaults.items() if name in self.known})

    def read(self, line: int, text: str) -> tuple[Request, Path]:
        """What a line asks for, and where its video goes. Raises OptionError."""
        words = [word for name, value in _fields(text).items() for word in self._words(name, value)]
        given = self.parser.parse_args(words)
        if not (given.prompt or "").strip() and not given.prompts_at:
            raise OptionError("field 'prompt' is missing or empty")
        if given.seed == RANDOM_SEED:
            raise OptionError("seed random given: a list needs numbers, by which videos that are there are known again")
        out = self.out.with_name(f"{self.out.stem}-{line:04}{self.out.suffix}") if given.out is None else given.out
        check_video_name(out)
        return request_of(given), out

    def _words(self, name: str, value: Any) -> Sequence[str]:
        if name not in self.known:
            hint = meant_hint(name, self.known) or f"; allowed are {', '.join(sorted(self.known))}"
            raise OptionError(f"field {name[:60]!r} is not known{hint}")
        if isinstance(value, bool) and name in self.switches:
            return self.switches[name][:1] if value else self.switches[name][-1:]  # --svi, --no-svi
        values = value if name in REPEATED and isinstance(value, list) else [value]
        if len(values) > MOST_REPEATED:
            raise OptionError(f"field {name!r} has {len(values)} entries, and at most {MOST_REPEATED} are allowed")
        for one in values:
            if isinstance(one, bool) or not isinstance(one, (str, int, float)):
                raise OptionError(f"field {name!r} is {json.dumps(value)[:60]}; write a text or a number")
            if name not in TEXTS and not can_be_a_path(str(one)):
                raise OptionError(f"field {name!r} is {json.dumps(value)[:60]}: no name of a file has such characters")
        return [f"{self.known[name]}={one}" for one in values]  # with =, so that a text may begin with a dash


def can_be_a_path(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a character
        return False


def is_finished(video: ListedVideo) -> bool:
    """Whether the file is there, is whole and holds this video. Raises OptionError where another video has its name."""
    return os.path.lexists(video.out) and damage_of(video) is None


def damage_of(video: ListedVideo) -> str | None:
    """What is wrong with the file of a listed video that was made; None for one that is as it was written. Raises
    OptionError where another has its name."""
    try:
        key, damage = _written(video.out)
    except (OptionError, OSError) as fault:
        why = getattr(fault, "strerror", None) or fault
        raise OptionError(
            f"{video.out} is there and cannot be read ({why}): choose another name in the field 'out', or delete it"
        ) from fault
    if key != video.key:
        raise OptionError(
            f"{video.out} exists and was not made by this line: choose another name in the field 'out', or delete it"
        )
    return damage


@until_changed(MOST_VIDEOS)  # a list asks several times
def _written(path: Path) -> tuple[str | None, str | None]:
    """The key in a video, and what is wrong with it."""
    if not path.is_file():
        raise OptionError("it is no file")
    try:
        check_seal(path)
    except DamagedFile as fault:
        return read_metadata(path).get(KEY), str(fault)
    return read_metadata(path).get(KEY), None


def set_aside(video: ListedVideo) -> str | None:
    """Give the damaged file of a listed video another name, so that the video is made again. Returns a sentence that
    says so; None where nothing is in its place. Raises OSError."""
    if not os.path.lexists(video.out) or (damage := damage_of(video)) is None:
        return None
    aside = next(path for path in numbered(video.out.with_name(f"{video.out.name}.bak")) if not os.path.lexists(path))
    video.out.rename(aside)
    video.report.unlink(missing_ok=True)
    return f"{damage}; it is now {aside.name}, and the video is made again"


def _check_names(path: Path, outs: list[tuple[int, Path]]) -> None:
    """Raise OptionError where two lines write one file, or a file cannot be written."""
    taken: dict[str, int] = {}
    for folder in {out.parent for _, out in outs}:
        check_place(folder / ".wancore-list")
    for number, out in outs:
        other = taken.setdefault(folded(out), number)
        if other != number:
            with _in_line(number, path):
                raise OptionError(f"{out} is written by line {other} too: choose another name in the field 'out'")
