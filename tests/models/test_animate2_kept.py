"""Keys and values of a driving video: which form they are kept in, and what that changes."""

from __future__ import annotations

import pytest
import torch

from tests.animate_references import ANIMATE2, draw_inputs, draw_weights
from wan_core.models.wan.families.animate2 import kept
from wan_core.models.wan.families.animate2 import model as animate2_model
from wan_core.models.wan.families.animate2.data import ANIMATE2_14B, FORMS, Form, prepared_forms
from wan_core.models.wan.families.animate2.kept import Packed, choose_form, pack
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
    ("device", "host", "planned", "form"),
    [
        (90, 100, None, Form()),
        (40, 100, None, Form(on_host=True)),
        (45, 20, None, Form(fp8=True)),
        (10, 50, None, Form(on_host=True, fp8=True)),
        (10, 5, None, Form(on_host=True, fp8=True)),
        (40, None, None, Form(on_host=True)),
        (60, 100, Form(), Form()),  # less runs beside than without a plan
        (58, 100, Form(), Form(on_host=True)),  # others took what was planned
        (90, 0, Form(on_host=True), Form(on_host=True)),  # counted by the plan
        (32, 0, Form(fp8=True), Form(fp8=True)),
    ],
)
def test_the_first_form_that_fits_is_taken(
    device: int, host: int | None, planned: Form | None, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """58.3 GiB at 1280x720, of which each of 80 tensors takes 1 GiB of pinned memory. 11.3 GiB are kept free beside
    them, or what the plan says: here 1."""
    monkeypatch.setattr(kept, "free_on", lambda _: device * GIB)
    monkeypatch.setattr(kept, "available_bytes", lambda: None if host is None else (host + 4) * GIB)
    forms = [one._replace(activations=GIB) for one in prepared_forms(ANIMATE2_14B, (1, 16, 22, 90, 160), 2)]
    assert [round(one.device / GIB, 1) for one in forms] == [57.7, 2.9, 29.7, 1.5]
    chosen = next((one for one in forms if one.form == planned), None)
    assert choose_form(forms, chosen, 79200, 5120, CUDA) == form
    assert choose_form(forms, chosen, 79200, 5120, torch.device("cpu")) == (planned or FORMS[0])
