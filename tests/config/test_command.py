"""The command that messages advise runs where the user is."""

import subprocess
from pathlib import Path

import pytest

from wan_core.config.printing import PACKAGE, command


def test_the_command_of_a_program_that_is_not_ours_works_in_every_folder(tmp_path: Path, monkeypatch) -> None:
    """In ComfyUI `main.py` runs, the package is in no path, and the shell may stand in any folder."""
    monkeypatch.setattr("sys.argv", ["main.py", "--cpu"])
    line = command("plan", "--task", "t2v-tiny", "--preset", "4-step")
    ran = subprocess.run(line, shell=True, check=True, cwd=tmp_path, capture_output=True, text=True)
    assert "4 steps" in ran.stdout
    ran = subprocess.run(f"{command('plan')} --task x", shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert ran.stderr.startswith(f"python {PACKAGE} plan: task 'x' is not known")


@pytest.mark.parametrize("on_path", [True, False])
def test_the_installed_program_is_named_as_it_was_called(on_path: bool, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/wancore", "plan"])
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}" if on_path else None)
    assert command("doctor") == ("wancore doctor" if on_path else ".venv/bin/wancore doctor")


@pytest.mark.parametrize("on_path", [True, False])
def test_the_module_is_named_with_the_python_that_ran_it(on_path: bool, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", [str(PACKAGE / "__main__.py"), "plan"])
    monkeypatch.setattr("sys.executable", "/opt/python")
    monkeypatch.setattr("shutil.which", lambda name: f"{'/opt' if on_path else '/usr/bin'}/{name}")
    assert command("doctor") == f"{'python' if on_path else '/opt/python'} -m wan_core doctor"
