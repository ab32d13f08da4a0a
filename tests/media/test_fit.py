"""Pictures fitted with black bars, against the numbers that OpenCV 5.0.0 gives and against plain sums."""

from __future__ import annotations

import numpy as np
import pytest

from wan_core.media.fit import fit_with_bars, fitted_box, interpolated

LARGER = [[0, 15, 31, 48, 63], [53, 67, 84, 101, 115], [116, 130, 147, 164, 178], [168, 183, 199, 216, 231]]
SMALLER = [[24, 52, 80], [150, 178, 206]]


def drawn(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_interpolation_equals_opencvs() -> None:
    """`cv2.resize(picture, (5, 4), interpolation=cv2.INTER_LINEAR)[..., 0]`, and smaller."""
    picture = np.arange(3 * 4 * 3, dtype=np.uint8).reshape(3, 4, 3) * 7
    assert interpolated(picture, (5, 4))[..., 0].tolist() == LARGER
    assert interpolated(picture, (3, 2))[..., 0].tolist() == SMALLER


@pytest.mark.parametrize("by_area", [False, True])
@pytest.mark.parametrize("size", [(20, 40), (40, 20), (64, 64), (7, 64)])
def test_what_is_not_the_picture_is_black(size: tuple[int, int], by_area: bool) -> None:
    picture = drawn(32, 24) // 2 + 100
    left, top, width, height = fitted_box((24, 32), size)
    fitted = fit_with_bars(picture, size, by_area=by_area)
    assert fitted.shape == (size[1], size[0], 3)
    inner = np.zeros(fitted.shape, bool)
    inner[top : top + height, left : left + width] = True
    assert (fitted[inner] >= 99).all() and not fitted[~inner].any()
    assert abs(width / height - 24 / 32) < 0.1 and (width == size[0] or height == size[1])
    assert fit_with_bars(picture, (24, 32), by_area=by_area) is picture
