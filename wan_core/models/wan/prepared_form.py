"""The ways in which a family may keep what it prepares beside text, as plain numbers. Imports no torch."""

from __future__ import annotations

from typing import Any, NamedTuple


class PreparedForm(NamedTuple):
    """One of them.

    form: how the family calls it. words: what is kept where. device, host: bytes there while the steps run; those in
    host memory are pinned. copied: bytes that a forward copies to the device. exact: it changes no number.
    activations: bytes of a forward, as a memory plan counts them.
    """

    form: Any
    words: str
    device: int
    host: int
    copied: int
    exact: bool
    activations: int = 0

    def uses_again(self, kept: PreparedForm | None) -> bool:
        """Whether it takes the host memory that an earlier run has left, which kept `kept`."""
        return kept is not None and (kept.form, kept.host) == (self.form, self.host)
