"""Suite `single`: the ladder. Peers and ours on the same random weights in one run, one technique a row.

seconds, spread   median of one forward of one branch (batch 1), and the range of the runs
peak_gib          device memory at most; of that `weights_gib` holds weights, and `activation_gib` came on top of what
                  there was before the forward, what is kept of the prompt included
ratio             seconds of `diffusers-compiled` at the same size over this row's
error             relative difference of the velocity from that of `plain torch` on the same weights, nothing quantised
compile_seconds   what the first forward took longer, where torch compiled; with what it compiled (`compilations`) and
                  where it gave up (`graph_breaks`). A second size that shows none compiled nothing
why_not, failed   in place of numbers: what is missing here, or what went wrong

A row builds its model anew from the same seed and quantises it linear by linear, so that two whole copies never exist.
Peers share the parameters of one plain model. Compiled peers start afresh for every size, which gives them kernels for
that very shape; ours keep what they compiled.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Case, make_case, plain_model
from benchmarks.measure import Measured, make_room, measure, relative_error, weights_bytes
from benchmarks.peers import PEERS, Peer
from benchmarks.rows import Row, guarded
from benchmarks.setups import REFERENCE, SETUPS, Setup, find_setup
from wan_core.execution.report import GIB
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.swap import Quantization

RATIO_TO = "diffusers-compiled"


def single_rows(
    name: str, sizes: Sequence[str], device: torch.device, options: argparse.Namespace, details: dict[str, Any]
) -> Iterator[Row]:
    """Rows of the suite. Raises OptionError for an unknown setup or a bad size."""
    entries = [PEERS.get(entry) or find_setup(entry) for entry in options.setup or (*PEERS, *SETUPS)]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.precision]
    details |= {"dtype": options.precision}

    def model(held: Quantization | None) -> tuple[WanModel, int]:
        made, stride = plain_model(name, device, dtype, options.layers, held)
        details["layers"] = made.config.num_layers
        return made, stride

    ladder = Ladder(model, sizes, device, dtype, options.runs or 3)
    yield from ladder.rows(entries)


@dataclass
class Ladder:
    """What the rows of one run share. `model` makes the transformer, of the same weights each time, and says the stride
    of its VAE."""

    model: Callable[[Quantization | None], tuple[WanModel, int]]
    sizes: Sequence[str]
    device: torch.device
    dtype: torch.dtype
    runs: int
    exact: dict[str, Tensor] = field(default_factory=dict)  # size -> output of REFERENCE
    ratio_to: dict[str, Row] = field(default_factory=dict)  # size -> row of RATIO_TO
    head_dim: int = 0

    def rows(self, entries: Sequence[Peer | Setup]) -> Iterator[Row]:
        """A row for each size of each entry; first what the others refer to."""
        yield from self._plain_rows(entries)
        for entry in entries:
            make_room(self.device)
            if isinstance(entry, Setup) and entry != REFERENCE:
                yield from self._setup_rows(entry)

    def _plain_rows(self, entries: Sequence[Peer | Setup]) -> Iterator[Row]:
        """Peers and REFERENCE, all on the parameters of one model. REFERENCE runs even if its row was not asked for."""
        peers = sorted((e for e in entries if isinstance(e, Peer)), key=lambda peer: peer.name != RATIO_TO)
        model, stride = self.model(None)
        self.head_dim = model.config.head_dim
        REFERENCE.apply(model)
        for case in [make_case(model, size, stride) for size in self.sizes]:
            own = self._measure_setup(REFERENCE, case, self.runs if REFERENCE in entries else 1)
            for peer in peers:
                yield self._guarded(peer.name, case.size, peer.why_not(), lambda p=peer, c=case: self._peer_row(p, c))
            if REFERENCE in entries:
                yield self._compared({"name": REFERENCE.name, "size": case.size, **own})

    def _peer_row(self, peer: Peer, case: Case) -> Row:
        built, run = peer.ready(case.model)
        measured = measure(lambda: lambda: run(case.x, case.timestep, case.contexts[0]), self.device, self.runs)
        return self._numbers(case, measured, weights_bytes(built))

    def _setup_rows(self, setup: Setup) -> Iterator[Row]:
        """One model for all sizes, so that a size that compiles again is seen."""
        reason = setup.why_not(self.device, self.dtype, self.head_dim)
        built: list[Case] = []

        def row(size: str) -> Row:
            if not built:
                model, stride = self.model(setup.quantization(self.device))
                setup.apply(model)
                built.extend(make_case(model, each, stride) for each in self.sizes)
            return self._measure_setup(setup, built[self.sizes.index(size)], self.runs)

        for size in self.sizes:
            yield self._guarded(setup.name, size, reason, lambda s=size: row(s))

    def _measure_setup(self, setup: Setup, case: Case, runs: int) -> Row:
        def prepare() -> Callable[[], Tensor]:
            text = case.model.prepare_text(case.contexts[0])
            return lambda: case.model(case.x, case.timestep, text)

        with setup.running():
            measured = measure(prepare, self.device, runs)
        if setup == REFERENCE:
            self.exact[case.size] = measured.output
        return self._numbers(case, measured, weights_bytes(case.model))

    def _numbers(self, case: Case, measured: Measured, weights: int) -> Row:
        return {
            "tokens": case.tokens,
            **measured.numbers(),
            "weights_gib": round(weights / GIB, 3),
            "error": relative_error(measured.output, self.exact[case.size]),
        }

    def _guarded(self, name: str, size: str, reason: str | None, make: Callable[[], Row]) -> Row:
        row = guarded(name, size, reason, make)
        make_room(self.device)
        if name == RATIO_TO:
            self.ratio_to[size] = row
        return self._compared(row)

    def _compared(self, row: Row) -> Row:
        """With its ratio, where both rows have seconds."""
        other = self.ratio_to.get(row["size"], {}).get("seconds")
        if other is not None and "seconds" in row:
            row |= {"ratio": round(other / row["seconds"], 4), "ratio_to": RATIO_TO}
        return row
