"""A setting of step caching and sparse attention in one word, as the command `quality` has it. Without torch."""

from __future__ import annotations

from typing import Any

from wan_core.config import OptionError, SkipOptions
from wan_core.config.table import table


def parse_setting(text: str) -> SkipOptions | None:
    """A setting of the command `quality`: parts joined by `+`. Raises OptionError.

    The parts are `magcache:0.12/2/0.2`, `taylorseer:2/0.2` and `sparse:0.8125:ramp0`; `full` is
    the run without any of them, `speed:balanced` a word of `speed`.
    """
    if text == "full":
        return None
    values: dict[str, Any] = {}
    options = table(SkipOptions)
    for part in text.split("+"):
        name, _, value = part.partition(":")
        if not value or name in values or name not in options:
            raise _unknown(text)
        read = options[name].reader
        values[name] = value if read is None else read(value)
    return SkipOptions(**values)


def _unknown(text: str) -> OptionError:
    return OptionError(
        f"setting {text!r} is not known, or repeats a part; write speed:balanced, magcache:0.12/2/0.2, "
        "taylorseer:2/0.2, sparse:0.8125, or several joined by +"
    )
