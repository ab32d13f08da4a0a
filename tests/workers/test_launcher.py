"""The control channel, options and messages of the workers, without starting a rank."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from wan_core.checkpoint.safetensors_file import safetensors_pieces
from wan_core.config import (
    OptionError,
)
from wan_core.execution.report import Phase, Report
from wan_core.sampling.solvers import History
from wan_core.sampling.start import Leftover, Start
from wan_core.workers import control
from wan_core.workers.control import (
    MAX_BODY,
    AuthenticationError,
    Channel,
    ChannelClosed,
    ChannelError,
    Listener,
    connect,
    new_key,
    unpack_tensors,
)
from wan_core.workers.options import WorkerOptions, parse_devices
from wan_core.workers.wire import pack, unpack

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool, torch.float16)


def again(data: Any) -> Any:
    return json.loads(json.dumps(data))


# -------------------------------------------------------------------------------------------------------------- tensors


@st.composite
def named_tensors(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    names = draw(st.lists(st.text(min_size=1, max_size=8), max_size=4, unique=True))
    tensors = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=4))
        tensors[name] = (torch.rand(shape) * 100).to(draw(st.sampled_from(DTYPES)))
    return tensors


@given(named_tensors())
def test_tensors_come_back_and_are_a_safetensors_file(tensors: dict[str, torch.Tensor]) -> None:
    data = b"".join(safetensors_pieces(tensors, {}))
    back = unpack_tensors(bytearray(data))
    reference = safetensors.torch.load(data)
    assert back.keys() == tensors.keys() == reference.keys()
    for name, tensor in tensors.items():
        for other in (back[name], reference[name]):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape and torch.equal(other, tensor)


def frame(header: Any, data: bytes = b"") -> bytearray:
    text = json.dumps(header).encode()
    return bytearray(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    "data",
    [
        bytearray(b"\xff" * 16),
        frame([1]),
        frame({"a": 1}),
        frame({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"0000"),
        frame({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"0000"),
        frame({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}),
        frame({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, b"0000"),
        frame({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"0000"),
    ],
)
def test_bytes_that_are_no_tensors_are_refused(data: bytearray) -> None:
    with pytest.raises(ChannelError, match="cannot be read"):
        unpack_tensors(data)
    assert unpack_tensors(bytearray()) == {}  # no bytes are sent where there are no tensors


# -------------------------------------------------------------------------------------------------------------- channel


def pair(key: bytes, other: bytes | None = None) -> tuple[Channel, Channel]:
    """(program's end, worker's end)."""
    listener, ends = Listener(key), []
    thread = threading.Thread(target=lambda: ends.append(listener.accept(10)))
    thread.start()
    try:
        worker = connect(listener.port, other or key)
    finally:
        if other is None:
            thread.join()
        listener.close()
    return ends[0], worker


def test_frames_arrive_whole_and_in_order() -> None:
    program, worker = pair(new_key())
    picture = torch.rand(3, 500, 700)
    threading.Thread(target=lambda: [worker.send({"n": n}, {"x": picture} if n else {}) for n in range(3)]).start()
    for n in range(3):
        header, tensors = program.receive()
        assert header == {"n": n}
        assert not n or torch.equal(tensors["x"], picture)
    worker.close()
    with pytest.raises(ChannelClosed):
        program.receive()

    def fill() -> None:
        for _ in range(20):  # the first may still go into a buffer
            program.send({"n": 1}, {"x": picture})

    with pytest.raises(ChannelClosed):
        fill()


def test_a_wrong_key_is_refused_and_the_right_one_still_comes_through() -> None:
    key, ends = new_key(), []
    listener = Listener(key)
    thread = threading.Thread(target=lambda: ends.append(listener.accept(20)))
    thread.start()
    with pytest.raises(AuthenticationError, match="key"):
        connect(listener.port, new_key())
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 100)
    with socket.create_connection(("127.0.0.1", listener.port)):
        pass
    worker = connect(listener.port, key)
    thread.join(10)
    worker.send({"n": 1})
    assert ends[0].receive()[0] == {"n": 1}


def test_a_connection_that_sends_byte_by_byte_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte does not restart the timeout: otherwise such a connection would keep the workers from connecting."""
    monkeypatch.setattr(control, "_HELLO_SECONDS", 0.5)
    key, ends, done = new_key(), [], threading.Event()
    listener = Listener(key)
    stranger = socket.create_connection(("127.0.0.1", listener.port))

    def trickle() -> None:
        with contextlib.suppress(OSError):
            while not done.wait(0.1):
                stranger.sendall(b"x")

    threading.Thread(target=trickle, daemon=True).start()
    thread = threading.Thread(target=lambda: ends.append(listener.accept(10)))
    thread.start()
    try:
        begin = time.monotonic()
        connect(listener.port, key).close()
        assert time.monotonic() - begin < 3
    finally:
        done.set()
        thread.join(10)
        stranger.close()
        listener.close()


def test_a_program_that_does_not_know_the_key_is_refused_too() -> None:
    """A program that has taken the port cannot use the workers."""
    key, server = new_key(), socket.create_server(("127.0.0.1", 0))

    def pretend() -> None:
        connection, _ = server.accept()
        connection.sendall(b"WanCore control 1\n" + bytes(32))
        connection.recv(64)
        connection.sendall(hmac.digest(b"another", b"", "sha256"))
        connection.close()

    threading.Thread(target=pretend).start()
    with pytest.raises(AuthenticationError, match="does not know the key"):
        connect(server.getsockname()[1], key)
    server.close()


@pytest.mark.parametrize("lengths", [(2**31, 0), (2, MAX_BODY + 1)])
def test_a_frame_that_announces_too_much_is_not_read(lengths: tuple[int, int]) -> None:
    program, worker = pair(new_key())
    worker._socket.sendall(struct.pack(">IQ", *lengths))
    with pytest.raises(ChannelError, match="more than is allowed"):
        program.receive()


# ---------------------------------------------------------- what runs leave; requests and plans: test_plan_and_generate


def test_what_a_run_left_comes_back_exactly_with_its_tensors() -> None:
    one, two = torch.rand(1, 2, 3), torch.rand(2, 2)
    for history in (History(), History((one, two), two, 2)):
        start = Start(shape=(1, 2), seed=3, batch_index=(1,), leftover=Leftover(one, 0.3, "unipc", history))
        tensors: dict[str, torch.Tensor] = {}
        back = unpack(Start, again(pack(start, tensors, "start")), tensors)
        assert not tensors and str(back) == str(start) and back.leftover is not None
        assert isinstance(back.leftover.history, History) and torch.equal(back.leftover.x, one)


def test_a_report_of_the_ranks_continues_here() -> None:
    report = Report(torch.device("cpu"), {"a": 1}, {"decode": Phase(1.5, peak=2**30, steps=3)}, ["a note"])
    report.workers = "NVIDIA H200"
    back = unpack(Report, again(pack(report, {}, "")))
    with back.phase("write"):
        pass
    assert back.phases["decode"] == report.phases["decode"] and back.notes == report.notes
    assert "report (NVIDIA H200)" in back.branch().text() and "device 1.00 GiB" in back.text()


# -------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("text", "gpus", "devices"),
    [
        ("auto", 2, ("cuda:0", "cuda:1")),
        ("all", 1, ("cuda:0",)),
        ("3", 8, ("cuda:0", "cuda:1", "cuda:2")),
        ("0,2", 4, ("cuda:0", "cuda:2")),
        ("cuda:3, cuda:1", 4, ("cuda:3", "cuda:1")),
        ("cpu,cpu", 0, ("cpu", "cpu")),
        ("CPU", 4, ("cpu",)),
    ],
)
def test_devices(text: str, gpus: int, devices: tuple[str, ...]) -> None:
    assert parse_devices(text, gpus) == devices


@pytest.mark.parametrize(
    ("text", "gpus", "message"),
    [
        ("auto", 0, "cpu,cpu"),
        ("3", 2, "finds 2"),
        ("0", 2, "at most as many"),
        ("1,2", 2, "cuda:2"),
        ("0,0", 2, "each GPU once"),
        ("cpu,0", 2, "cannot be mixed"),
        ("rocm,rocm", 2, "'rocm' is not known"),
        ("", 2, "not known"),
        ("cuda", 2, "not known"),
        ("9" * 5000, 2, "finds 2"),
        ("cuda:" + "9" * 5000, 2, "finds 2"),
    ],
)
def test_invalid_devices(text: str, gpus: int, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_devices(text, gpus)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mesh": "2x1x2"}, "needs 4 ranks"),
        ({"mesh": "fast"}, "CFGxRINGxULYSSES"),
        ({"devices": ()}, "no device"),
        ({"step_timeout": 0}, "1 to 86400"),
    ],
)
def test_invalid_options(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        WorkerOptions(**{"devices": ("cpu", "cpu"), **changed})


def test_workers_on_the_cpu_can_be_off() -> None:
    for text in ("cpu", "cpu,cpu", "cpu,0"):
        with pytest.raises(OptionError, match="WANCORE_ALLOW_CPU_WORKERS=1"):
            parse_devices(text, 2, cpu=False)
    assert parse_devices("0,1", 2, cpu=False) == ("cuda:0", "cuda:1")


@pytest.mark.parametrize("cores", [1, 4])
def test_no_more_cpu_workers_than_cores(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    """Two are allowed on any machine."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    most = max(2, cores)
    assert WorkerOptions(devices=parse_devices("cpu," * (most - 1) + "cpu", 0)).devices == ("cpu",) * most
    for count in (most + 1, 100_000):
        with pytest.raises(OptionError, match=f"{count} workers on the CPU given; allowed are {most}"):
            WorkerOptions(devices=parse_devices("cpu," * (count - 1) + "cpu", 0))
