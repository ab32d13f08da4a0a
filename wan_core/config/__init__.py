"""User options as frozen dataclasses, the errors of this project, and where it keeps files. Imports no torch.

`loading`, `plan_numbers`, `request`, `skipping` and `sparse` declare each option once, with all that its
doors need (`table`). Options are checked when built: a bad value raises `OptionError` with what was given, what is
allowed and what to do. `checks` has the errors and the checks, `compile_cache` the cache folder.
"""

from __future__ import annotations

from wan_core.config.checks import MissingPart, OptionError, UserError, check_choice, check_size
from wan_core.config.loading import (
    COMPILES,
    LORA_EXPERTS,
    LORA_MODES,
    PRECISIONS,
    QUANTIZED,
    RESIDENCIES,
    VAE_PRECISIONS,
    LoadOptions,
    LoraOptions,
)
from wan_core.config.plan_numbers import LoraShares, MotionOptions, PlanNumbers, ScheduleNumbers
from wan_core.config.request import (
    GUIDANCE_MODES,
    RANDOM_SEED,
    ControlOptions,
    Keyframe,
    NagOptions,
    PromptAt,
    Request,
    check_known,
    check_prompts,
)
from wan_core.config.skipping import EXACT, SPEEDS, MagCacheOptions, SkipOptions, TaylorSeerOptions
from wan_core.config.sparse import SPARSE_KERNELS, SparseOptions
