"""Distillation of the embedded model: the pairs are the engine's, the files are what was trained, the loss falls."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.denoised import denoise
from tools.distill_tiny import main
from tools.tiny import distill
from tools.tiny.distill import Adapter, PairRing, merge_lora, path_losses, rollout, student_plan, teacher_plan
from tools.tiny.experts import run_in_bf16
from tools.tiny.loop import Clock, Trainer
from wan_core.checkpoint import load_dit, open_checkpoint
from wan_core.models.wan.model import WanModel
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.plan import Expert, Plan

SHAPE = (16, 2, 4, 4)  # latents of 32 x 32 x 5
EXPERTS: tuple[Expert, Expert] = ("high", "low")


def load_experts(folder: Path) -> dict[Expert, WanModel]:
    return {name: load_dit(folder / f"t2v_{name}.safetensors", dtype=torch.float32) for name in EXPERTS}


def random_text(count: int) -> Tensor:
    return torch.randn(count, 7, 64, generator=torch.Generator().manual_seed(5))


def ring_of(experts: dict[Expert, WanModel], teacher: Plan, text: Tensor) -> PairRing:
    return PairRing(
        8,
        teacher=teacher,
        student=student_plan(),
        experts=experts,
        text=text,
        silence=torch.zeros(1, 1, 64),
        shape=SHAPE,
        seed=3,
    )


def scramble(adapters: dict[Expert, Adapter]) -> None:
    """Additions that change what the model does, rounded as in a file."""
    with torch.no_grad():
        for adapter in adapters.values():
            for parameter in adapter.parameters():
                parameter.normal_(std=0.1).copy_(parameter.bfloat16())


def test_the_student_takes_the_four_published_steps():
    steps = student_plan().steps
    assert [round(step.timestep, 1) for step in steps] == [1000, 937.5, 833.3, 625]
    assert [step.expert for step in steps] == ["high", "high", "low", "low"]
    assert student_plan().forwards * 10 <= teacher_plan().forwards


def test_a_teacher_with_the_students_schedule_is_the_students_rollout(tiny_assets: Path):
    """One path, by the engine's loop and by the one that is trained."""
    experts, plan, text = load_experts(tiny_assets), student_plan(), random_text(3)
    noise = torch.randn(3, *SHAPE)
    with torch.no_grad():
        path = distill.teacher_path(plan, plan, experts, Conditioning(cond=text), noise)
        states = rollout(plan, experts, text, noise)
    torch.testing.assert_close(path, torch.stack(states, 1), rtol=0, atol=2e-5)


def test_pairs_end_where_the_teacher_ends(tiny_assets: Path):
    experts, teacher = load_experts(tiny_assets), teacher_plan(16)
    text = random_text(4)
    ring = ring_of(experts, teacher, text)
    ring.grow(3)
    rows = {name: values[:3] for name, values in ring.rows.items()}
    with torch.no_grad():
        conditioning = Conditioning(cond=text[rows["caption"]], uncond=ring.silence)
        wanted = denoise(teacher, experts.__getitem__, conditioning, rows["noise"], batched=True)
    torch.testing.assert_close(rows["path"][:, -1], wanted, rtol=0, atol=1e-5)
    # On the way there is less and less noise: shares of 0.94, 0.83, 0.63 and 0.
    left = [(rows["path"][:, i] - wanted).square().mean().sqrt() for i in range(4)]
    assert all(a > 1.02 * b for a, b in pairwise(left))


def test_the_file_is_what_was_trained(tiny_assets: Path, tmp_path: Path):
    experts, plan, text = load_experts(tiny_assets), student_plan(), random_text(2)
    adapters: dict[Expert, Adapter] = {name: Adapter(expert, 4) for name, expert in experts.items()}
    noise = torch.randn(2, *SHAPE)
    with torch.no_grad():
        before = rollout(plan, experts, text, noise)[-1]
        scramble(adapters)
        trained = rollout(plan, experts, text, noise)[-1]
    merged = load_experts(tiny_assets)
    for name, adapter in adapters.items():
        distill.write_lora(adapter, tmp_path, name, plan)
        merge_lora(merged[name], distill.lora_path(tmp_path, name))
        with open_checkpoint(distill.lora_path(tmp_path, name)) as opened:
            assert opened.metadata["expert"] == name and opened.metadata["distilled"] == "4-step"
            assert opened.tensors["diffusion_model.blocks.5.ffn.0.lora_down.weight"].shape == (4, 128)
            linears = 10 * len(experts[name].blocks) + 1  # and the head
            assert len(opened.tensors) == 3 * linears
    with torch.no_grad():
        run = denoise(plan, merged.__getitem__, Conditioning(cond=text), noise)
    assert (trained - before).abs().mean() > 0.05, "the additions do nothing: nothing was compared"
    torch.testing.assert_close(run, trained, rtol=0, atol=1e-4)


def test_training_pulls_the_student_to_its_teacher_and_touches_nothing_else(tiny_assets: Path):
    torch.manual_seed(0)
    teachers, experts, text = load_experts(tiny_assets), load_experts(tiny_assets), random_text(4)
    original = {name: {k: v.clone() for k, v in expert.state_dict().items()} for name, expert in experts.items()}
    adapters: dict[Expert, Adapter] = {name: Adapter(expert, 4) for name, expert in experts.items()}
    plan = student_plan()
    ring = ring_of(teachers, teacher_plan(8), text)
    ring.grow(4)
    before = distill.final_error(plan, experts, ring, text, 4)
    named: dict[str, nn.Module] = {f"lora_{name}": adapter for name, adapter in adapters.items()}
    trainer = Trainer(named, [path_losses(plan, experts, ring, text, 4)], peak_lr=5e-3, warmup=5)
    trainer.run(Clock(1, 15))
    after = distill.final_error(plan, experts, ring, text, 4)
    assert after < 0.7 * before  # 0.41 of it, and 0.27 after ten steps more
    with distill.averaged(trainer):
        assert all(torch.equal(p, p.bfloat16().float()) for p in trainer.parameters)
    assert distill.final_error(plan, experts, ring, text, 4) == after, "looking at the average changed the weights"
    for name, expert in experts.items():
        assert any(factors.up.abs().max() > 0 for factors in adapters[name].factors)
        for key, value in expert.state_dict().items():
            if ".parametrizations." not in key or key.endswith(".original"):
                plain = key.replace("parametrizations.", "").removesuffix(".original")
                assert torch.equal(value, original[name][plain]), key


def test_the_command_leaves_loras_and_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    few = [
        "--device",
        "cpu",
        "--size",
        "32",
        "--frames",
        "5",
        "--teacher-steps",
        "8",
        "--checks",
        "2",
        "--samples",
        "2",
    ]
    training = ["--steps", "2", "--batch", "2", "--bank", "4", "--start", "4", "--rank", "2", "--share", "0"]
    main(["--out", str(tmp_path), *few, *training])
    result = json.loads(next(tmp_path.glob("distilled-*.json")).read_text())
    assert [row["forwards"] for row in result["rows"]] == [16, 4, 8, 4]
    assert result["training"]["training_steps"] == 2 and result["training"]["pairs"] == 4
    assert all(0 <= row["all"] <= row["shape"] <= 1 for row in result["rows"])
    assert len(list(tmp_path.glob("*.png"))) == 2
    capsys.readouterr()
    main(["--out", str(tmp_path), *few, "--eval-only"])
    again = json.loads(next(tmp_path.glob("distilled-*.json")).read_text())
    assert [row["all"] for row in again["rows"]] == [row["all"] for row in result["rows"]]


@pytest.mark.gpu
def test_gradients_pass_the_blocks_on_a_gpu(tiny_assets: Path):
    """The fused kernels have none: training must go around them, in bf16 too."""
    experts = {name: expert.cuda() for name, expert in load_experts(tiny_assets).items()}
    adapters: dict[Expert, Adapter] = {name: Adapter(expert, 4) for name, expert in experts.items()}
    for expert in experts.values():
        run_in_bf16(expert, torch.device("cuda"), True)
    rollout(student_plan(), experts, random_text(2).cuda(), torch.randn(2, *SHAPE, device="cuda"))[
        -1
    ].square().mean().backward()
    for adapter in adapters.values():
        gradients = [factors.up.grad for factors in adapter.factors]
        assert all(g is not None and g.isfinite().all() and g.abs().max() > 0 for g in gradients)
