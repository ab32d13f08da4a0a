"""Architectures, tasks and user options: plain numbers in frozen dataclasses.

Two kinds live here. `architectures` says what a checkpoint is, and `tasks` what it was made for: a file's shapes tell,
never a user. `options` and `skipping` say what a user wants: checked once, when built, and a bad value raises
`OptionError` with what was given, what is allowed and what to do. `checks` has the errors and the checks.

Nothing here knows torch.
"""

from __future__ import annotations

from wan_core.config.architectures import (
    I2V_A14B,
    T2V_A14B,
    TI2V_5B,
    UMT5_XXL,
    VAE_21,
    VAE_22,
    WAN21_MEAN,
    WAN21_STD,
    WAN22_MEAN,
    WAN22_STD,
    DiTConfig,
    TextConfig,
    VAEConfig,
)
from wan_core.config.checks import OptionError, UserError, check_choice, check_folder, check_size
from wan_core.config.options import (
    COMPILES,
    GUIDANCE_MODES,
    LORA_EXPERTS,
    LORA_MODES,
    PRECISIONS,
    QUANTIZED,
    RESIDENCIES,
    LoadOptions,
    LoraOptions,
    Request,
)
from wan_core.config.skipping import (
    MAGCACHE_RULES,
    SPARSE_KERNELS,
    SPARSE_SCORES,
    AdaptiveOptions,
    GuidanceOptions,
    MagCacheOptions,
    SkipOptions,
    SparseOptions,
    TaylorSeerOptions,
)
from wan_core.config.tasks import TASKS, Task, find_task

__all__ = [
    "COMPILES",
    "GUIDANCE_MODES",
    "I2V_A14B",
    "LORA_EXPERTS",
    "LORA_MODES",
    "MAGCACHE_RULES",
    "PRECISIONS",
    "QUANTIZED",
    "RESIDENCIES",
    "SPARSE_KERNELS",
    "SPARSE_SCORES",
    "T2V_A14B",
    "TASKS",
    "TI2V_5B",
    "UMT5_XXL",
    "VAE_21",
    "VAE_22",
    "WAN21_MEAN",
    "WAN21_STD",
    "WAN22_MEAN",
    "WAN22_STD",
    "AdaptiveOptions",
    "DiTConfig",
    "GuidanceOptions",
    "LoadOptions",
    "LoraOptions",
    "MagCacheOptions",
    "OptionError",
    "Request",
    "SkipOptions",
    "SparseOptions",
    "Task",
    "TaylorSeerOptions",
    "TextConfig",
    "UserError",
    "VAEConfig",
    "check_choice",
    "check_folder",
    "check_size",
    "find_task",
]
