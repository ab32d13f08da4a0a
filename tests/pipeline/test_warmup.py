"""What compiling made is kept for the next process: safe when stale or damaged, bounded on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.config import LoadOptions, Request, SkipOptions, SparseOptions
from wan_core.execution import compile_cache as artifacts_module
from wan_core.execution.compile_cache import Artifacts, artifact_key, cache_folder, pack, prune, sources_hash, unpack
from wan_core.pipeline.pipeline import Pipeline
from wan_core.pipeline.warmup import warm_up

CPU = torch.device("cpu")
CAPTION = "a red circle moving right on a blue background"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WANCORE_CACHE", str(tmp_path / "cache"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")


@given(payload=st.binary(max_size=200), at=st.integers(0, 300), flip=st.integers(1, 255))
def test_any_damage_is_seen(payload, at, flip):
    data = pack(payload)
    assert unpack(data) == payload
    broken = bytearray(data)
    broken[at % len(data)] ^= flip
    assert unpack(bytes(broken)) is None
    assert unpack(data[: at % len(data)]) is None


def test_the_name_depends_on_everything():
    options = {"precision": "fp8", "attention": "sdpa"}
    key = artifact_key(CPU, options)
    assert key == artifact_key(CPU, dict(reversed(options.items())))
    assert len({key, artifact_key(CPU, options | {"precision": "bf16"}), artifact_key(CPU, {})}) == 3


@pytest.mark.parametrize("file", ["attention/sdpa.py", "attention/sparse/routing.py"])
def test_other_sources_have_another_name(file, monkeypatch, tmp_path):
    for name in ("attention/sdpa.py", "attention/sparse/routing.py", "model/dit.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    monkeypatch.setattr(artifacts_module, "__file__", str(tmp_path / "artifacts.py"))
    before = sources_hash.__wrapped__()
    assert sources_hash.__wrapped__() == before
    (tmp_path / file).write_text("x = 2")
    assert sources_hash.__wrapped__() != before


def test_other_versions_have_another_name(monkeypatch):
    key = artifact_key(CPU, {})
    monkeypatch.setattr(torch, "__version__", "0.0.1")
    assert artifact_key(CPU, {}) != key


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, pack(b"no artifact of torch's")])
def test_what_is_damaged_is_deleted_and_compiled_anew(content, caplog):
    artifacts = Artifacts.open(CPU, {})
    assert "first time" in artifacts.load()
    artifacts.path.parent.mkdir(parents=True)
    artifacts.path.write_bytes(content)
    assert "damaged" in artifacts.load() and not artifacts.path.exists() and not artifacts.loaded


def test_the_oldest_go_first(tmp_path):
    for i in range(6):
        folder = tmp_path / "triton" / str(i) if i % 2 else tmp_path / "compiled"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{i}.bin"
        file.write_bytes(bytes(100))
        os.utime(file, (time.time() - 1000 + i, time.time() - 1000 + i))
    prune(tmp_path, 250)
    left = {file.name for file in tmp_path.rglob("*.bin")}
    assert left == {"4.bin", "5.bin"}
    prune(tmp_path / "absent", 0)


def test_only_our_folders_are_pruned(tmp_path):
    """`WANCORE_CACHE` may name a folder that has other things in it."""
    for name in ("models/large.safetensors", "compiled/a.bin"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(bytes(100))
    prune(tmp_path, 0)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["large.safetensors"]


@pytest.mark.parametrize("fault", [None, RuntimeError("not serialisable")], ids=repr)
def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path, monkeypatch, fault):
    """Saving comes after a video was sampled, and must not be what ends it."""
    (tmp_path / "cache").write_bytes(b"a file where the folder should be")
    artifacts = Artifacts.open(CPU, {})
    assert "cannot be read" in artifacts.load()

    def made():
        if fault is not None:
            raise fault
        return b"payload", None

    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", made)
    assert artifacts.save(1) is False


def test_a_folder_that_may_only_be_read_is_used(monkeypatch):
    artifacts = Artifacts.open(CPU, {})
    artifacts.path.parent.mkdir(parents=True)
    artifacts.path.write_bytes(pack(b"payload"))

    def forbidden(*_, **__):
        raise PermissionError("read only")

    monkeypatch.setattr(os, "utime", forbidden)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda _: object())
    assert "used again" in artifacts.load() and artifacts.loaded
    monkeypatch.setattr(type(artifacts.path), "unlink", forbidden)
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda _: None)
    assert "damaged" in artifacts.load()


def test_torch_naming_its_own_folder_is_no_wish(monkeypatch, tmp_path):
    """Importing its compiler does, and an import is not what decides where files lie."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", default_cache_dir())
    Artifacts.open(CPU, {})
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "cache" / "inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    Artifacts.open(CPU, {})
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")


def test_what_is_unpacked_already_is_not_unpacked_again(monkeypatch, tmp_path):
    calls, folder = [], tmp_path / "TORCHINDUCTOR_CACHE_DIR"

    def unpacking(payload):
        calls.append(payload)
        for name in ("fxgraph", "aotautograd"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        return object()

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", unpacking)
    artifacts = Artifacts.open(CPU, {})
    artifacts.path.parent.mkdir(parents=True)
    artifacts.path.write_bytes(pack(b"one"))
    for _ in range(2):
        assert "used again" in artifacts.load() and calls == [b"one"]
    artifacts.path.write_bytes(pack(b"two"))  # another process kept more
    assert "used again" in artifacts.load() and calls == [b"one", b"two"]
    for file in (folder / "fxgraph").iterdir():  # torch's folder was emptied
        file.unlink()
    assert "used again" in artifacts.load() and calls == [b"one", b"two", b"two"]


def test_nothing_is_written_where_everything_was_found(monkeypatch):
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: pytest.fail("serialised for nothing"))
    artifacts = Artifacts.open(CPU, {})
    artifacts.loaded = True
    assert artifacts.save(2, missed=0) is False and artifacts.saved == 2


@pytest.mark.slow
def test_the_second_process_uses_what_the_first_made(tmp_path):
    """torch finds the graph in our file alone: its own cache folder is another one each time. Both come from one that
    has imported the compiler and compiled nothing."""
    code = """
import os, sys
import torch
import torch._inductor.compile_fx
from torch._dynamo.utils import counters
from wan_core.execution.compile_cache import Artifacts
torch.set_num_threads(1)

def compile_once():
    artifacts = Artifacts.open(torch.device("cpu"), {"x": 1})
    print(artifacts.load())
    function = torch.compile(lambda x: (x * 2 + 1).sin(), dynamic=True)
    function(torch.ones(5))
    print("hits", counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])
    print("saved", artifacts.save(1), flush=True)

for folder in sys.argv[1:]:
    print("process", flush=True)
    if not (child := os.fork()):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        compile_once()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""
    folders = [str(tmp_path / run) for run in ("one", "two")]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    _, first, second = done.stdout.split("process\n")
    assert "first time" in first and "hits 0" in first and "saved True" in first
    assert "used again" in second and "hits 0" not in second


def test_both_experts_are_warm_and_nothing_changes():
    request = Request(prompt=CAPTION, steps=4, seed=3)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu", residency="stream", resident_blocks=2))
    job = pipe.prepare(request)
    exact = pipe.sample(job, pipe.encode(job))
    phases, calls = [], dict.fromkeys(("high", "low"), 0)
    for name in calls:
        module = pipe.models.residency.models[name]
        module.register_forward_hook(lambda *_, n=name: calls.__setitem__(n, calls[n] + 1))
    warm_up(pipe, request, phases.append)
    assert phases == ["warm up low", "warm up high"] and calls == {"high": 1, "low": 1}
    assert {"warm up high", "warm up low"} <= pipe.report.phases.keys()
    job = pipe.prepare(request)
    assert torch.equal(pipe.sample(job, pipe.encode(job)), exact)


def test_sparse_steps_are_warm_too():
    """One forward of each kind of step that an expert has."""
    request = Request(prompt=CAPTION, steps=4, seed=3, skip=SkipOptions(sparse=SparseOptions(sparsity=0.5, ramp=0)))
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    job, calls = pipe.prepare(request), {}
    exact = pipe.sample(job, pipe.encode(job))
    for name in ("high", "low"):
        attention = pipe.models.residency.models[name].blocks[0].self_attn
        attention.register_forward_hook(
            lambda own, *_, n=name: calls.setdefault(n, []).append(type(own.attend).__name__)
        )
    warm_up(pipe, request)
    kinds = {name: {step.sparsity > 0 for step in job.plan.steps if step.expert == name} for name in calls}
    found = {name: {kind == "SparseAttention" for kind in several} for name, several in calls.items()}
    assert found == kinds == {"high": {False, True}, "low": {True}} and len(calls["high"]) == 2
    job = pipe.prepare(request)
    assert torch.equal(pipe.sample(job, pipe.encode(job)), exact)


def test_a_warm_up_that_runs_out_of_memory_goes_on():
    request = Request(prompt=CAPTION, steps=4, seed=3)
    pipe = Pipeline.load(LoadOptions(model="tiny", device="cpu"))
    failed = []

    def fail(*_):
        if not failed:
            failed.append(1)
            raise torch.cuda.OutOfMemoryError("as a test wants it")

    pipe.models.residency.models["low"].blocks[2].self_attn.register_forward_pre_hook(fail)
    warm_up(pipe, request)
    assert failed and any("out of memory, going on" in note for note in pipe.report.notes)


def test_where_it_is_kept(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("WANCORE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache_folder() == tmp_path / "wancore"
