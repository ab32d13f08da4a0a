"""The commands of the README, the docs and the help pages of nodes, as a reader finds them, and which a test can run.

A command is a line of a block of code that is marked `bash`, with the lines it goes on in, or a code span in the text
that begins with a program. It has its own quotes and comments, so it is read by the rules of a shell.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "README.zh.md", "CONTRIBUTING.md")]
MODELS = ROOT / "docs/models.md"  # its tables name every file and release
PAGES += [page for folder in ("docs", "web/docs") for page in sorted((ROOT / folder).glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )?(?:\.venv/bin/)?python |wancore |make |pip |git |hf |pytest |torchrun |curl ")
DATED = re.compile(r"commit [0-9a-f]{7,}(, [0-9a-f]{7,})*: $")
OURS = re.compile(r"^(?:wancore|(?:\.venv/bin/)?python -m wan_core|python \S+/wan_core) (.+)$", re.DOTALL)
BENCHMARKS = re.compile(r"^(?:\.venv/bin/)?python -m (?:benchmarks|wan_core bench)(?: (.*))?$", re.DOTALL)


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    text: str
    block: bool  # of a block of code, not in the text
    dated: bool = False  # what a table was measured with, at the commit that stands before it

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def own(self) -> list[str] | None:
        """The arguments of our command line; None: another program's."""
        return shlex.split(command_match[1], comments=True) if (command_match := OURS.match(self.text)) else None


def fences(text: str) -> Iterator[tuple[str, str, int]]:
    """(language, contents, line of its first line) of each block of code."""
    for match in FENCE.finditer(text):
        yield match[1], match[2], text.count("\n", 0, match.start(2)) + 1


def commands() -> list[Command]:
    listed = []
    for page in PAGES:
        text, name = page.read_text(encoding="utf-8"), page.name
        for language, contents, line in fences(text):
            if language in ("bash", "sh"):
                listed += [Command(name, line + at, one, True) for at, one in logical_lines(contents)]
        plain = FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
        for match in SPAN.finditer(plain):
            if PROGRAM.match(one := " ".join(match[1].split())):
                dated = bool(DATED.search(plain[: match.start()][-40:]))
                listed.append(Command(name, plain.count("\n", 0, match.start()) + 1, one, False, dated))
    return listed


def option_spans(page: Path) -> list[str]:
    """Code spans of the text that begin with an option, each once."""
    plain = FENCE.sub("", page.read_text(encoding="utf-8"))
    return list(dict.fromkeys(" ".join(span.split()) for span in SPAN.findall(plain) if span.startswith("--")))


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, command): lines are joined as a shell does it, at a backslash, an open quote, a pipe
    or `&&`. Empty lines and comments are none."""
    whole, first = "", 0
    for number, line in enumerate(text.splitlines()):
        first = first if whole else number
        whole += line
        if whole.endswith("\\"):
            whole = whole[:-1]
        elif open_quote(whole) or whole.rstrip().endswith(("|", "&&")):
            whole += "\n"
        elif whole.strip() and not whole.strip().startswith("#"):
            yield first, whole.strip()
            whole = ""
        else:
            whole = ""
    assert not whole, f"a command that does not end: {whole}"


def open_quote(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        return True
    return False


# ------------------------------------------------------------------------------------------------------- which are run


class Rule(NamedTuple):
    reason: str
    pattern: re.Pattern[str]


# Commands that are not run, by the first rule that fits, and why. A command of ours that no rule names is run.
RULES = [
    Rule(reason, re.compile(pattern))
    for reason, pattern in (
        ("installs or downloads", r"^(pip|git|hf|python -m venv) "),
        ("sets up .venv, from the network", r"^make "),
        ("runs the tests themselves", r"^(\w+=\S+ )*(\.venv/bin/)?(python -m )?pytest"),
        (
            "needs a running ComfyUI (tests/nodes/test_documented_headless.py)",
            r"127\.0\.0\.1:8188|main\.py --listen|^python generate\.py",
        ),
        ("changes a workflow (tests/nodes/test_workflows.py)", r"^jq "),
        ("needs a cluster (tests/cluster)", r"--ray|^(\w+=\S+ )*ray |^export RAY_|^(kubectl|sky|sbatch|srun) "),
        ("wants files of full size (tests/cli/test_models.py)", r"^wancore models "),
        ("measures for minutes, most of it on a GPU", r"-m (benchmarks|wan_core bench)"),
        ("trains, searches for faults or makes files of the repository", r"python (-m )?tools[./]"),
        ("made a committed result, in minutes", r"--out benchmarks/results"),
        ("is a part of Python, or of this package that others start", r"python -m (compileall|wan_core\.workers)"),
    )
]
NEEDS_MODEL = ("generate", "warmup", "calibrate", "quality", "report-card")


def reason_not_run(command: Command) -> str | None:
    """Why a command is not run; None: it is. Raises LookupError for one that no rule covers."""
    rule = next((rule for rule in RULES if rule.pattern.search(command.text)), None)
    if rule is not None:
        return rule.reason
    arguments = command.own
    if arguments is None and (command.text.startswith("mkdir ") or BENCHMARKS.match(command.text)):
        return None
    if arguments is None:
        raise LookupError(f"{command.place}: neither a command of ours, nor one that a rule names: {command.text}")
    if not command.block and is_name(arguments):
        return "is only named, without what it needs"
    return None


def is_name(arguments: list[str]) -> bool:
    """Whether the text names a command, and does not say the whole of it."""
    if len(arguments) == 1 or re.fullmatch("[A-Z]+", arguments[0]):
        return arguments[0] not in ("doctor", "plan")
    if arguments[0] in NEEDS_MODEL and not {"--model", "--high"} & set(arguments):
        return True
    return arguments[0] == "quantize" and len(arguments) < 5


# -------------------------------------------------------------------------------------------------------- weights table

FOLDERS = {  # what is in the name of a file -> its folder in ComfyUI's models folder; the first that fits
    r"lora|lightx2v": "loras",
    r"^umt5": "text_encoders",
    r"_vae\.safetensors$": "vae",
    r"^clip_vision": "clip_vision",
    r"^wav2vec2": "audio_encoders",
    r"(?i)^wan": "diffusion_models",
}
WEIGHT_FILE = re.compile(r"\.(safetensors|gguf)$")


def weights_section(page: str) -> str:
    """The section on weights of docs/models.md, without its blocks of code."""
    section = re.search(r"\n\*\*1\. .*?(?=\n## )", page, re.DOTALL)
    assert section is not None
    return FENCE.sub("", section[0])


def weight_rows(section: str) -> list[list[str]]:
    """The files of each line that names some: the name of a second expert may be cut short, and a line may name models
    that have the same files."""
    rows = []
    for line in section.splitlines():
        names: list[str] = []
        for span in SPAN.findall(line):
            if span.startswith("...") and "low_noise" in span:
                names.append(names[-1].replace("high_noise", "low_noise"))
            elif WEIGHT_FILE.search(span):
                names.append(span.rpartition("/")[2])
        rows += [names] if names else []
        if alike := re.search(r"`(\w+)` and `(\w+)` in place of `(\w+)`", line):
            rows += [[name.replace(alike[3], other) for name in names] for other in (alike[1], alike[2])]
    return rows


def folder_of(name: str) -> str:
    """The folder of ComfyUI for a file. Raises LookupError for one of which nothing is known."""
    folder = next((folder for pattern, folder in FOLDERS.items() if re.search(pattern, name)), None)
    if folder is None:
        raise LookupError(f"no folder is known for {name}")
    return folder


def releases_of(section: str) -> list[str]:
    """The repositories of whole releases."""
    spans = (span for line in section.splitlines() if line.startswith("|") for span in SPAN.findall(line))
    return sorted({span for span in spans if span.startswith("Wan-AI/")})
