"""The embedded model and pictures, for whole runs."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from wan_core.config import LoadOptions
from wan_core.pipeline.pipeline import Pipeline


@pytest.fixture(scope="module")
def pipe() -> Pipeline:
    return Pipeline.load(LoadOptions(model="tiny", device="cpu"))


@pytest.fixture(scope="module")
def image_pipe() -> Pipeline:
    return Pipeline.load(LoadOptions(model="tiny", task="i2v-tiny", device="cpu"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two of 48x32."""
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    paths = [str(folder / f"{number}.png") for number in range(2)]
    for path in paths:
        Image.fromarray(random.integers(0, 255, (32, 48, 3), np.uint8)).save(path)
    return paths


@pytest.fixture(scope="module")
def picture(pictures: list[str]) -> str:
    return pictures[0]
