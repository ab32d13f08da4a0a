"""Normalized attention guidance: against plain torch, inside the model, and in a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tests.sampling.test_denoise import EXPERTS, NOISE, TEXT, small_dit
from tests.sampling.test_denoise import run as denoised
from wan_core.config import NagOptions, SkipOptions, TaylorSeerOptions
from wan_core.models.wan import layers
from wan_core.models.wan.families.wan.model import ImageWanModel
from wan_core.models.wan.layers import nag
from wan_core.sampling.cache.skipping import skip_forwards
from wan_core.sampling.conditioning import draw_noise
from wan_core.sampling.control import with_nag
from wan_core.sampling.plan import make_plan

USUAL = NagOptions()


def numbers(options: NagOptions) -> torch.Tensor:
    return torch.tensor([options.scale, options.tau, options.alpha])


def reference(positive: torch.Tensor, negative: torch.Tensor, options: NagOptions) -> torch.Tensor:
    """Equations 7 to 9 of the paper, written out: L1 norms over all channels of a token."""
    guided = positive * options.scale - negative * (options.scale - 1)
    ratio = guided.norm(p=1, dim=-1, keepdim=True) / positive.norm(p=1, dim=-1, keepdim=True)
    clipped = guided * ratio.clamp(max=options.tau) / ratio
    return clipped * options.alpha + positive * (1 - options.alpha)


@pytest.mark.parametrize(
    "options", [USUAL, NagOptions(scale=1.1, tau=5, alpha=1), NagOptions(scale=5, tau=1, alpha=0.5)]
)
@pytest.mark.parametrize("tokens", [1, 7, 20])
def test_equals_plain_torch(options, tokens, monkeypatch):
    monkeypatch.setattr(layers, "NAG_TOKENS", 8)  # several parts, the last one short
    positive, negative = draw_noise(1, (2, 2, tokens, 24))
    torch.testing.assert_close(
        nag(positive.clone(), negative, numbers(options)), reference(positive, negative, options)
    )


def plain_cross_attention(attention, x, texts, options):
    """Queries of x, keys and values of both texts, softmax, the reference, the output projection."""
    q = norm(attention.q(x), attention.norm_q)
    attended = []
    for text in texts:
        k, v = norm(attention.k(text), attention.norm_k), attention.v(text)
        heads = [t.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for t in (q, k, v)]
        attended.append(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(-2))
    return attention.o(reference(*attended, options))


def norm(x, layer):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + layer.eps) * layer.weight


def test_cross_attention_with_two_texts():
    attention = EXPERTS["high"].blocks[0].cross_attn
    x, texts = draw_noise(1, (2, 10, 32)), draw_noise(2, (2, 2, 8, 32))
    both = [attention.kv(text) for text in texts]
    output = attention(x, (*both[0], *both[1], numbers(USUAL)))
    torch.testing.assert_close(output, plain_cross_attention(attention, x, texts, USUAL), rtol=1e-4, atol=1e-5)


def test_the_image_of_wan_21_is_attended_to_as_it_was():
    config = replace(small_dit(36).config, image_dim=6)
    model = ImageWanModel(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    attention = model.blocks[0].cross_attn
    embedded = [model.embed_text(draw_noise(n, (1, 3, 12)), draw_noise(9, (1, 5, 6))) for n in (1, 2)]
    both = [attention.kv(*one) for one in embedded]
    x = draw_noise(4, (1, 10, 32))
    output = attention(x, (*both[0], *both[1][:2], numbers(USUAL)))
    with_text = {n: attention(x, kv) for n, kv in enumerate(both)}
    # the output projection is linear: the image's part is what both have in common
    q = norm(attention.q(x), attention.norm_q).unflatten(-1, (2, -1))
    texts = [attention.attend(q, kv[0], kv[1]).flatten(-2) for kv in both]
    seen = attention.attend(q, both[0][2], both[0][3]).flatten(-2)
    torch.testing.assert_close(with_text[0], attention.o(texts[0] + seen))
    torch.testing.assert_close(output, attention.o(reference(*texts, USUAL) + seen), rtol=1e-4, atol=1e-5)


def plan_with(options=USUAL, steps=4, skip=None, **guidance):
    guidance = {"guidance_high": 1.0, "guidance_low": 1.0, **guidance}
    return with_nag(skip_forwards(make_plan(steps=steps, solver="euler", **guidance), skip, None), options)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("high", [1.0, 3.5])
def test_a_run_uses_it_in_steps_without_guidance_alone(batched, high):
    plan = plan_with(guidance_high=high)
    assert [step.nag for step in plan.steps] == [step.expert == "low" or high == 1 for step in plan.steps]
    x = NOISE
    for step in plan.steps:
        model, t = EXPERTS[step.expert], torch.full((1,), step.timestep)
        cond, uncond = (model.prepare_text(rows) for rows in (TEXT.cond, TEXT.uncond))
        if step.nag:
            velocity = model(x, t, cond.with_negative(uncond, numbers(USUAL)))
        else:
            away = model(x, t, uncond)
            velocity = away + step.guidance * (model(x, t, cond) - away)
        x = x + velocity * (step.sigma_next - step.sigma)
    latents = denoised(plan, batched=batched)
    torch.testing.assert_close(latents, x, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(
        latents, denoised(replace(plan, nag=None, steps=tuple(replace(s, nag=False) for s in plan.steps)))
    )


def test_with_a_cache_and_guidance_of_one_expert():
    skip = SkipOptions(taylorseer=TaylorSeerOptions(interval=3))
    plan = plan_with(steps=12, skip=skip, guidance_high=3.5, guidance_low=1.0)
    assert {step.nag for step in plan.steps} == {True, False} and any(step.skipped for step in plan.steps)
    assert all(step.nag == (step.branches == ("cond",)) for step in plan.steps)
    assert denoised(plan).isfinite().all()
