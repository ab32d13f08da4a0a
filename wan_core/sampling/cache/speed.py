"""What each word of `speed` does in a run: one table, with the reason of each row. Without torch.

dB is PSNR against the full run, mean / worst clip, on the test bed in 40 steps (docs/quality.md). There TaylorSeer of
order 1 is nearer than MagCache at as many forwards, and any share of sparse attention loses 17 to 25 dB.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.config import EXACT, SkipOptions, SparseOptions, TaylorSeerOptions

MIN_STEPS = 10  # below, consecutive steps differ too much for a step cache


@dataclass(frozen=True, kw_only=True)
class Word:
    """many: in runs of `MIN_STEPS` steps and more. few: below, and with step-distilled weights. why: of each."""

    many: SkipOptions
    few: SkipOptions
    why: str


def _every(interval: int, retention: float) -> SkipOptions:
    return SkipOptions(taylorseer=TaylorSeerOptions(interval=interval, order=1, retention=retention))


def _share(sparsity: float) -> SkipOptions:
    return SkipOptions(sparse=SparseOptions(sparsity=sparsity, dense_steps=0, ramp=0))


WORDS = {
    EXACT: Word(many=SkipOptions(), few=SkipOptions(), why="nothing is left out"),
    "careful": Word(
        many=_every(2, 0.4),
        few=SkipOptions(),  # sparse attention saves nothing above 78 % of the keys
        why="56 of 80 forwards: text 39.6 / 33.1, image 49.7 / 45.0",
    ),
    "balanced": Word(
        many=_every(2, 0.25),
        few=_share(0.5),
        why="50 of 80 forwards: text 37.3 / 28.8, image 45.7 / 39.3; four steps, embedded model 45.1 / 23.5",
    ),
    "fast": Word(
        many=_every(3, 0.2),
        few=_share(0.6875),
        why="38 of 80 forwards: text 28.8 / 19.8, image 39.3 / 31.3; four steps, embedded model 44.6 / 23.4",
    ),
}


def at_speed(options: SkipOptions, steps: int, distilled: bool) -> SkipOptions:
    """`options` with what their word does in a run of `steps` steps. distilled: the weights are step-distilled."""
    if options.speed == EXACT:
        return options
    word = WORDS[options.speed]
    return word.few if distilled or steps < MIN_STEPS else word.many


PRECISION = "attention auto is 8-bit where the card has such a kernel; a named kernel stays"


def attention_at_speed(attention: str, speed: str) -> str:
    """What `attention` stands for in a run: a word that is not exact takes the card's 8-bit kernel for `auto`."""
    return "fast" if attention == "auto" and speed != EXACT else attention
