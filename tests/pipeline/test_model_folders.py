"""--model on a release, on ComfyUI's models folder, and on names that are no folder; what `inspect` says of each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from wan_core.cli import main
from wan_core.cli.inspect import inspect
from wan_core.config import LoadOptions, OptionError
from wan_core.pipeline.memory_planning import check_host
from wan_core.pipeline.model_folders import RELEASES, no_folder, vae_in
from wan_core.pipeline.settings import resolve_settings
from wan_core.pipeline.sources import TINY, find_models

NAMES = {  # as Comfy-Org calls them -> files of the embedded model
    "diffusion_models/wan2.2_t2v_high_noise_14B_fp8_scaled": "t2v_high",
    "diffusion_models/wan2.2_t2v_low_noise_14B_fp8_scaled": "t2v_low",
    "unet/sub/wan2.2_i2v_high_noise_14B_fp16": "i2v_high",
    "unet/sub/wan2.2_i2v_low_noise_14B_fp16": "i2v_low",
    "text_encoders/umt5_xxl_fp8_e4m3fn_scaled": "text_encoder",
    "vae/wan_2.1_vae": "vae",
}


def put(root: Path, names: dict[str, str] = NAMES) -> Path:
    for name, source in names.items():
        path = root / f"{name}.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TINY / f"{source}.safetensors", path)
    (root / "vae/ae.safetensors").write_bytes(b"of another model")
    return root


@pytest.mark.parametrize("below", [".", "models", "split_files"])
@pytest.mark.parametrize("task", ["t2v-A14B", "i2v-A14B"])
def test_a_models_folder(task: str, below: str, tmp_path: Path) -> None:
    root = put(tmp_path / below)
    parts = find_models(LoadOptions(model=str(tmp_path), task=task))
    paths = {name: str(part.path.relative_to(root)) for name, part in parts.of.items() if part.path is not None}
    kinds = {"t": "diffusion_models/wan2.2_t2v_{}_noise_14B_fp8_scaled", "i": "unet/sub/wan2.2_i2v_{}_noise_14B_fp16"}
    kind = kinds[task[0]]
    assert parts.task.name == task and paths == {
        "high": f"{kind.format('high')}.safetensors",
        "low": f"{kind.format('low')}.safetensors",
        "text_encoder": "text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors",
        "vae": "vae/wan_2.1_vae.safetensors",
    }


def test_several_models_are_named_and_never_guessed(tmp_path: Path) -> None:
    root = put(tmp_path)
    with pytest.raises(OptionError, match=r"2 models are in .*[ti]2v-A14B.*; [ti]2v-A14B.*Choose by --task"):
        find_models(LoadOptions(model=str(root)))
    for expert in ("high", "low"):  # of the same task: --task does not choose
        of = root / f"diffusion_models/wan2.2_fun_inpaint_{expert}_noise_14B.safetensors"
        shutil.copy(TINY / f"i2v_{expert}.safetensors", of)
    with pytest.raises(OptionError, match=r"2 models are in .*fun_inpaint.*\. Choose by --high and --low"):
        find_models(LoadOptions(model=str(root), task="i2v-A14B"))
    for path in root.glob("diffusion_models/*inpaint*"):
        path.unlink()
    (root / "unet/sub/wan2.2_i2v_low_noise_14B_fp16.safetensors").unlink()
    with pytest.raises(OptionError, match=r"no whole transformer for i2v-A14B.*There are t2v-A14B.*lacks the other"):
        find_models(LoadOptions(model=str(root), task="i2v-A14B"))
    assert find_models(LoadOptions(model=str(root))).task.name == "t2v-A14B"  # the only whole one


def test_what_is_named_wins_and_the_largest_file_of_a_kind_is_taken(tmp_path: Path) -> None:
    root = put(tmp_path)
    larger = root / "text_encoders/umt5_xxl_fp16.safetensors"
    data = (root / "text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    larger.write_bytes((length + 64).to_bytes(8, "little") + data[8 : 8 + length] + b" " * 64 + data[8 + length :])
    assert find_models(LoadOptions(model=str(root), task="t2v-A14B")).of["text_encoder"].path == larger
    named = LoadOptions(model=str(root), task="t2v-A14B", vae=str(TINY / "vae.safetensors"))
    assert find_models(named).of["vae"].path == TINY / "vae.safetensors"
    assert vae_in(str(root), 16) == root / "vae/wan_2.1_vae.safetensors" and vae_in(str(root), 48) is None


@pytest.mark.parametrize("name", RELEASES)
def test_repositories_are_never_downloaded(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = name.partition("/")[2]
    for spelling in (name, folder, name.lower()):
        said = str(no_folder(spelling))
        assert f"`hf download {name} --local-dir {folder}`" in said and f"give --model {folder}" in said
    (tmp_path / folder).mkdir()
    assert f"but {folder} is: give --model {folder}" in str(no_folder(name))


def test_inspect_and_plan_of_folders(tmp_path: Path, capsys) -> None:
    models = put(tmp_path / "models")
    report = inspect(models)
    assert len(report["parts"]) == 7 and report["problems"] == [] and len(report["models"]) == 2
    release = {f"{name}_noise_model": f"t2v_{name}" for name in ("high", "low")} | {"text_encoder": "text_encoder"}
    for name, source in release.items():
        (tmp_path / "release").mkdir(exist_ok=True)
        shutil.copy(TINY / f"{source}.safetensors", tmp_path / "release" / f"{name}.safetensors")
    assert main(["inspect", str(tmp_path / "release")]) == 1  # without a VAE
    assert f"generate --model {tmp_path / 'release'}: no VAE given or found" in capsys.readouterr().out
    shutil.copy(TINY / "vae.safetensors", tmp_path / "release" / "vae.safetensors")
    assert main(["inspect", str(tmp_path / "release")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("high: Wan 2.2 t2v-A14B") and lines[-1] == "models: t2v-A14B"
    for model, task in ((tmp_path / "release", "t2v-A14B"), ("tiny", "t2v-tiny"), ("random:ti2v-5B", "ti2v-5B")):
        assert main(["plan", "--model", str(model), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["task"] == task
    assert main(["plan", "--model", str(models), "--task", "i2v-A14B"]) == 0
    options = LoadOptions(model=str(models), task="i2v-A14B")
    assert find_models(options, transformers_only=True).of.keys() == {"high", "low"}
    assert main(["plan", "--model", str(tmp_path / "release"), "--memory", "--memory-limit", "24", "--json"]) == 0


def test_host_memory_is_checked_on_a_cpu(capsys) -> None:
    import torch

    options = LoadOptions(model="tiny", precision="fp32", device="cpu")
    parts = resolve_settings(find_models(options), options, torch.device("cpu")).parts
    needed = sum(part.bytes for part in parts.values())
    check_host(parts, needed)
    check_host(parts, None)
    with pytest.raises(OptionError, match="on a CPU these models take"):
        check_host(parts, needed - 1)
    arguments = ["generate", "--model", "tiny", "--device", "cpu", "--prompt", "x", "--memory-limit", "/0.001"]
    assert main(arguments) == 2
    assert "GiB of host memory" in capsys.readouterr().err
