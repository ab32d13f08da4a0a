"""`wancore models`: which files a task needs, which are there, and a download that replaces nothing."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from wan_core.cli import main, models
from wan_core.config import OptionError
from wan_core.config.model_files import (
    TRANSFORMERS,
    choices,
    download_hint,
    files_for,
    model_files,
    tasks,
)
from wan_core.models.wan.families import TASKS

SMALL = [dataclasses.replace(file, gb=1e-8) for file in files_for("t2v-A14B")]  # 10 bytes each


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in ("diffusion_models", "text_encoders", "vae", "loras"):
        (tmp_path / "models" / folder).mkdir(parents=True)
    return tmp_path / "models"


class Hub:
    """Stands for `hf_hub_download`."""

    def __init__(self, content: bytes = b"0123456789") -> None:
        self.content, self.asked = content, []

    def __call__(self, repo_id: str, filename: str, local_dir: Path) -> str:
        self.asked.append(f"{repo_id}/{filename}")
        path = local_dir / filename
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.content)
        return str(path)


def test_the_table_knows_only_tasks_of_the_engine_and_each_has_what_it_needs() -> None:
    assert set(tasks()) <= set(TASKS) and len({file.name for file in model_files()}) == len(model_files())
    for task in tasks():
        for chosen in ([], choices(task)):
            parts = {file.part for file in files_for(task, chosen)}
            assert {"high", "text_encoder", "vae"} <= parts and ("low" in parts) == TASKS[task].two_experts, task
            assert ("clip_vision" in parts) == (TASKS[task].image_dim is not None), task
    for file in model_files():
        assert file.path.endswith(file.name) and file.address.count("://") == 1, file
        assert file.choice is None or file.gb > 0


def test_words_take_other_files_in_place_of_the_plain_ones() -> None:
    plain = {file.part: file.name for file in files_for("i2v-A14B")}
    other = {file.part: file.name for file in files_for("i2v-A14B", ["gguf", "four-steps"])}
    assert set(other) - set(plain) == {"lora_high", "lora_low"} and other["vae"] == plain["vae"]
    assert all(other[part].endswith(".gguf") for part in ("high", "low", "text_encoder"))


def test_what_is_missing_is_said_with_address_and_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "vae" / "mine").mkdir()
    (root / "vae" / "mine" / "wan_2.1_vae.safetensors").write_bytes(b"cut")
    assert main(["models", "t2v-A14B", "--folder", str(root.parent)]) == 1
    said = capsys.readouterr().out
    assert "not whole   vae/mine/wan_2.1_vae.safetensors" in said and "unfinished download?" in said
    assert "34.7 GB missing" in said and "models t2v-A14B --folder" in said
    assert "resolve/main/split_files/text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors\n    into text_enc" in said
    assert main(["models", "--folder", str(root)]) == 1
    assert "i2v-A14B                 0 of 4 files" in capsys.readouterr().out
    assert main(["models", "t2v-A14B", "--json", "--folder", str(root)]) == 1
    assert {one["whole"] for one in json.loads(capsys.readouterr().out)} == {False}


def test_a_download_puts_whole_files_into_their_folders(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub()
    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    old = root / "unet" / SMALL[0].name  # the old name of a folder counts
    old.parent.mkdir()
    old.write_bytes(b"mine")
    models.download_missing(root, SMALL)
    assert old.parent.name in TRANSFORMERS and old.read_bytes() == b"mine"
    assert len(hub.asked) == 3 and not (root / models.UNFINISHED).exists()
    assert all((root / file.folder / file.name).read_bytes() == hub.content for file in SMALL[1:])
    models.download_missing(root, SMALL)
    assert len(hub.asked) == 3


def test_unfinished_downloads_of_other_files_stay(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One was broken off, or another process makes it at the same time."""
    monkeypatch.setattr("huggingface_hub.hf_hub_download", Hub())
    notes = root / models.UNFINISHED / ".cache" / "huggingface"
    other = notes / "download" / "split_files" / "x.0123.incomplete"
    for path in (other, notes / "CACHEDIR.TAG", notes / ".gitignore", other.with_name("x.lock")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"13 of 14 GB")
    models.download_missing(root, SMALL[:1])
    assert other.read_bytes() == b"13 of 14 GB"
    other.unlink()
    models.download_missing(root, SMALL)
    assert not (root / models.UNFINISHED).exists()


def test_a_part_of_a_file_is_not_left_as_a_whole_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", Hub(b"0123"))
    with pytest.raises(OptionError, match="has 4 bytes"):
        models.download_missing(root, SMALL)

    def broken(**_: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", broken)
    with pytest.raises(OSError, match="no route"):
        models.download_missing(root, SMALL)
    assert not list((root / "diffusion_models").iterdir())


def test_messages_about_a_missing_file_name_the_command(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "models i2v-A14B --with four-steps --download" in download_hint(
        "x/wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors"
    )
    assert download_hint("mine.safetensors") == ""
    generate = ["generate", "--prompt", "x", "--device", "cpu"]
    assert main([*generate, "--high", "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors"]) == 2
    assert "models t2v-A14B --download` downloads it" in capsys.readouterr().err
    assert main([*generate, "--model", str(root), "--task", "i2v-A14B"]) == 2
    assert "models i2v-A14B` lists its files" in capsys.readouterr().err


def test_the_pages_name_the_files_of_the_table() -> None:
    """A file that the pages offer by name and repository is in the table, and the README's links are its addresses."""
    root = Path(__file__).resolve().parents[2]
    pages = [root / "README.md", root / "README.zh.md", *(root / "docs").glob("models.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    addresses = {file.address for file in model_files()}
    assert set(re.findall(r"https://huggingface\.co/[^\s)]+\.(?:safetensors|gguf)", text)) <= addresses
    named = set(re.findall(r"`(?:\w+/)*(wan[\w.-]+\.safetensors|umt5[\w.-]+\.(?:safetensors|gguf))`", text))
    assert named and named <= {file.name for file in model_files()}
