"""Sizes of the tiles of our own attention kernel (`triton_attention`), by card. Knows no Triton.

A program holds `queries` rows in registers and reads keys and values `keys` rows at a time, `stages` of them under way
in shared memory: 164 KB on an A100, 100 KB on GeForce cards from Ampere to Blackwell, 228 KB on Hopper. The rows of the
table follow from these numbers: compiled by Triton 3.9 they take 32 to 48 KiB on GeForce cards and at most 128 KiB on
Hopper, and nearly all registers. Of these cards an H200 alone has run them. `python -m benchmarks attention --setting
tune` measures all of `CANDIDATES` on the card that is there and names the best one for each row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wan_core.ops.cards import AMPERE, BLACKWELL, HOPPER, RTX_BLACKWELL, Capability

Kind = Literal["bf16", "int8"]
"""What queries and keys are multiplied in."""
GEFORCE = (8, 6)  # Ampere and Ada of GeForce and workstations


@dataclass(frozen=True)
class Tile:
    """queries, keys: rows, powers of two from 16 to 128, so that they divide a block of sparse attention."""

    queries: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.queries} x {self.keys}, {self.warps} warps, {self.stages} stages"

    def shared_bytes(self, dim: int, kind: Kind) -> int:
        """Shared memory in bytes of the keys and values that are being copied, and of the queries."""
        of_key = dim if kind == "int8" else 2 * dim
        return self.stages * self.keys * (of_key + 2 * dim) + self.queries * dim * 2


# Since a capability, up to the next row; for head dims from 65 to 128.
TILES: dict[Capability, dict[Kind, Tile]] = {
    AMPERE: {"bf16": Tile(128, 64, 8, 3), "int8": Tile(128, 64, 8, 3)},
    GEFORCE: {"bf16": Tile(128, 32, 8, 2), "int8": Tile(128, 64, 8, 2)},
    HOPPER: {"bf16": Tile(128, 64, 8, 3), "int8": Tile(128, 64, 8, 3)},
    BLACKWELL: {"bf16": Tile(128, 64, 8, 3), "int8": Tile(128, 64, 8, 3)},
    RTX_BLACKWELL: {"bf16": Tile(128, 32, 8, 2), "int8": Tile(128, 64, 8, 2)},
}
SHARED = {AMPERE: 163, GEFORCE: 99, HOPPER: 227, BLACKWELL: 227, RTX_BLACKWELL: 99}
"""KiB of shared memory that one program may have."""
CANDIDATES = tuple(
    Tile(queries, keys, warps, stages)
    for queries in (64, 128)
    for keys in (32, 64, 128)
    for warps in (4, 8)
    for stages in (2, 3, 4)
)


def tile_for(capability: Capability | None, kind: Kind) -> Tile:
    """The row of the card; the first one for Triton's interpreter, which runs on a CPU."""
    return TILES[_row(capability)][kind]


def candidates(capability: Capability | None, dim: int, kind: Kind) -> list[Tile]:
    """Those that fit into the card's shared memory."""
    return [tile for tile in CANDIDATES if tile.shared_bytes(dim, kind) <= SHARED[_row(capability)] * 1024]


def _row(capability: Capability | None) -> Capability:
    return max((since for since in TILES if capability is not None and since <= capability), default=AMPERE)
