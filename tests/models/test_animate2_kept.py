"""Keys and values of a driving video: which form they are kept in, and what that changes."""

from __future__ import annotations

import pytest
import torch

from tests.animate_references import ANIMATE2, draw_inputs, draw_weights
from wan_core.models.wan.families.animate2 import kept
from wan_core.models.wan.families.animate2 import model as animate2_model
from wan_core.models.wan.families.animate2.kept import FORMS, Form, Packed, choose_form, pack
from wan_core.models.wan.families.animate2.model import Animate2Model

CUDA, GIB = torch.device("cuda"), 2**30


@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_packed_numbers_are_near_in_every_head(scale: float) -> None:
    x = torch.randn(2, 7, 3, 16, generator=torch.Generator().manual_seed(0)) * scale
    x[0, 0, 0], x[1, :, 2] = 0.0, x[1, :, 2] * 1000  # nothing at all; a head that is far larger than the others
    packed = Packed(*pack(x))
    found = packed[:, :]
    assert packed.data.element_size() == 1 and found.isfinite().all() and not found[0, 0, 0].any()
    assert ((found - x).abs().amax(-1) <= x.abs().amax(-1) / 14).all()
    assert torch.equal(packed[1:, 2:5], found[1:, 2:5])


@pytest.mark.parametrize("videos", [1, 2])
@torch.no_grad()
def test_in_fp8_the_video_is_almost_the_same_wherever_they_are(videos: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Animate2Model(ANIMATE2).eval()
    model.load_state_dict(draw_weights(ANIMATE2))
    given = draw_inputs(ANIMATE2, (videos, 3, 4, 6))
    x, timestep, context = (given.pop(name) for name in ("x", "timestep", "context"))
    exact = model(x, timestep, model.prepare_text(context, **given))
    found = []
    for on_host in (False, True):
        monkeypatch.setattr(animate2_model, "choose_form", lambda *_, h=on_host: Form(on_host=h, fp8=True))
        prepared = model.prepare_text(context, **given)
        found += [model(x, timestep, prepared) for _ in range(2)]
        for row in range(videos):
            here = slice(row, row + 1)
            alone = model(x[here], timestep[here], prepared.rows(row, row + 1))
            torch.testing.assert_close(alone, found[-1][here], atol=1e-4, rtol=1e-4)
    assert all(torch.equal(one, found[0]) for one in found)
    assert 0 < (found[0] - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize(
    ("device", "host", "form"),
    [
        (80, 100, Form()),
        (30, 100, Form(on_host=True)),
        (35, 20, Form(fp8=True)),
        (10, 50, Form(on_host=True, fp8=True)),
        (10, 5, Form(on_host=True, fp8=True)),
        (30, None, Form(on_host=True)),
    ],
)
def test_the_first_form_that_fits_is_taken(
    device: int, host: int | None, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """58 GiB, of which each of 80 tensors takes 1 GiB of pinned memory."""
    monkeypatch.setattr(kept, "fits", lambda nbytes, *_: nbytes <= device * GIB)
    monkeypatch.setattr(kept, "available_bytes", lambda: None if host is None else host * GIB)
    assert choose_form(58 * GIB, 40, 75600, 5120, CUDA) == form
    assert choose_form(58 * GIB, 40, 75600, 5120, torch.device("cpu")) == FORMS[0]
