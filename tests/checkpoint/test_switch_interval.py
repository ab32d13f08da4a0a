"""Turns of threads while weights are read."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

from wan_core.checkpoint import open_checkpoint
from wan_core.checkpoint.save import write_safetensors
from wan_core.checkpoint.staged import Feed, Reading
from wan_core.checkpoint.switch_interval import SHORT, SWITCH_INTERVAL


def test_turns_are_short_until_the_last_context_has_ended() -> None:
    usual = sys.getswitchinterval()
    begun, end = threading.Event(), threading.Event()

    def other() -> None:
        with SWITCH_INTERVAL.short():
            begun.set()
            end.wait()

    thread = threading.Thread(target=other)
    with SWITCH_INTERVAL.short():
        thread.start()
        begun.wait()
    assert sys.getswitchinterval() == pytest.approx(SHORT)
    end.set()
    thread.join()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_a_feed_has_short_turns_until_it_is_closed(tmp_path: Path) -> None:
    path, usual = tmp_path / "m.safetensors", sys.getswitchinterval()
    write_safetensors({"a": torch.arange(64.0)}, path, {})
    with Feed(open_checkpoint(path), ["a"], torch.device("cpu"), Reading()) as feed:
        assert sys.getswitchinterval() == pytest.approx(SHORT)
        assert torch.equal(feed.read("a"), torch.arange(64.0))
        feed.close()
        feed.close()
    assert sys.getswitchinterval() == pytest.approx(usual)
