"""Where Triton is not installed (Windows as it comes): what is said, and that nothing needs it.

`pytest --without-triton` runs any tests so, also on a GPU.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from wan_core.ops.kernels import fused

TESTS = Path(__file__).parents[1]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def hidden(monkeypatch):
    """An RTX 3090 without Triton."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 6))
    monkeypatch.setattr(fused._Choice, "devices", {})
    monkeypatch.setattr(fused._Choice, "fp8", {})


def test_it_is_said_once_what_that_costs_and_how_to_get_it(hidden, caplog):
    for _ in range(2):
        assert fused.why_not(CUDA) == f"Triton is not installed: {fused.TRITON.install}"
    assert [record.message for record in caplog.records] == [f"fused kernels: {fused.why_not(CUDA)}. {fused.WITHOUT}"]
    assert "triton-windows" in fused.TRITON.install and "memory" in fused.WITHOUT
    assert not fused.triton_runs(CUDA)


def test_a_broken_triton_is_not_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise OSError('no libcuda')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    reason = fused.missing_triton()
    assert (
        reason is not None and "cannot be imported (OSError: no libcuda)" in reason and fused.TRITON.install in reason
    )


def imported(path: Path) -> set[str]:
    """The modules that `path` imports when it is itself imported, not inside functions."""
    modules = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            modules |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {str(node.module), *(f"{node.module}.{one.name}" for one in node.names)}
    return modules


def test_only_kernels_import_it_and_nothing_imports_them():
    """What imports them stands inside a function, behind `runs_kernel` or `triton_runs`."""
    by_file = {path: imported(path) for path in (TESTS.parent / "wan_core").rglob("*.py")}
    own = {path for path, names in by_file.items() if any(name.split(".")[0] == "triton" for name in names)}
    assert len(own) >= 5
    modules = {f"wan_core.ops.kernels.{path.stem}" for path in own} | {"wan_core.ops.kernels.triton_ops"}
    for path, names in by_file.items():
        assert path in own or not names & modules, f"{path} needs Triton to be imported"


def test_a_thread_never_finds_half_of_what_is_known_of_a_device(monkeypatch):
    """Kernels are prepared in a thread, beside others that choose them."""
    device, seen = torch.device("cpu"), []

    class Devices(dict):
        def __setitem__(self, key, value):
            seen.append(fused._Choice.fp8[key])
            super().__setitem__(key, value)

    monkeypatch.setattr(fused._Choice, "devices", Devices())
    monkeypatch.setattr(fused._Choice, "fp8", {})
    fused.prepare(device)
    assert seen == [False]
