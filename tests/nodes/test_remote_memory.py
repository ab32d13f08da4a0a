"""Memory of workers under ComfyUI's real memory manager, on a simulated device: `remote_memory` has the checks."""

from __future__ import annotations

import pytest

from tests.comfyui import find_comfyui, printed_by

pytestmark = pytest.mark.comfy
CHECKS = (
    "kept_is_given_back", "others_make_room", "models_leave_although_there_is_room", "held_is_not_asked_for_again",
    "workers_that_ended_hold_nothing", "others_may_end_them", "a_later_prompt_ends_others_on_its_devices",
)  # fmt: skip


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return printed_by("remote_memory.py", find_comfyui())


@pytest.mark.parametrize("name", CHECKS)
def test_memory_of_workers(failures: dict[str, str], name: str) -> None:
    assert not failures[name], failures[name]


def test_all_checks_are_listed(failures: dict[str, str]) -> None:
    assert sorted(failures) == sorted(CHECKS)
