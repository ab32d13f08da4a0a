"""Blocks that stream on a GPU whose work runs late, in any order that events allow: each block is computed with its own
weights, and no copy arrives in memory that was given back."""

from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.execution.test_file_units import files, in_file  # noqa: F401  (a fixture)
from tests.late_streams import Streams
from tests.streamed_experts import LAYERS
from wan_core.execution.memory import file_reader
from wan_core.execution.memory.host_weights import HostWeights
from wan_core.execution.memory.streaming import Stage

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are found in /proc/self/maps")
GARBAGE = 255


class Late:
    """Two experts on a stage, and what they compute: a comparison with their own weights."""

    def __init__(self, streams: Streams, weights: list[HostWeights], resident: int | None) -> None:
        self.streams, self.weights = streams, weights
        self.exact = [[[t.clone() for t in unit.home] for unit in one.units] for one in weights]
        self.stage = Stage(torch.device("cuda", 0), resident)
        self.stage._empty = lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)
        self.used, self.wrong, self.taken = 0, [], []

    def use(self, number: int, follows: bool) -> None:
        self.used = number
        self.stage.use(self.weights[number], self.weights[1 - number] if follows else None)
        self.compute(0, text=False)

    def forward(self, *, text: bool = False, last: bool = False) -> None:
        for block in range(LAYERS):
            self.stage.enter(block, text=text)
            self.streams.some()
            self.compute(block + 1, text)
            self.stage.leave(block, last=last)
            self.streams.some()

    def compute(self, number: int, text: bool) -> None:
        unit, exact, what = self.weights[self.used].units[number], self.exact[self.used][number], (self.used, number)
        needed = [i for i, p in enumerate(unit.layout.places) if not text or p.offset < unit.layout.text_bytes]
        views = [unit.tensors[i].data for i in needed]

        def compare() -> None:
            if not all(torch.equal(view, exact[i]) for view, i in zip(views, needed, strict=True)):
                self.wrong.append(what)

        self.streams.main.do(compare)

    def leave(self) -> None:
        """Others write where the stage was."""
        memory = [slot.memory for slot in (*self.stage.kept.values(), *self.stage.slots)]
        self.stage.leave_device()
        for one in memory:
            self.streams.main.do(partial(one.fill_, GARBAGE))
        self.taken += memory

    def finish(self) -> None:
        self.streams.finish()
        assert not self.wrong
        assert all((one == GARBAGE).all() for one in self.taken)


CALLS = ("high", "low", "high, then low", "low, then high", "text", "run", "last", "leave")


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    resident=st.none() | st.integers(0, LAYERS),
    pinned=st.sampled_from([None, 0, 200_000, 400_000]),
    calls=st.lists(st.sampled_from(CALLS), max_size=12),
)
def test_each_block_is_computed_with_its_own_weights(files, seed, resident, pinned, calls) -> None:  # noqa: F811
    """pinned: bytes of an expert; the others are read from its file. None: all."""
    with pytest.MonkeyPatch.context() as patch:
        streams = Streams(seed)
        streams.stand_in(patch)
        patch.setattr(file_reader, "PIECE", 1 << 16)
        weights = [
            HostWeights(in_file(files / f"{name}.safetensors"), lock=False, copy=pinned is None, pinned=pinned or 0)
            for name in ("high", "low")
        ]
        late = Late(streams, weights, resident)
        late.use(0, follows=False)
        for call in calls:
            if call == "leave":
                late.leave()
                late.use(late.used, follows=False)
            elif call in ("text", "run", "last"):
                late.forward(text=call == "text", last=call == "last")
            else:
                late.use(int(call.startswith("low")), follows="then" in call)
            streams.some()
        late.leave()
        late.finish()
