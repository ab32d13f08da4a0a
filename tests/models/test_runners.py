"""The chain of runners around the blocks: its order, what is added for a while, and what the blocks are told."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from tests.sampling.test_denoise import NOISE, TEXT, small_dit
from wan_core.execution.optimize import optimize
from wan_core.models.wan.prepared_text import PreparedText
from wan_core.models.wan.runners import (
    SINGLE_FORWARD,
    BlockInputs,
    BlockWeights,
    ForwardInfo,
    Place,
    RunnerChain,
)
from wan_core.ops.attention.sdpa import SDPA

NOTHING = torch.zeros(0)


@dataclass(eq=False)
class Noting:
    """Says when it was entered and left."""

    name: str
    place: Place
    said: list[str]

    def __call__(self, inputs, inner):
        self.said.append(self.name)
        out = inner(replace(inputs, tokens=inputs.tokens + 1))
        self.said.append(f"/{self.name}")
        return out * 2


def run(chain: RunnerChain, tokens: torch.Tensor) -> torch.Tensor:
    inputs = BlockInputs(tokens, NOTHING, NOTHING, PreparedText(()), SINGLE_FORWARD, (1, 1, 1))
    return chain(inputs, lambda inputs: inputs.tokens * 10)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_runners_stand_in_the_order_of_their_places_in_any_order_of_adding(order: tuple[int, ...]) -> None:
    said: list[str] = []
    names = ((Place.RESIDUALS, "residuals"), (Place.TILES, "tiles"), (Place.SHARDS, "shards"))
    chain = RunnerChain()
    for index in order:
        place, name = names[index]
        chain.add(Noting(name, place, said))
    assert str(chain) == "tiles > shards > residuals > blocks (resident weights)"
    assert torch.equal(run(chain, torch.ones(1)), torch.full((1,), 320.0))
    assert said == ["tiles", "shards", "residuals", "/residuals", "/shards", "/tiles"]


def test_what_is_added_for_a_while_is_gone_whatever_happens() -> None:
    chain, stays = RunnerChain(), Noting("stays", Place.RESIDUALS, [])
    chain.add(stays)
    with chain.adding(Noting("for a while", Place.TILES, [])):
        assert str(chain) == "for a while > stays > blocks (resident weights)"
    assert chain.runners == [stays]
    with pytest.raises(KeyboardInterrupt), chain.adding(Noting("for a while", Place.TILES, [])):
        raise KeyboardInterrupt
    assert chain.runners == [stays]


def test_a_place_that_is_taken_is_refused_and_keeps_its_runner() -> None:
    chain, first = RunnerChain(), Noting("first", Place.RESIDUALS, [])
    with chain.adding(first):
        with (
            pytest.raises(AssertionError, match="second: its place is taken"),
            chain.adding(Noting("second", Place.RESIDUALS, [])),
        ):
            pass
        assert chain.runners == [first]
    assert chain.runners == []


class Counting(BlockWeights):
    """Weights that note what the loop says."""

    name = "counted"

    def __init__(self) -> None:
        self.told: list[object] = []

    def enter(self, block: int, *, text: bool = False) -> None:
        self.told.append((block, text))

    def leave(self, block: int, *, last: bool = False) -> None:
        self.told.append(f"/{block}" + ", its last" * last)


@torch.no_grad()
def test_the_loop_tells_the_weights_which_block_is_next() -> None:
    model, weights = small_dit(), Counting()
    model.runners.weights = weights
    assert str(optimize(model, attend=SDPA).runners) == "blocks (counted weights)"
    text = model.prepare_text(TEXT.cond)
    assert weights.told == [(0, True), "/0", (1, True), "/1"]
    weights.told.clear()
    model(NOISE, torch.tensor([900.0]), text)
    assert weights.told == [(0, False), "/0", (1, False), "/1"]
    weights.told.clear()
    model(NOISE, torch.tensor([900.0]), text, ForwardInfo(last=True))
    assert weights.told == [(0, False), "/0, its last", (1, False), "/1, its last"]


@torch.no_grad()
def test_a_forward_reaches_the_runners_as_it_was_described() -> None:
    model, seen = small_dit(), []

    class Looking:
        name, place = "looking", Place.RESIDUALS

        def __call__(self, inputs, inner):
            seen.append(inputs)
            return inner(inputs)

    info = ForwardInfo(7, ("uncond",), sparsity=0.5)
    text, time = model.prepare_text(TEXT.cond), torch.tensor([900.0])
    with model.runners.adding(Looking()):
        described = model(NOISE, time, text, info)
        single = model(NOISE, time, text)
    assert [inputs.info for inputs in seen] == [info, ForwardInfo()]
    assert seen[0].grid == (3, 2, 3) and seen[0].text is text and seen[0].tokens.shape == (1, 18, 32)
    assert seen[0].sparse is None and seen[0].lengths == ()
    assert torch.equal(described, single)
