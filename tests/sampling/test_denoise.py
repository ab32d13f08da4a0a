"""The loop and guidance, on small random transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.denoised import denoise
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.model import WanModel
from wan_core.sampling.conditioning import Conditioning, draw_noise
from wan_core.sampling.denoise import NonFiniteError
from wan_core.sampling.plan import make_plan
from wan_core.sampling.solvers import NOISY, SOLVERS, History


def small_dit(in_channels: int = 16, out_channels: int = 16, seed: int = 0) -> WanModel:
    torch.manual_seed(seed)
    config = DiTConfig(
        in_channels=in_channels,
        out_channels=out_channels,
        dim=32,
        ffn_dim=48,
        num_heads=2,
        num_layers=2,
        text_dim=12,
        text_len=8,
    )
    return WanModel(config).eval().requires_grad_(False)


HIGH, LOW = small_dit(seed=1), small_dit(seed=2)
EXPERTS = {"high": HIGH, "low": LOW}
NOISE = draw_noise(7, (1, 16, 3, 4, 6))
TEXT = Conditioning(cond=draw_noise(1, (1, 5, 12)), uncond=draw_noise(2, (1, 2, 12)))


def run(plan, conditioning=TEXT, noise=NOISE, acquire=EXPERTS.__getitem__, **options):
    return denoise(plan, acquire, conditioning, noise, **options)


@settings(max_examples=15)
@given(
    steps=st.integers(1, 6),
    guidance=st.tuples(st.sampled_from([1.0, 3.5]), st.sampled_from([1.0, 2.0, 5.0])),
    solver=st.sampled_from(sorted(set(SOLVERS) - set(NOISY))),
    batch=st.integers(1, 2),
)
def test_equals_a_plain_reference(steps, guidance, solver, batch):
    """The loop against the textbook written out: both branches of the right expert at every step, batched or not."""
    plan = make_plan(steps=steps, guidance_high=guidance[0], guidance_low=guidance[1], solver=solver)
    noise = draw_noise(steps, (batch, 16, 3, 4, 6))
    x, history = noise, History()
    for step in plan.steps:
        model, t = EXPERTS[step.expert], torch.full((batch,), step.timestep)
        cond = model(x, t, TEXT.cond.expand(batch, -1, -1))
        uncond = model(x, t, TEXT.uncond.expand(batch, -1, -1))
        x, history = SOLVERS[solver](x, uncond + step.guidance * (cond - uncond), step.index, plan.sigmas, history)
    for batched in (False, True):
        torch.testing.assert_close(run(plan, noise=noise, batched=batched), x, rtol=1e-4, atol=1e-4)


def test_guidance_one_runs_no_unconditional_branch():
    calls = []
    handle = HIGH.register_forward_pre_hook(lambda _, args: calls.append(args[0].shape[0]))
    plan = make_plan(steps=5, guidance_high=1.0, guidance_low=1.0, boundary=0.0)
    run(plan, Conditioning(cond=TEXT.cond), batched=True)
    handle.remove()
    assert calls == [1] * 5 == [1] * plan.forwards


def test_each_expert_is_acquired_once_and_prepares_its_text_once():
    acquired, prepared = [], []
    original = WanModel.prepare_text

    def counting(self, *arguments):
        prepared.append(self)
        return original(self, *arguments)

    def acquire(name):
        acquired.append(name)
        return EXPERTS[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WanModel, "prepare_text", counting)
        run(make_plan(steps=8), acquire=acquire)
    assert acquired == ["high", "low"] and prepared == [HIGH, LOW]


def test_known_first_frame_is_held_and_has_timestep_zero():
    seen = []
    model = small_dit(48, 48)
    model.register_forward_pre_hook(lambda _, args: seen.append((args[0][:, :, 0], args[1])))
    known_latents = draw_noise(3, (1, 48, 1, 4, 4))
    noise = draw_noise(4, (1, 48, 3, 4, 4))
    plan = make_plan(task="ti2v-5B", steps=3)
    result = run(plan, Conditioning(cond=TEXT.cond, uncond=TEXT.uncond, known=known_latents), noise, lambda _: model)
    assert torch.equal(result[:, :, :1], known_latents)
    for (first, timestep), step in zip(seen[::2], plan.steps, strict=True):
        assert torch.equal(first, known_latents[:, :, 0])
        assert timestep.tolist() == [[0.0, step.timestep, step.timestep]]


def test_image_channels_follow_the_noise():
    model, concat = small_dit(36), draw_noise(5, (1, 20, 3, 4, 6))
    seen = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run(
        make_plan(task="i2v-A14B", steps=2),
        Conditioning(cond=TEXT.cond, uncond=TEXT.uncond, concat=concat),
        NOISE,
        lambda _: model,
    )
    assert torch.equal(seen[0], torch.cat([NOISE, concat], 1))
    assert all(torch.equal(x[:, 16:], concat) for x in seen)


def test_non_finite_latents_stop_the_run_at_their_step():
    plan, steps = make_plan(steps=10), []

    def poison(progress):
        steps.append(progress.step.index)
        if progress.step.index == 3:
            HIGH.patch_embedding.bias.data[0] = float("nan")

    try:
        with pytest.raises(NonFiniteError, match="step 4"):
            run(plan, on_step=poison)
    finally:
        HIGH.patch_embedding.bias.data[0] = 0.0
    assert steps == [0, 1, 2, 3]


def test_a_callback_that_raises_ends_the_run_within_a_step():
    class Interrupted(Exception):
        pass

    done = []

    def interrupt(progress):
        done.append(progress.step.index)
        if progress.step.index == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        run(make_plan(steps=9), on_step=interrupt)
    assert done == [0, 1, 2]


def test_noise_is_comfyui_noise():
    """ComfyUI draws with the global CPU generator seeded by torch.manual_seed."""
    expected = torch.randn((1, 16, 3, 4, 6), generator=torch.manual_seed(7))
    assert torch.equal(NOISE, expected)
