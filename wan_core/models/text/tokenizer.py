"""SentencePiece as the reference uses it: google/umt5-xxl with `clean="whitespace"`.

Source: Wan2.2/wan/modules/tokenizers.py. One difference: the reference also passes prompts through `ftfy`, which
repairs wrongly decoded text and straightens quotation marks.
"""

from __future__ import annotations

import html
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

from wan_core.config.checks import check_file_size
from wan_core.config.limits import MAX_TOKENIZER

OLDEST_SENTENCEPIECE = (0, 2, 3)


class Tokenizer:
    """Text -> ids.

    proto: a serialised SentencePiece model (the bytes of `spiece.model`). Kept as `.proto`, so that it can be stored in
    the encoder's file: a uint8 tensor `spiece_model`, as in ComfyUI's files. max_length: the most ids of a prompt, end
    token included; longer prompts are truncated. Raises ValueError for another `proto`, an end token that is not 1, or
    an old sentencepiece.
    """

    pad_id = 0
    eos_id = 1

    def __init__(self, proto: bytes, max_length: int = 512) -> None:
        import sentencepiece

        too_old = why_too_old(sentencepiece.__version__)
        if too_old is not None:
            raise ValueError(too_old)
        if len(proto) > MAX_TOKENIZER:
            raise ValueError(f"a SentencePiece model of {len(proto)} bytes; at most {MAX_TOKENIZER} are read")
        if max_length < 1:
            raise ValueError(f"max_length {max_length} leaves no room for the end token; at least 1 is needed")
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(proto)
        except RuntimeError as error:
            raise ValueError(
                f"not a SentencePiece model ({len(proto)} bytes). The spiece.model of google/umt5-xxl is expected; "
                "download it again."
            ) from error
        if self._processor.eos_id() != self.eos_id:
            raise ValueError(
                f"the end token of this SentencePiece model is {self._processor.eos_id()}, UMT5's is {self.eos_id}. "
                "Use the spiece.model that came with the text encoder (google/umt5-xxl for Wan)."
            )
        self.proto = proto
        self.max_length = max_length

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """From a `spiece.model`. Raises OSError if it cannot be read, ValueError naming the file if it is not one."""
        try:
            check_file_size(path, MAX_TOKENIZER)
            return cls(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def __len__(self) -> int:
        """The number of pieces; ids are smaller."""
        return self._processor.GetPieceSize()

    def encode(self, text: str) -> list[int]:
        """Ids of `text` after `clean`, at most `max_length`, the last one the end token."""
        return [*self._pieces(text)[: self.max_length - 1], self.eos_id]

    def count(self, text: str) -> TokenCount:
        """How many ids `text` has, and how many of them `encode` gives."""
        given = len(self._pieces(text)) + 1
        return TokenCount(given, min(given, self.max_length))

    def _pieces(self, text: str) -> list[int]:
        # A lone surrogate (half of an emoji in broken JSON) has no UTF-8; it becomes a question mark.
        readable = clean(text).encode("utf-8", "replace").decode("utf-8")
        return self._processor.EncodeAsIds(readable)


def why_too_old(version: str) -> str | None:
    """Why this version of sentencepiece is not used, and what to do; None for 0.2.3 or newer."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers >= OLDEST_SENTENCEPIECE:
        return None
    needed = ".".join(map(str, OLDEST_SENTENCEPIECE))
    return (
        f"sentencepiece {version} is installed, and {needed} or newer is needed: older versions crash on a damaged "
        f'tokenizer. Run `"{sys.executable}" -m pip install --upgrade "sentencepiece>={needed}"` and start again.'
    )


def clean(text: str) -> str:
    """HTML entities resolved (twice, as the reference does), runs of white space made one space, ends trimmed."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip()


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
