"""The parser of the command line: short usage, defaults in the help, suggestions for words that are nearly right."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from wan_core.config.checks import OptionError, meant_hint, nearly
from wan_core.config.table import Option, table

T = TypeVar("T")

NUMBERS = {"int": "whole number", "float": "number"}


def plain_words(message: str) -> str:
    """A message of argparse, rewritten to say what to do."""
    message = re.sub(r"invalid (int|float) value: (.*)", lambda bad: f"{bad[2]} is no {NUMBERS[bad[1]]}", message)
    message = re.sub(r"argument (\S+): not allowed with argument (\S+)", r"\2 and \1 given: leave one out", message)
    message = re.sub(r"one of the arguments (\S+) (\S+) is required", r"nothing to do: give \1 or \2", message)
    message = re.sub(
        r"argument (\S+): expected one argument", r"\1 needs a value; \1=VALUE for one that begins with -", message
    )
    return re.sub(r"the following arguments are required: (.*)", r"missing: \1", message)


def finite(text: str) -> float:
    """The number that an option names. Raises ValueError for one that is not finite."""
    number = float(text)
    if not isfinite(number):
        raise ValueError(text)
    return number


class DefaultsFormatter(argparse.RawDescriptionHelpFormatter):
    """Adds `(default X)` to the help of each option whose default its text does not name."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        says_nothing = action.default in (None, [], (), argparse.SUPPRESS) or action.default is False
        if not action.option_strings or says_nothing or "default" in text:
            return text
        return f"{text} (default %(default)s)".strip()


class Once(argparse.Action):
    """For an option that names one file: a second one is refused, where argparse would drop the first."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        first = getattr(namespace, self.dest)
        if first not in (None, parser.get_default(self.dest)):  # that of a list is the command line's, for every line
            one = f"one file is taken, and {first} and {value} are given"
            raise argparse.ArgumentError(self, f"{one}: leave one out")
        setattr(namespace, self.dest, value)


MOST_REPEATED = 1000  # values of an option that may be repeated


class Several(argparse.Action):
    """For an option that may be repeated: a tuple of all of its values. Those of a list's line take the place of the
    command line's."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: str | None = None) -> None:
        before = getattr(namespace, self.dest)
        values = (value,) if before is parser.get_default(self.dest) else (*before, value)
        if len(values) > MOST_REPEATED:
            raise argparse.ArgumentError(self, f"given more than {MOST_REPEATED} times")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Ends with one line on errors, a short usage, and the option or command that may be meant."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"formatter_class": DefaultsFormatter, **more})
        self.given: Sequence[str] = ()
        self.register("type", float, finite)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given = sys.argv[1:] if args is None else list(args)
        if any(re.match("--prompt-at(=|$)", word) for word in self.given):  # which may stand for --prompt
            for group in self._mutually_exclusive_groups:
                group.required = False
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        unknown = message.partition("unrecognized arguments: ")[2]
        message = f"unknown: {unknown}{self._without_value(unknown)}" if unknown else plain_words(message)
        self.exit(2, f"{self.prog}: {message}{self._suggestions()}\n{self.short_usage()}\n")

    def _without_value(self, word: str) -> str:
        """What to say of a word that follows an option which takes none."""
        place = list(self.given).index(word) if word in self.given else 0
        before = self._option_string_actions.get(self.given[place - 1]) if place else None
        return f" ({self.given[place - 1]} takes no value here)" if before is not None and before.nargs == 0 else ""

    def short_usage(self) -> str:
        needed = [self._words(action) for action in self._actions if not action.option_strings]
        needed += [self._words(action) for action in self._actions if action.option_strings and action.required]
        for group in self._mutually_exclusive_groups:
            if group.required:
                needed.append(f"({' | '.join(self._words(action) for action in group._group_actions)})")
        return f"usage: {' '.join([self.prog, *needed])} [options]; all of them: {self.prog} --help"

    @staticmethod
    def _words(action: argparse.Action) -> str:
        value = action.metavar or (action.dest.upper() if action.option_strings else action.dest)
        return " ".join([*action.option_strings[-1:], *[str(value)] * (action.nargs != 0)])

    def _suggestions(self) -> str:
        """`: did you mean --prompt?` for each option that this parser does not know."""
        known = list(self._option_string_actions)
        words = [word.partition("=")[0] for word in self.given if re.match(r"--\w", word)]
        meant = [nearly(word, known) for word in words if not any(name.startswith(word) for name in known)]
        return "".join(f"; did you mean {word}?" for word in dict.fromkeys(meant) if word)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        allowed = [str(choice) for choice in action.choices]
        hint = meant_hint(str(value), allowed)
        raise argparse.ArgumentError(action, f"{value!r} is not known; use one of: {', '.join(allowed)}{hint}")


def argument(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse`, whose OptionError argparse shows as it is."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except OptionError as fault:
            raise argparse.ArgumentTypeError(str(fault)) from fault

    return parsed


def add_options(
    group: argparse._ActionsContainer,
    kind: type,
    names: Iterable[str] = (),
    **changed: Any,
) -> None:
    """The options of a dataclass that have a help text, or those of `names`. changed: other arguments for argparse."""
    for name in names or table(kind):
        one = table(kind)[name]
        if one.help is not None:
            arguments = {**_arguments(one), **changed.get(name, {})}
            arguments |= {"dest": name} if one.several or one.nested else {}
            group.add_argument(f"--{one.flag}".replace("_", "-"), **arguments)


def _arguments(one: Option) -> dict[str, Any]:
    """What argparse needs for one option. Without a default it is None where it is not given."""
    default = one.default
    made = {"help": one.help, "metavar": one.metavar, "choices": one.choices or None}
    if one.type is bool:
        made["action"] = argparse.BooleanOptionalAction if default is None else "store_true"
    else:
        reader = one.of_fields if one.fields else one.reader
        plain = one.type if one.type in (int, float) else None
        made["type"] = plain if reader is None else argument(reader)
        made |= {"action": Once if one.once else Several if one.several else None, "default": default}
    return {name: value for name, value in made.items() if value not in (None, "")}


def program() -> str:
    """What the user called: `wancore`, `python -m wan_core` or `python FOLDER/wan_core`."""
    called = Path(sys.argv[0])
    if called.stem.lower() == "wancore":
        return "wancore"
    return f"python {called}" if called.name == "wan_core" else "python -m wan_core"
