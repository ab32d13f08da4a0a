"""inspect: what it reports about files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from wan_core.checkpoint import load_dit, save
from wan_core.checkpoint.save import write_safetensors
from wan_core.cli import main
from wan_core.cli.inspect import inspect
from wan_core.pipeline.settings import find_quantization
from wan_core.pipeline.sources import TINY


def test_models() -> None:
    dit, text, vae = (inspect(TINY / f"{name}.safetensors") for name in ("i2v_low", "text_encoder", "vae"))
    assert (dit["kind"], dit["layout"], dit["family"]) == ("a Wan transformer", "official", "the embedded model")
    assert dit["shape"] | {"in_channels": 36, "dim": 96} == dit["shape"] and dit["precision"] == {"float16": 1.0}
    assert dit["expert"].startswith("low") and not dit["problems"]
    assert text["family"] == "UMT5" and vae["family"] == "Wan 2.1 VAE"
    assert dit["parameters"] == sum(p.numel() for p in load_dit(TINY / "i2v_low.safetensors").parameters())


def test_scaled_fp8_and_pth(tmp_path: Path) -> None:
    quantization = find_quantization("fp8", torch.device("cpu"))
    save(
        load_dit(TINY / "t2v_high.safetensors", dtype=torch.bfloat16, quantization=quantization),
        tmp_path / "x.safetensors",
    )
    report = inspect(tmp_path / "x.safetensors")
    assert report["scaled"] == "80 FP8 matrices with scales" and report["precision"]["fp8"] > 0.7
    assert report["family"].startswith("Wan 2.2 t2v-A14B")  # by its channels: it is no longer among the embedded files
    torch.save(load_dit(TINY / "t2v_high.safetensors").state_dict(), tmp_path / "x.pth")
    assert inspect(tmp_path / "x.pth")["kind"] == "a Wan transformer"


@pytest.mark.parametrize(("dim", "family"), [(5120, "A14B"), (3072, "TI2V-5B"), (1536, "1.3B"), (128, "embedded")])
def test_loras(tmp_path: Path, dim: int, family: str) -> None:
    down, up = torch.zeros(8, dim, dtype=torch.bfloat16), torch.zeros(dim, 8, dtype=torch.bfloat16)
    state = {
        f"lora_unet_blocks_{n}_self_attn_{p}.{r}.weight": t
        for n in range(3)
        for p in "qk"
        for r, t in (("lora_down", down), ("lora_up", up))
    }
    write_safetensors(
        {**state, "odd.tensor": torch.zeros(1)}, tmp_path / "my_4steps_HIGH.safetensors", {"ss_steps": "1200"}
    )
    report = inspect(tmp_path / "my_4steps_HIGH.safetensors")
    assert family in report["family"] and report["rank"] == [8] and report["blocks"] == 3
    assert report["targets"] == {"self_attn.q": 3, "self_attn.k": 3} and report["changes"] == {"LoRA": 6}
    assert report["layout"] == "lora_unet_, lora_down/lora_up"
    assert report["expert"].startswith("high") and report["distilled"] == "for 4 steps"
    assert report["problems"] == ["1 tensors of no known form: odd.tensor"]


def test_a_lora_of_both_experts(tmp_path: Path) -> None:
    down, up = torch.zeros(8, 5120), torch.zeros(5120, 8)
    state = {
        f"{prefix}.blocks.{n}.attn1.to_q.lora_{r}.weight": t
        for n, prefix in enumerate(("transformer", "transformer_2"))
        for r, t in (("A", down), ("B", up))
    }
    write_safetensors(state, tmp_path / "both.safetensors", {})
    report = inspect(tmp_path / "both.safetensors")
    assert report["experts"] == ["high", "low"] and not report["problems"]
    assert "A14B" in report["family"] and report["changes"] == {"LoRA": 2} and report["blocks"] == 2


def test_problems(tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes((TINY / "t2v_high.safetensors").read_bytes()[:5000])
    assert "truncated" in inspect(tmp_path / "cut.safetensors")["problems"][0]
    write_safetensors({"x": torch.zeros(2)}, tmp_path / "other.safetensors", {})
    assert "not a Wan 2.2 model" in inspect(tmp_path / "other.safetensors")["problems"][0]
    write_safetensors({"a.lora_up.weight": torch.zeros(2, 2)}, tmp_path / "lora.safetensors", {})
    assert "fits no known model" in inspect(tmp_path / "lora.safetensors")["problems"][0]


@pytest.mark.parametrize(
    ("parts", "advice"),
    [
        (("vae", "text_encoder"), "add --high"),
        (("vae", "high_noise_model"), "add --text-encoder"),
        (("vae", "text_encoder", "high_noise_model"), "give both --high and --low"),
    ],
)
def test_options_that_it_advises_are_those_of_generate(tmp_path: Path, parts: tuple[str, ...], advice: str) -> None:
    names = {"vae": "Wan2.1_VAE.pth", "text_encoder": "models_t5_umt5-xxl-enc-bf16.pth", "high_noise_model": "x.pth"}
    for part in parts:
        folder = tmp_path / part if part == "high_noise_model" else tmp_path
        folder.mkdir(exist_ok=True)
        (folder / names[part]).symlink_to(TINY / f"{'t2v_high' if folder != tmp_path else part}.safetensors")
    [problem] = inspect(tmp_path)["problems"]
    command, _, fault = problem.partition(": ")
    assert advice in fault and command.endswith(f" generate --model {tmp_path}"), problem


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(TINY / "t2v_high.safetensors")]) == 0
    assert "family: the embedded model" in capsys.readouterr().out
    assert main(["inspect", "--json", str(TINY / "t2v_high.safetensors")]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "a Wan transformer"
    (tmp_path / "x.safetensors").write_bytes(b"")
    assert main(["inspect", str(tmp_path / "x.safetensors")]) == 1
    assert "problem:" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "absent")]) == 2
