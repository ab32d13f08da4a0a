"""A ComfyUI for every file of tests that asks for `comfy`. The file says what it has beside this pack: `PACKS` by name,
`ARGUMENTS`, and a fixture `files` that writes models and pictures into its folder `base`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comfyui import ComfyUI, find_comfyui, make_base, serving


@pytest.fixture(scope="module")
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    find_comfyui()
    folder = make_base(tmp_path_factory.mktemp("comfyui"), getattr(request.module, "PACKS", None))
    for kind in ("diffusion_models", "text_encoders", "vae", "loras", "clip_vision"):
        (folder / "models" / kind).mkdir()
    return folder


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    """What its environment has beside ours."""
    return {}


@pytest.fixture(scope="module")
def comfy(request: pytest.FixtureRequest, base: Path, files: dict[str, str] | None) -> Iterator[ComfyUI]:
    yield from serving(base, files, getattr(request.module, "ARGUMENTS", ()))
