"""flash-attn-4's own files: when it is told of them, and what happens when one does not work. A package of its shape
stands in for the library, which needs a GPU to compile."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from wan_core.config.compile_cache import FLASH_ATTENTION, FLASH_ATTENTION_ENABLED
from wan_core.ops.attention import dense

LIBRARY = """
import os
from . import cache_utils, interface
told = {name: value for name, value in os.environ.items() if name.startswith("FLASH_ATTENTION_CUTE_DSL_CACHE")}

def flash_attn_func(q, k, v, return_lse=False):
    interface.calls.append(interface._flash_attn_fwd.compile_cache)
    if interface.fault is not None and type(interface.calls[-1]) is cache_utils.JITPersistentCache:
        raise interface.fault
    if interface.always is not None:
        raise interface.always
    return q, k
"""
CACHES = """
class JITCache: pass
class JITPersistentCache(JITCache): pass
"""
INTERFACE = """
from .cache_utils import JITPersistentCache
def _flash_attn_fwd(): pass
_flash_attn_fwd.compile_cache = JITPersistentCache()
calls, fault, always = [], None, None
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Version 4 lives in a folder of version 2's package, which then has no `__init__` of its own."""
    folder = tmp_path / "library" / "flash_attn" / "cute"
    folder.mkdir(parents=True)
    for name, text in (("__init__", LIBRARY), ("cache_utils", CACHES), ("interface", INTERFACE)):
        (folder / f"{name}.py").write_text(text)
    return tmp_path / "library"


@pytest.fixture
def interface(library: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(library))
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    from flash_attn.cute import interface  # pyright: ignore[reportMissingImports]

    yield interface
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


def test_it_is_told_of_its_folder_before_it_is_imported(library: Path, tmp_path: Path) -> None:
    """It alone is not version 2."""
    code = """
from wan_core.ops.attention.registry import FLASH2, FLASH4
assert FLASH4.why_not() is None, FLASH4.why_not()
assert FLASH2.why_not().startswith("flash-attn is not installed"), FLASH2.why_not()
import flash_attn.cute
print(flash_attn.cute.told)
"""
    environment = {k: v for k, v in os.environ.items() if k not in (FLASH_ATTENTION, FLASH_ATTENTION_ENABLED)}
    environment |= {"WANCORE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": f"{library}{os.pathsep}{Path.cwd()}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "cache" / "flash-attention"
    assert ast.literal_eval(done.stdout) == {FLASH_ATTENTION: str(folder), FLASH_ATTENTION_ENABLED: "1"}
    assert folder.is_dir()


def test_a_kept_kernel_that_does_not_run_is_compiled_anew(interface, caplog: pytest.LogCaptureFixture) -> None:
    interface.fault = RuntimeError("undefined symbol: func")
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8)
    with caplog.at_level(logging.WARNING):
        output = dense._run_flash4(q, k, k, False)
        dense._run_flash4(q, k, k, False)
    assert output[0] is q
    assert [type(cache).__name__ for cache in interface.calls] == ["JITPersistentCache", "JITCache", "JITCache"]
    assert caplog.text.count("undefined symbol: func") == 1


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("full"), RuntimeError("head dim")], ids=repr)
def test_what_a_compiled_kernel_raises_is_raised(interface, fault: Exception) -> None:
    interface.always = fault
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(type(fault), match=str(fault)):
        dense._run_flash4(q, q, q, False)
    assert len(interface.calls) == (1 if isinstance(fault, torch.OutOfMemoryError) else 2)
