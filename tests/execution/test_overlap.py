"""Settings of the whole process are put back as they were, however the threads that want them overlap."""

from __future__ import annotations

import gc
from contextlib import ExitStack

import pytest

from wan_core.execution.graphs import uncollected


@pytest.mark.parametrize("enabled", [False, True])
def test_garbage_is_collected_again_when_the_last_graph_is_captured(enabled):
    try:
        (gc.enable if enabled else gc.disable)()
        first, second = ExitStack(), ExitStack()
        first.enter_context(uncollected)
        second.enter_context(uncollected)
        first.close()
        assert not gc.isenabled()  # the other one's capture goes on
        second.close()
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
