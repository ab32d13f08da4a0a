"""The shell commands of docs/headless.md, one after the other in a shell, against a real ComfyUI."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.comfyui import ComfyUI, find_comfyui, make_base
from tests.documented import ROOT, commands
from wan_core.media.video import read_video
from wan_lab.metrics import judge

pytestmark = [pytest.mark.comfy, pytest.mark.documented]

PORT = "127.0.0.1:8188"
COMMANDS = [one for one in commands() if one.page == "headless.md" and one.block and PORT in one.text]


@pytest.mark.skipif(not (shutil.which("jq") and shutil.which("curl")), reason="needs jq and curl")
def test_the_shell_commands_of_the_page_on_headless_use(tmp_path: Path) -> None:
    """But for the one that needs several GPUs."""
    (tmp_path / "workflows").symlink_to(ROOT / "workflows")
    server = ComfyUI(find_comfyui(), make_base(tmp_path / "comfyui"))
    said = {}
    try:
        for command in COMMANDS:
            if "multi_gpu" not in command.text:
                text = command.text.replace(PORT, f"127.0.0.1:{server.port}")
                shell = ["bash", "-o", "pipefail", "-c", text]
                ran = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=300)
                assert ran.returncode == 0, (command.place, ran.stdout[-500:], ran.stderr[-500:])
                said[command.text] = ran.stdout
    finally:
        server.stop()
    answers = [json.loads(out) for text, out in said.items() if text.endswith("answer.json")]
    assert len(answers) == 4 and not any(answer["node_errors"] for answer in answers)
    [refused] = [out for text, out in said.items() if "width = 100" in text]
    assert "100" in refused
    [saved] = [out for text, out in said.items() if "status_str" in text]
    videos = sorted(tmp_path.glob("*.mp4"))
    assert videos and sorted(saved.splitlines()) == [*(f"saved {video.name}" for video in videos), "success"]
    prompt = json.loads((ROOT / "workflows/api/text_to_video.json").read_text())["5"]["inputs"]["positive"]
    assert all(judge(torch.from_numpy(read_video(video)), prompt).all_true for video in videos)
