"""What each word of `speed` does in a run: one table, with the reason of each row. Without torch.

dB is PSNR against the full run with as many steps, mean / worst clip, on the test bed (docs/quality.md), of a run from
text in fp32, then in FP8. There TaylorSeer of order 1 is nearer than MagCache at as many forwards, any share of sparse
attention loses 17 to 25 dB, and with half the steps a forecast is 10 dB further off. A word keeps careful 38 dB and 32
in the worst clip (or as much as bf16 does), balanced 32 and 25, fast 26 and 15.
"""

from __future__ import annotations

from dataclasses import dataclass

from wan_core.config import EXACT, SkipOptions, SparseOptions, TaylorSeerOptions

MIN_STEPS = 10  # below, consecutive steps differ too much for a step cache


@dataclass(frozen=True, kw_only=True)
class Word:
    """many: what it does in runs of so many steps and more, the most first; below the last of them it leaves nothing
    out. few: below `MIN_STEPS`, and with step-distilled weights."""

    many: dict[int, SkipOptions]
    few: SkipOptions


def _every(interval: int, retention: float) -> SkipOptions:
    return SkipOptions(taylorseer=TaylorSeerOptions(interval=interval, retention=retention))


def _share(sparsity: float) -> SkipOptions:
    return SkipOptions(sparse=SparseOptions(sparsity=sparsity, ramp=0))


WORDS = {
    EXACT: Word(many={}, few=SkipOptions()),
    "careful": Word(
        many={
            40: _every(2, 0.4),  # 56 of 80 forwards: 39.6 / 33.1, 32.8 / 25.1
            30: _every(2, 0.5),  # 46 of 60: 38.3 / 30.9 (bf16 43.3 / 30.9), 32.3 / 29.4
        },
        few=SkipOptions(),  # sparse attention saves nothing above 78 % of the keys
    ),
    "balanced": Word(
        many={
            40: _every(2, 0.25),  # 50 of 80: 37.3 / 28.8, 31.6 / 25.8
            30: _every(2, 0.4),  # 42 of 60: 34.8 / 27.7, 30.8 / 26.2
            20: _every(2, 0.7),  # 34 of 40: 34.0 / 30.0, 30.1 / 26.6
        },
        few=_share(0.5),  # four steps, embedded model: 45.1 / 23.5
    ),
    "fast": Word(
        many={
            40: _every(3, 0.2),  # 38 of 80: 28.8 / 19.8, 28.1 / 22.1
            30: _every(3, 0.4),  # 36 of 60: 28.1 / 23.7, 26.7 / 24.1
            20: _every(2, 0.4),  # 28 of 40: 27.4 / 17.2, 26.3 / 17.2
        },
        few=_share(0.6875),  # four steps, embedded model: 44.6 / 23.4
    ),
}


def at_speed(options: SkipOptions, steps: int, distilled: bool) -> SkipOptions:
    """`options` with what their word does in a run of `steps` steps. distilled: the weights are step-distilled."""
    if options.speed == EXACT:
        return options
    word = WORDS[options.speed]
    if distilled or steps < MIN_STEPS:
        return word.few
    return next((skip for least, skip in word.many.items() if steps >= least), SkipOptions())


PRECISION = "attention auto is 8-bit where the card has such a kernel; a named kernel stays"


def attention_at_speed(attention: str, speed: str) -> str:
    """What `attention` stands for in a run: a word that is not exact takes the card's 8-bit kernel for `auto`."""
    return "fast" if attention == "auto" and speed != EXACT else attention
