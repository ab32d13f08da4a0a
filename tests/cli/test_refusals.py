"""What the command line refuses: before any work, in one line that says what to do, with every file left as it was."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.__main__ import main as benchmarks
from wan_core.cli import build_parser, main
from wan_core.pipeline.sources import TINY

# Words of `generate --model tiny --prompt x --device cpu --out out.mp4`, which come last.
GENERATE = [
    ("--size 100x96", "multiples of 16"),
    ("--size 0x0", "multiples of 16"),
    ("--frames 16", "4n + 1"),
    ("--frames 0", "4n + 1"),
    ("--steps 0", "1 to 1000"),
    ("--seed -1", "0 to 2^64"),
    ("--boundary 900", "allowed are 0 to 1"),
    ("--guidance 3/2/1", "'3/2/1' given; write HIGH[/LOW] in numbers"),
    ("--clip-frames 33/5.5", "'33/5.5' given; write N[/OVERLAP] in whole numbers"),
    ("--memory-limit /", "'/' given; write GIB[/HOST] in numbers"),
    ("--attention flash9", "use one of: auto"),
    ("--attention sdpaa", "did you mean sdpa"),
    ("--attention int8", "'int8' cannot run on cpu"),
    ("--device meta", "not supported"),
    ("--device cuda:99", ": use c"),
    ("--model random:t2v-A14B --vae in.png", "leave out --vae"),
    ("--model random:t2v-99B", "use one of"),
    ("--model tinny", "did you mean tiny"),
    ("--model ComfyUI/models", "there is no folder ComfyUI/models"),
    ("--task i2v-A14B --high x.safetensors", "needs 36 input channels"),
    ("--last-image in.png --task t2v-tiny", "takes no image"),
    ("--high in.png", "a picture, a sound or a video"),
    ("--lora text.txt", "text.txt: a text, not a model"),
    ("--lora ''", "an empty name given for a LoRA"),
    ("--vae x.safetensors", "a Wan VAE is expected"),
    ("--vae TINY/vea.safetensors", "did you mean vae.safe"),
    ("--image missing.png", "missing.png"),
    ("--image text.txt --report out.json", "text.txt"),
    ("--lora gone.safetensors --report out.json", "gone.safetensors"),
    ("--frames 6 --save-latents out.safetensors", "4n + 1"),
    ("--report /nowhere/x.json", "cannot write /nowhere/x.json"),
    ("--save-latents /nowhere/x.safetensors", "cannot write /nowhere"),
    ("--out y.avi", ".mp4"),
    ("--out /nowhere/at/all/x.mp4", "Create the folder"),
    ("--out ''", "--out . is no name for a video"),
    ("--out ..", "--out .. is no name for a video"),
    ("--out /dev/null", "--out /dev/null is no name for a video"),
    ("--out y.mp4 --report y.mp4", "--out and --report both write y.mp4"),
    ("--save-latents y.png --report ./Y.png", "--save-latents and --report both write"),
    ("--image in.png --report in.png", "--report would replace in.png, which --image reads"),
    ("--image link.png --report in.png", "which --image reads"),
    ("--vae v.safetensors --save-latents v.safetensors", "which --vae reads"),
    ("--lora x.safetensors --save-latents x.safetensors", "which --lora reads"),
    ("--prompts list.jsonl --prompt x", "--prompt and --prompts given: leave one out"),
    ("--promt x", "did you mean --prompt?"),
    ("--size -5x5", "--size needs a value; --size=VALUE for one"),
    ("--seed abc", "argument --seed: 'abc' is neither a whole number nor random"),
    ("--frames 5.5", "argument --frames: '5.5' is no whole number"),
    ("--shift x", "argument --shift: 'x' is no number"),
    *(
        (f"{option} in.png {option} text.txt", f"{option}: one file is taken, and in.png and text.txt are given")
        for option in ("--reference", "--image", "--last-image", "--from-video")
    ),
]
COMMANDS = [
    ("genrate", "did you mean generate?"),
    ("generate", "nothing to do: give --prompt or --prompts"),
    ("generate --prompt x --guidence=3", "did you mean --guidance?"),
    ("generate --model tiny --prompts in.png --out o.mp4", "is no text in UTF-8: write one JSON object"),
    ("generate --prompt x --high x.safetensors", "no text encoder and no VAE given: add --text-encoder, --vae"),
    ("generate --prompt x --model empty", "no transformer and no text encoder and no VAE given or found in empty"),
    ("decode l.safetensors --vae v.safetensors --out l.safetensors", "ends in .mp4"),
    ("decode text.txt --model tiny --out out.mp4", "text.txt"),
    ("quantize x.safetensors x.safetensors", "the output would replace x.safetensors, which the source reads"),
    ("quantize x.safetensors hard.safetensors", "which the source reads"),
    ("quantize model model/a.safetensors", "which the source reads"),
    ("quantize x.safetensors model", "ends in .safetensors"),
    ("quantize x.safetensors nowhere/y.safetensors", "Create the folder"),
    ("quantize x.safetensors folder.safetensors", "a folder has that name"),
    ("quantize text.txt out.safetensors", "text.txt"),
    ("quantize x.safetensors out.safetensors --keep-blocks 99", "blocks"),
    ("calibrate --model tiny --size 5 --out c.json", "'5' is not a size; write WIDTHxHEIGHT"),
    ("calibrate --model tiny --count 1 --out out.json --samples gone", "gone"),
    ("calibrate --model tiny --count 1 --out out.json --size 65x48", "multiples of 16"),
    ("quality --model tiny --plot p.unknown --out c.json", "cannot write the picture p.unknown"),
    (f"quality --model tiny --size {'9' * 5000}x5", "is not a size"),
    ("quality --model tiny --video out.mp4 --out out.json --setting magcache:nothing", "nothing"),
    ("quality --model tiny --video out.mp4 --out out.json --batch 0", "batch"),
    ("plan --high text.txt", "text.txt"),
    ("plan --low text.txt", "text.txt"),
    ("plan --lora text.txt", "text.txt"),
    ("plan --lora x.safetensors", "x.safetensors: not a LoRA"),
    ("plan --high TINY/t2v_hgih.safetensors", "did you mean t2v_high"),
    ("plan --task t2v-A14", "did you mean t2v-A14B"),
    ("plan --solver unipk", "did you mean unipc?"),
    ("plan --frames 80", "The nearest is 81"),
    ("plan --size 832x480", "--size changes no step: add --memory"),
    ("plan --memory-limit 24", "--memory-limit changes no step: add --memory"),
    ("plan --memory --memory-limit 16/24", "a limit of host memory changes nothing"),
    ("plan --memory-limit /24", "a limit of host memory changes nothing"),
    ("plan --image in.png", "unknown: in.png (--image takes no value here)"),
    ("plan --frames 161 --clip-frames 81", "needs an image-to-video model"),
    ("plan --frames 161 --memory --seconds-per-forward 2", "--memory is of one clip"),
    ("plan --clip-frames /1", "give --clip-frames as well"),
    ("plan --frames 0", "at least 1"),
    ("plan --seconds-per-forward 0", "must be above 0"),
    ("inspect", "missing: file"),
    ("inspect TINYY", "did you mean tiny?"),
    ("doctor --jsn", "did you mean --json?"),
]
TABLE = [
    (f"generate --model tiny --prompt x --device cpu --out out.mp4 {arguments}", said) for arguments, said in GENERATE
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with inputs, and with outputs of earlier runs. No test may change it."""
    folder = tmp_path_factory.mktemp("place")
    Image.new("RGB", (64, 48)).save(folder / "in.png")
    for name in ("x", "v", "l", "model/a", "folder.safetensors/in"):
        path = folder / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        shutil.copy(TINY / ("vae.safetensors" if name == "v" else "t2v_high.safetensors"), path)
    os.symlink("in.png", folder / "link.png")
    os.link(folder / "x.safetensors", folder / "hard.safetensors")
    (folder / "empty").mkdir()
    for name in ("text.txt", *(f"out.{ending}" for ending in ("mp4", "png", "json", "safetensors"))):
        (folder / name).write_text("neither a model nor a picture")
    return folder


@pytest.fixture(scope="module")
def before(place: Path) -> dict[str, bytes]:
    return contents(place)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of a refused command: one line, and below those of argparse how it is used."""
    try:
        code, lines = main(arguments), 1
    except SystemExit as end:  # argparse's own
        code, lines = end.code, 2
    said = capsys.readouterr().err
    assert code == 2 and said.count("\n") == lines, said
    assert lines == 1 or re.search(r"\nusage: .*--help\n$", said), said
    return said


@pytest.mark.parametrize(("command", "says"), [*TABLE, *COMMANDS])
def test_refused_before_any_work(command: str, says: str, place: Path, before, capsys, monkeypatch) -> None:
    """Files of an earlier run stay as they are, and no new name is said for one."""
    monkeypatch.chdir(place)
    arguments = shlex.split(command.replace("TINY", str(TINY)))
    writes = arguments[0] in ("generate", "decode", "quantize", "calibrate", "quality") and "--prompts" not in arguments
    for more in ([], ["--overwrite"] if writes else []):
        said = refusal([*arguments, *more], capsys)
        assert says in said and " exists" not in said
    assert contents(place) == before


@pytest.mark.parametrize(
    "option",
    [
        *("--high", "--low", "--vae", "--text-encoder", "--tokenizer", "--clip-vision", "--lora", "--image"),
    ],
)
def test_a_file_that_is_not_there_is_the_first_complaint(option: str, capsys) -> None:
    """Whatever else is missing or wrong in the same command."""
    arguments = ["generate", "--prompt", "x", "--steps", "0", "--out", "nowhere/x.mp4"]
    said = refusal([*arguments, option, "nothere.safetensors"], capsys)
    assert f"generate: {option} nothere.safetensors does not exist" in said
    said = refusal([*arguments, option, "READMEE.md"], capsys)
    assert said.endswith("READMEE.md does not exist; did you mean README.md?\n")


def test_the_benchmarks_call_themselves_by_name(capsys) -> None:
    with pytest.raises(SystemExit):
        benchmarks(["--no-such-option"])
    assert "python -m benchmarks: error" in capsys.readouterr().err
    assert benchmarks(["attention", "--device", "cuda:99"]) == 2
    assert capsys.readouterr().err.startswith("python -m benchmarks: ")


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e999"])
def test_no_option_takes_a_number_that_is_none(number: str, capsys) -> None:
    """Every number of every command, and each number inside another option, is refused where it is not finite."""
    asked = 0
    for name, command in build_parser().commands.items():
        for option in (one.option_strings[-1] for one in command._actions if one.type is float):
            assert f"{option}: '{number}' is no number" in refusal([name, f"{option}={number}"], capsys)
            asked += 1
    assert asked > 15
    for option, whole in COMPOUND.items():
        parts = re.split("([/:-])", whole)
        for place in range(0, len(parts), 2):
            text = "".join([*parts[:place], number, *parts[place + 1 :]])
            with suppress(SystemExit):
                assert main(["plan", "--task", "t2v-A14B", f"{option}={text}"]) == 2, (option, text)
            assert 1 <= len(capsys.readouterr().err.splitlines()) <= 2, (option, text)


COMPOUND = {
    "--nag": "11/2.5/0.25", "--magcache": "0.1/2/0.2", "--taylorseer": "2/1/0.2",
    "--sparse": "0.5", "--guidance": "3/2", "--clip-frames": "81/5", "--memory-limit": "16/32",
}  # fmt: skip
