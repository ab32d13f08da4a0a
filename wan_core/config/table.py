"""The table of options: what every door needs to know of an option is declared once, with its field.

    steps: int = option(40, low=1, high=1000, help="of the command line", tip="of a widget")

`check` refuses values outside of it. The command line's options are made from it by `cli.parsing.add_options`, the
widgets of nodes by `nodes.schema.widgets`, the tables of web/docs by `tools.make_schemas`, and here the short forms
`0.12/2/0.2` and `0.75:ramp0.2:cudnn`. Types and defaults are those of the dataclass.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from math import isfinite
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from wan_core.config.checks import OptionError, check_choice, check_range

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option.

    name: what messages call it. low, high, advice: its range, and which values are usual. choices: what is allowed.

    help, metavar: of the command line, which has no option for a field without help. flag: its name there, where it is
    not the field's. parse: text -> value, where the type alone does not say it. once: it names one file, and a second
    one is refused. several: it may be repeated, and the field is a tuple of what `parse` returns. path: it names a file
    or folder that is read. text: it may hold any characters. fields: those that it sets there, by numbers between
    slashes (`of_fields`); the first declares it. shared: one number alone is of all of them.

    tip: the widget's tooltip. shown, least, most: the widget's default and range where they are not those of the field.
    step: the widget's. advanced: the page folds it away.

    prefix: before the number in the short form. words: words of the short form -> the value that each stands for.
    """

    name: str = ""
    low: float | None = None
    high: float | None = None
    advice: str = ""
    choices: Sequence[Any] = ()
    help: str | None = None
    flag: str = ""
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    once: bool = False
    several: bool = False
    path: bool = False
    text: bool = False
    fields: tuple[str, ...] = ()
    shared: bool = False
    tip: str = ""
    shown: Any = None
    least: float | None = None
    most: float | None = None
    step: float | None = None
    advanced: bool = False
    prefix: str | None = None
    words: Mapping[str, Any] = field(default_factory=dict)
    type: Any = str  # this and the next two are filled in by `table`
    default: Any = None
    required: bool = False

    @property
    def nested(self) -> bool:
        """Whether its field is a dataclass of options."""
        return is_dataclass(self.type)

    @property
    def reader(self) -> Callable[[str], Any] | None:
        """text -> value; None: the type alone says it."""
        return self.parse or (getattr(self.type, "parse", None) if self.nested else None)

    def of_fields(self, text: str) -> dict[str, float]:
        """The values of `fields` that a text names: `81/5`, `81`, or `/5`. Raises OptionError."""
        if self.parse is not None:
            return dict(zip(self.fields, self.parse(text), strict=True))
        parts = text.split("/")
        parts *= len(self.fields) if self.shared and len(parts) == 1 else 1
        try:
            values = {name: self.type(part) for name, part in zip(self.fields, parts, strict=False) if part}
            if values and len(parts) <= len(self.fields) and all(map(isfinite, values.values())):
                return values
        except (ValueError, OverflowError):
            pass
        numbers = "whole numbers" if self.type is int else "numbers"
        raise OptionError(f"{text[:40]!r} given; write {self.metavar} in {numbers}")


def option(default: Any = MISSING, **facts: Any) -> Any:
    """A field of a dataclass with its `Option`; required where it has no default."""
    return field(default=default, metadata={"option": Option(**facts)})


@functools.cache
def table(kind: Any) -> Mapping[str, Option]:
    """The options of a dataclass by the names of its fields, in their order."""
    kinds, options = get_type_hints(kind), {}
    for one in fields(kind):
        declared: Option = one.metadata.get("option", Option())
        required = one.default is MISSING
        name, flag = declared.name or one.name.replace("_", " "), declared.flag or one.name
        facts = {"name": name, "flag": flag, "type": plain_type(kinds[one.name]), "required": required}
        options[one.name] = replace(declared, default=None if required else one.default, **facts)
    return options


def plain_type(kind: Any) -> Any:
    """`int` for `int | None`, and the values' type for a Literal."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not types.NoneType)
    return type(get_args(kind)[0]) if get_origin(kind) is Literal else kind


def check(options: Any) -> None:
    """Raise OptionError for the first field outside of its choices or its range. None is always allowed."""
    for name, one in table(type(options)).items():
        value = getattr(options, name)
        if value is not None and one.choices:
            check_choice(one.name, value, tuple(one.choices))
        if value is not None and one.low is not None and one.high is not None:
            check_range(one.name, value, one.low, one.high, one.advice)


class Checked:
    """A dataclass of options that are checked when it is built. Raises OptionError."""

    def __post_init__(self) -> None:
        check(self)


def stated(options: Any, always: Container[str] = ()) -> dict[str, Any]:
    """The fields of a dataclass by name: those without a default, those in `always`, and those not at their default."""
    values = {one.name: (getattr(options, one.name), one.default) for one in fields(options)}
    return {name: value for name, (value, default) in values.items() if name in always or value != default}


def said(options: Any, otherwise: Container[str]) -> dict[str, Any]:
    """The fields of a dataclass that are not at their default, as words where a value has some, for reports and files.
    otherwise: names of those that are said in another way."""
    values = {name: value for name, value in stated(options).items() if name not in otherwise}
    return {name: value.words() if hasattr(value, "words") else value for name, value in values.items()}


def from_values(kind: type[T], values: Mapping[str, Any], **more: Any) -> T:
    """A dataclass from those of `values` that are its fields, and `more`. Raises OptionError."""
    return kind(**{name: values[name] for name in table(kind) if name in values} | more)


# ---------------------------------------------------------------------------------------------------------- short forms


def read_slashes(kind: type, text: str, *names: str) -> dict[str, Any]:
    """The values of the fields `names`, or of all in their order, between slashes; the last ones may be missing. Raises
    ValueError."""
    parts, options = text.split("/"), table(kind)
    names = names or tuple(options)
    if not sum(options[name].required for name in names) <= len(parts) <= len(names):
        raise ValueError(text)
    return {name: options[name].type(part) for name, part in zip(names, parts, strict=False)}


def parse_slashes(kind: type[T], text: str, form: str) -> T:
    """`kind` from what `read_slashes` reads. form: what a message calls it, and how to write it. Raises OptionError."""
    try:
        values = read_slashes(kind, text)
    except ValueError:
        what, _, form = form.partition(": ")
        raise OptionError(f"{what} {text!r} given; write {form}") from None
    return kind(**values)


def slashes(options: Any, *names: str) -> str:
    """`names` of the fields, or all, in the form that `parse_slashes` reads."""
    values = [getattr(options, name) for name in names or table(type(options))]
    return "/".join(value if isinstance(value, str) else f"{value:g}" for value in values)


def parse_words(kind: type, words: Iterable[str]) -> dict[str, Any]:
    """What the words behind a short form's colons say, by field; the last of several counts. Raises ValueError with a
    word that is not known."""
    return dict(_meaning(kind, word) for word in words)


def _meaning(kind: type, word: str) -> tuple[str, Any]:
    for name, one in table(kind).items():
        if word in one.words:
            return name, one.words[word]
        if one.prefix and word.startswith(one.prefix):
            try:
                return name, one.type(word.removeprefix(one.prefix))
            except ValueError:
                break
    raise ValueError(word)


def spelled(options: Any, *names: str) -> list[str]:
    """The words of these fields in the form that `parse_words` reads, of those that do not have their default."""
    words: list[str] = []
    for name in names:
        one, value = table(type(options))[name], getattr(options, name)
        if value != one.default:
            words += (
                [f"{one.prefix}{value:g}"] if one.prefix else [w for w, meant in one.words.items() if meant == value]
            )
    return words
