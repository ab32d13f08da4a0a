"""What each word of `speed` does in a run: one table, with the reason of each row. Without torch.

dB is PSNR against the full run on the embedded model, mean and worst clip, float32, unseen seeds (docs/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wan_core.config import EXACT, MagCacheOptions, SkipOptions, SparseOptions

MIN_STEPS = 10  # below, consecutive steps differ too much for a step cache

# Forecasts instead of the last residual, and at most one skip in a row: on the embedded model the best setting at equal
# savings (benchmarks/results/quality-*.json, docs/caching.md). Order 2 stores three residuals of each branch.
HALF_OF_STEPS = MagCacheOptions(threshold=0.24, max_skips=1, retention=0.1, order=2)
TWO_IN_A_ROW = replace(HALF_OF_STEPS, max_skips=2)
HALF = SparseOptions(sparsity=0.5, dense_steps=0, ramp=0)
THIRD = SparseOptions(sparsity=0.6875, dense_steps=0, ramp=0)


@dataclass(frozen=True, kw_only=True)
class Word:
    """many: in runs of `MIN_STEPS` steps and more. few: below, and with step-distilled weights. why: of each."""

    many: SkipOptions
    few: SkipOptions
    why: str


WORDS = {
    EXACT: Word(many=SkipOptions(), few=SkipOptions(), why="nothing is left out"),
    "careful": Word(
        many=SkipOptions(magcache=HALF_OF_STEPS),
        few=SkipOptions(),  # sparse attention saves nothing above 78 % of the keys
        why="44 of 80 forwards: text 51.8 / 43.3, image 58.3 / 54.4",
    ),
    "balanced": Word(
        many=SkipOptions(magcache=HALF_OF_STEPS, sparse=replace(THIRD, ramp=0.3)),
        few=SkipOptions(sparse=HALF),
        why="44 of 80 forwards: text 45.6 / 32.2, image 49.5 / 42.7; four steps 49.0 / 34.6",
    ),
    "fast": Word(
        many=SkipOptions(magcache=TWO_IN_A_ROW, sparse=replace(THIRD, ramp=0.3)),
        few=SkipOptions(sparse=THIRD),
        why="34 of 80 forwards: text 41.9 / 38.1; four steps 45.8 / 33.8",
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
