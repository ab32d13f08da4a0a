"""Libraries that compile (Inductor, Triton, flash-attn-4) keep their results in folders of our cache folder.

They do so by themselves, and ask for the folder in environment variables. A variable that the user has set stays.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from wan_core.config.folders import cache_folder

log = logging.getLogger(__name__)
INDUCTOR, FLASH_ATTENTION = "TORCHINDUCTOR_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
LIBRARY_CACHES = {INDUCTOR: "inductor", "TRITON_CACHE_DIR": "triton", FLASH_ATTENTION: "flash-attention"}
"""Environment variable -> folder in the cache folder."""
FLASH_ATTENTION_ENABLED = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"


def set_compile_caches() -> None:
    """Set the cache folder of every compiler. Call this before the first block is compiled."""
    for variable in LIBRARY_CACHES:
        _set_folder(variable)
    set_flash_attention_cache()


def set_flash_attention_cache() -> None:
    """Set the cache folder of flash-attn-4, which compiles its kernels for seconds. It reads these variables when it is
    imported, and its import fails if it cannot make the folder."""
    _set_folder(FLASH_ATTENTION)
    try:
        Path(os.environ[FLASH_ATTENTION]).mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        log.info("flash-attn-4 compiles its kernels in each process: %s", fault)
        return
    os.environ.setdefault(FLASH_ATTENTION_ENABLED, "1")


def _set_folder(variable: str) -> None:
    if not _is_set_by_user(variable):
        os.environ[variable] = str(cache_folder() / LIBRARY_CACHES[variable])


def _is_set_by_user(variable: str) -> bool:
    """torch sets its own default when its compiler is imported: that does not count."""
    value = os.environ.get(variable)
    inductor = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
    default = None if inductor is None or variable != INDUCTOR else inductor.default_cache_dir()
    return value is not None and value != default
