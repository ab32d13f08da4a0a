"""What every test file shares: threads, a cheap compiler, hypothesis profiles, the `gpu` marker, the embedded model."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

# Before torch loads OpenMP, which reads them once; processes that tests start inherit them. Threads that wait for work
# do so asleep and not in a loop: with more threads than cores the loop takes the time of those that have work. Under
# xdist a test process has one core, and so have the processes that it starts.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

gc.disable()  # until all tests are imported, see `pytest_collection`

# What torch's compiler writes for a CPU is here to be found again and compared, not to be fast: without them, g++ takes
# ten seconds in every new cache folder to try vector instructions, more for headers, and a second for each kernel to
# optimise. Processes that tests start have these too. On a GPU the compiler is as users have it.
CHEAP_COMPILER = {
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "AOT_INDUCTOR_DEBUG_COMPILE": "1",
}


SLOW = Path(__file__).parent / "slow_tests.txt"  # tests of 0.1 s and more, a line each, without parameters
SLOW_SECONDS = 0.1
EXAMPLES = 25  # of hypothesis, where a test does not say how many
HIDDEN = Path(__file__).parent / "without_triton"  # a package `triton` that cannot be imported


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--without-triton", action="store_true", help="run as where Triton is not installed")
    parser.addoption("--quick", action="store_true", help=f"without the tests that {SLOW.name} names")
    parser.addoption("--time-tests", action="store_true", help=f"write {SLOW.name} anew after a whole run")


def pytest_configure(config: pytest.Config) -> None:
    """Set up hypothesis and torch; xdist's controller, which runs no test, does without both. Small tensors lose time
    on many threads, and under xdist each process has one core."""
    if config.getoption("--without-triton"):
        sys.modules["triton"] = None  # type: ignore[assignment] # here
        paths = [str(HIDDEN), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # and in processes that tests start
    if "PYTEST_XDIST_WORKER" not in os.environ and config.getoption("dist", "no") != "no":
        return
    import hypothesis
    import torch

    # A deadline measures the machine, not the code. CI draws the same examples every time: a failure there can be
    # repeated. Locally others are drawn each time, so few of them are many over a week.
    common = {"deadline": None, "max_examples": EXAMPLES}
    hypothesis.settings.register_profile("local", **common)
    hypothesis.settings.register_profile("ci", **common, derandomize=True, database=None, print_blob=True)
    hypothesis.settings.load_profile("ci" if "CI" in os.environ else "local")
    if not torch.cuda.is_available():
        os.environ.update(CHEAP_COMPILER | {name: os.environ[name] for name in CHEAP_COMPILER if name in os.environ})
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, os.cpu_count() or 1))


# Modules by name, in whatever folder. Tests of the first ones fork this process: a copy is smaller the less has been
# done in it. The longest of the others follow, so that no process waits for one at the end.
FIRST = ("test_launcher_faults", "test_launcher_parts", "test_parallel", "test_parallel_sparse", "test_launcher_hosts",
         "test_launcher_sockets", "test_launcher")  # fmt: skip
THEN = ("test_attention", "test_stream", "test_quality", "test_lora")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate((*FIRST, *THEN))}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if config.getoption("--quick"):
        slow = set(SLOW.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if test_name(item.nodeid) in slow])
        items[:] = [item for item in items if test_name(item.nodeid) not in slow]
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="no CUDA device")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def test_name(nodeid: str) -> str:
    """A test's file and function, without its parameters."""
    return nodeid.partition("[")[0]


test_name.__test__ = False  # type: ignore[attr-defined]
SECONDS: dict[str, float] = {}  # of the slowest case of each test that ran


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = test_name(report.nodeid)
    SECONDS[name] = max(SECONDS.get(name, 0.0), report.duration)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--time-tests") and "PYTEST_XDIST_WORKER" not in os.environ:
        slow = sorted(name for name, seconds in SECONDS.items() if seconds >= SLOW_SECONDS)
        SLOW.write_text("".join(f"{name}\n" for name in slow), encoding="utf-8")


COMPILES = ("torch compiles for GPUs with Triton", "working triton installation")  # ours, and torch's own


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Without Triton a test that compiles for a GPU is skipped where torch or we refuse; others must pass."""
    try:
        return (yield)
    except (RuntimeError, ValueError) as fault:
        import torch

        reason = next((reason for reason in COMPILES if reason in str(fault)), None)
        if reason is None or not item.config.getoption("--without-triton") or not torch.cuda.is_available():
            raise
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported by its end stays: looking through it for garbage, again and again, finds none and takes seconds.
    Forked processes share its memory for longer, too."""
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


@pytest.fixture(scope="session")
def tiny_assets() -> Path:
    """The folder of the embedded model, `wan_core/assets/tiny`."""
    return Path(__file__).resolve().parents[1] / "wan_core" / "assets" / "tiny"
