"""What a user should know of how a prompt was read: that it was cut, or that its weights are text."""

from __future__ import annotations

import re
from typing import NamedTuple

_WEIGHT = re.compile(r"\([^()]+:\s*[+-]?(?:\d+\.?\d*|\.\d+)\s*\)")


class TokenCount(NamedTuple):
    """Tokens of a prompt, its end token included, and how many of them are read."""

    given: int
    read: int


def prompt_notes(name: str, text: str, count: TokenCount) -> list[str]:
    """Sentences for the report, about the prompt that is called `name`."""
    notes = []
    if count.given > count.read:
        notes.append(f"the {name} has {count.given} tokens, and {count.read} are read: its end was cut. Shorten it")
    weight = _WEIGHT.search(text)
    if weight is not None:
        shown = weight[0] if len(weight[0]) < 40 else f"({weight[0][-36:]}"
        notes.append(f"the {name} has a weight, {shown}: it is read as text, because this text encoder has no weights")
    return notes
