"""Where the weights of a model's blocks are: its loop over the blocks says which one it needs next, so that those that
stream arrive in time."""

from __future__ import annotations


class BlockWeights:
    """Weights that are where the model computes. Subclasses bring them there, block by block."""

    name = "resident"

    def enter(self, block: int, *, text: bool = False) -> None:
        """The weights of `block` are needed next, or only those that a prompt needs."""

    def leave(self, block: int, *, last: bool = False) -> None:
        """The work of `block` has been launched. last: another expert's runs come next."""


RESIDENT = BlockWeights()
