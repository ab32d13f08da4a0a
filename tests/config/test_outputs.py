"""Outputs: apart from inputs and from each other, claimed, whole or not there, and cleared of what dead runs left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from wan_core.config import OptionError, owners
from wan_core.config.outputs import Outputs, numbered, remove_left_over, write_text, written_beside


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def ended_process() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_input_is_no_output(tmp_path: Path, link: object, overwrite: bool) -> None:
    read, written = tmp_path / "in.png", tmp_path / ("in.png" if link is None else "other.png")
    read.write_text("picture")
    if callable(link):
        link(read, written)
    with (
        Outputs({"--image": read}, overwrite=overwrite) as outputs,
        pytest.raises(OptionError, match=r"--report would replace .*in\.png, which --image reads"),
    ):
        outputs.add("--report", written)
    assert read.read_text() == "picture"


def test_files_of_a_folder_and_shards_of_an_index_are_inputs(tmp_path: Path) -> None:
    (tmp_path / "model" / "vae").mkdir(parents=True)
    for name in ("model/vae/a.safetensors", "model/x-00001-of-00002.safetensors", "model/x.safetensors.index.json"):
        (tmp_path / name).write_text("weights")
    for source in ("model", "model/x.safetensors.index.json"):
        with (
            Outputs({"source": tmp_path / source}, overwrite=True) as outputs,
            pytest.raises(OptionError, match="reads"),
        ):
            outputs.add("out", tmp_path / "model/x-00001-of-00002.safetensors")
    with Outputs({"--model": tmp_path / "model"}, overwrite=True) as outputs:
        with pytest.raises(OptionError, match=r"vae/a\.safetensors, which --model reads"):
            outputs.add("--save-latents", tmp_path / "model/vae/a.safetensors")
        outputs.add("--out", tmp_path / "model/new.mp4")  # a new file there destroys nothing


@pytest.mark.parametrize("second", ["y", "Y", "sub/../y", "link/y"])
def test_two_outputs_are_two_files(tmp_path: Path, second: str) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    with Outputs({}) as outputs:
        outputs.add("--out", tmp_path / "y")
        with pytest.raises(OptionError, match="--out and --report both write"):
            outputs.add("--report", tmp_path / second)
    assert names(tmp_path) == ["link", "sub"]


def test_existing_outputs_get_a_number(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "x.mp4").write_text("first")
    (tmp_path / "x-1.mp4").symlink_to(tmp_path / "nowhere")
    with Outputs({}, tell=said.append) as outputs:
        assert outputs.add("--out", tmp_path / "x.mp4") == tmp_path / "x-2.mp4"
        assert not said
        outputs.say_renamed()
        assert len(said) == 1
    assert "x.mp4 exists" in said[0] and "x-2.mp4" in said[0] and "--overwrite" in said[0]
    with Outputs({}, overwrite=True, tell=said.append) as outputs:
        assert outputs.add("--out", tmp_path / "x.mp4") == tmp_path / "x.mp4"
    assert len(said) == 1
    names = [path.name for path, _ in zip(numbered(Path("v.1.latents.safetensors")), range(2), strict=False)]
    assert names == ["v.1.latents.safetensors", "v.1-1.latents.safetensors"]
    assert next(path for path in numbered(Path("no ending")) if path.name != "no ending").name == "no ending-1"


def test_a_new_name_is_said_at_the_end_at_the_latest_and_not_after_an_error(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "x.mp4").write_text("first")
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(OptionError))
        stack.enter_context(Outputs({}, tell=said.append)).add("--out", tmp_path / "x.mp4")
        raise OptionError("a bad option")
    assert not said
    with Outputs({}, tell=said.append) as outputs:
        outputs.add("--out", tmp_path / "x.mp4")
    assert len(said) == 1


def test_two_processes_and_one_that_is_killed(tmp_path: Path) -> None:
    """The claim of a process that runs counts; that of one that was killed does not, and goes."""
    program = (
        "import sys; from pathlib import Path; from wan_core.config.outputs import Outputs, written_beside\n"
        f"with Outputs({{}}) as outputs, written_beside(outputs.add('--out', Path({str(tmp_path / 'x.mp4')!r}))):\n"
        "    print('claimed', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"claimed\n"
    with Outputs({}) as outputs:
        assert outputs.add("--out", tmp_path / "x.mp4").name == "x-1.mp4"
    with Outputs({}, overwrite=True) as outputs, pytest.raises(OptionError, match="another run is writing it"):
        outputs.add("--out", tmp_path / "x.mp4")
    assert len(names(tmp_path)) == 2
    process.kill()
    process.communicate()
    assert len(names(tmp_path)) == 2  # what it left
    with Outputs({}) as outputs:
        assert outputs.add("--out", tmp_path / "x.mp4").name == "x.mp4"
    assert not names(tmp_path)


def test_left_over_files_go_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, parent = owners._machine(), owners._run_of(os.getppid())
    stay = [
        f".a.{owners.owner_text()}-0000.part",  # of this process
        f".b.{machine}-{os.getppid()}-{parent or '00000000'}-0000.part",  # of one that runs
        f".c.00000000-{ended_process()}-00000000-0000.part",  # of another machine
        f".d.{machine}-99999999999999999999999-00000000-0000.part",  # of no process that can be
        "e.part", ".f.part", ".g.12.partial",  # of other programs
    ]  # fmt: skip
    go = [
        f".h.{machine}-{ended_process()}-00000000-0000.part",
        f".i\n.{machine}-{os.getpid()}-00000000-0000.part",  # of an earlier process that had this number
        *[f".k.{machine}-{os.getppid()}-00000000-0000.part"] * (parent is not None),  # and one that has it now
    ]
    for name in (*stay, *go):
        (tmp_path / name).write_text("")
    folder = tmp_path / f".j.{machine}-{ended_process()}-00000000-0000.part"
    folder.mkdir()  # of pictures that were not finished
    (folder / "00001.png").touch()
    write_text(tmp_path / "new.json", "{}")
    assert names(tmp_path) == sorted([*stay, "new.json"])
    monkeypatch.setattr(owners.socket, "gethostname", lambda: "elsewhere")
    owners._machine.cache_clear()
    (tmp_path / go[0]).write_text("")
    remove_left_over(tmp_path)
    assert (tmp_path / go[0]).exists()  # the process may run on the host that shares this folder
    owners._machine.cache_clear()


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    write_text(path, "old")
    with contextlib.suppress(RuntimeError), written_beside(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and names(tmp_path) == ["r.json"]
    with pytest.raises(OSError, match="No such file"):
        write_text(tmp_path / "missing" / "r.json", "")


def test_devices_and_pipes_are_written_as_they_are(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    with Outputs({}) as outputs:
        assert outputs.add("--report", Path("/dev/stdout")) == Path("/dev/stdout")
        write_text(outputs.add("--latents", pipe), "text")
    reader.join()
    assert read == ["text"] and names(tmp_path) == ["pipe"] and write_text("/dev/null", "x").is_char_device()
