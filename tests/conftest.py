"""What every test file shares: threads, a cheap compiler, hypothesis profiles, the `gpu` marker, the embedded model."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

# A deadline measures the machine, not the code. CI draws the same examples every time: a failure there can be repeated.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
hypothesis.settings.load_profile("ci" if "CI" in os.environ else "local")

# What torch's compiler writes for a CPU is here to be found again and compared, not to be fast: without them, g++ takes
# ten seconds in every new cache folder to try vector instructions, more for headers, and a second for each kernel to
# optimise. Processes that tests start have these too. On a GPU the compiler is as users have it.
CHEAP_COMPILER = {
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "AOT_INDUCTOR_DEBUG_COMPILE": "1",
}
if not torch.cuda.is_available():
    os.environ.update(CHEAP_COMPILER | {name: os.environ[name] for name in CHEAP_COMPILER if name in os.environ})


def pytest_configure(config: pytest.Config) -> None:
    """Small tensors lose time on many threads; under xdist each worker is a core's worth already."""
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


# Their tests take copies of this process, which are smaller the less it has done. The longest of the others follow, so
# that no process waits for one at the end.
FIRST = ("test_launcher_faults", "test_parallel", "test_launcher_hosts", "test_launcher_sockets", "test_launcher")
THEN = ("test_bench_startup", "test_warmup", "test_quality", "test_attention")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate((*FIRST, *THEN))}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def tiny_assets() -> Path:
    """The folder of the embedded model, `wan_core/assets/tiny`."""
    return Path(__file__).resolve().parents[1] / "wan_core" / "assets" / "tiny"
