"""The doctor tests everything it reports as usable, finds broken libraries, and prints text and JSON."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from wan_core.cli import doctor, main
from wan_core.ops.attention.registry import BACKENDS
from wan_core.ops.kernels.formats import Quantized
from wan_core.ops.quant.fp8 import Fp8RowLinear
from wan_core.ops.quant.schemes import SCHEMES, Scheme

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SCHEMES)
def test_every_linear_is_as_exact_as_its_format_can_be(name: str) -> None:
    """For Transformer Engine's precisions: the same arithmetic, computed on a CPU."""
    error = doctor.linear_self_test(SCHEMES[name].linear, CPU)
    least = 0.005 if name == "int8" else 0.02
    assert least < error <= doctor.LINEAR, "less than this is not FP8, or not INT8"


class Loose(Fp8RowLinear):
    """Its scales waste the upper end of FP8, so that small numbers lose their bits."""

    def quantize(self, x: Tensor) -> Quantized:
        data, scale = super().quantize(x)
        return Quantized((data.float() / 2**15).to(data.dtype), scale * 2**15)


class Wrong(Fp8RowLinear):
    @classmethod
    def encode(cls, weight: Tensor) -> dict[str, Tensor]:
        values = super().encode(weight)
        return values | {"weight_scale": values["weight_scale"] * 1.05}


class Lost(Fp8RowLinear):
    def quantize(self, x: Tensor) -> Quantized:
        return Quantized(x.to(torch.float8_e4m3fn), torch.full((1,), float("nan")))


class Broken(Fp8RowLinear):
    def quantize(self, x: Tensor) -> Quantized:
        raise RuntimeError("no such kernel\nand much more")


@pytest.mark.parametrize(
    ("kind", "why_not"),
    [(Loose, "relative error"), (Wrong, "relative error"), (Lost, "relative error nan"), (Broken, "no such kernel")],
)
def test_a_precision_that_fails_its_test_is_not_usable(
    monkeypatch: pytest.MonkeyPatch, kind: type[Fp8RowLinear], why_not: str
) -> None:
    monkeypatch.setitem(SCHEMES, "fp8", Scheme("fp8", "broken", lambda device: None, kind))
    report = doctor.examine("cpu")
    assert not report["precisions"]["fp8"]["usable"]
    assert why_not in report["precisions"]["fp8"]["why_not"] and "\n" not in report["precisions"]["fp8"]["why_not"]
    assert "  fp8                    not usable: self-test failed" in doctor.text(report)
    assert report["precisions"]["fp8-tensor"]["usable"], "the others are still tested"


def test_text_and_json_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--device", "cpu"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert report["attention"]["sdpa"]["error"] < 1e-5 and "GPU" in report["attention"]["cudnn"]["why_not"]
    assert list(report["precisions"]) == list(SCHEMES) and list(report["attention"]) == list(BACKENDS)
    attention, precisions = text[text.index("attention backends") :].split("precisions\n")
    for section, parts in ((attention, report["attention"]), (precisions, report["precisions"])):
        lines = {line.split()[0]: line for line in section.splitlines()}
        for name, part in parts.items():
            good, bad = f"usable, self-test error {part.get('error', 0):.1e}", f"not usable: {part['why_not']}"
            state = good if part["usable"] else bad
            assert state in lines[name] and part["summary"] in lines[name]
    native = [name for name in SCHEMES if not name.startswith("te-")]
    assert [name for name, part in report["precisions"].items() if part["usable"]] == native
    assert "NVIDIA GPU" in report["precisions"]["te-current"]["why_not"]
    assert report["kernels"] == {"usable": False, "why_not": "needs an NVIDIA GPU"}
    assert "fused kernels" in text
    assert all(version["for"] in text for version in report["libraries"].values())
