"""A cache of encoded prompts, so that a repeated prompt is not encoded again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor

from wan_core.models.text.notes import TokenCount, prompt_notes
from wan_core.models.text.umt5 import TextEncoder


class PromptCache:
    """The rows of the last `limit` prompts of one encoder, on the CPU: at most 4 MB each for UMT5-XXL in bf16."""

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self._rows: OrderedDict[str, Tensor] = OrderedDict()
        self._counts: dict[str, TokenCount] = {}

    def encode(self, prompts: Sequence[str], encoder: Callable[[], TextEncoder]) -> list[Tensor]:
        """Rows [1, L, dim] of each prompt, L its own length.

        `encoder` returns the encoder, which it may have to load; it is called only if a prompt is new. New prompts are
        encoded in one batch.
        """
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._rows]
        if missing:
            model = encoder()
            for prompt, rows in zip(missing, model.encode(missing).cpu(), strict=True):
                count = model.tokenizer.count(prompt)
                self._rows[prompt] = rows[None, : count.read].clone()
                self._counts[prompt] = count
        encoded = [self._rows[prompt] for prompt in prompts]
        for prompt in prompts:
            self._rows.move_to_end(prompt)
        while len(self._rows) > self.limit:
            del self._counts[self._rows.popitem(last=False)[0]]
        return encoded

    def notes(self, prompt: str, name: str = "prompt") -> list[str]:
        """What the user should know of how a prompt of the last `encode` was read, which is called `name`."""
        return prompt_notes(name, prompt, self._counts[prompt])
