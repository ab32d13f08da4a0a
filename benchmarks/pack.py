"""`python -m benchmarks pack`: what the ladder needs on a GPU machine without a package registry, as files to copy.

    python -m benchmarks pack --out packs --comfyui ~/comfy/ComfyUI --te te_torch.so.xz --test python3.12
    source packs/unpack.sh base flash te comfyui       # there, from whatever shell runs the ladder

NAME.tar.xz.00, .01 ...  the group NAME (GROUPS) in parts of `--part` MB, for Python 3.12 and torch 2.11 (CUDA 13.0) on
                         Linux x86-64. Parts that come one after the other wait in /tmp/wancore/parts for the rest
unpack.sh                unpacks groups under /tmp/wancore, and sets PYTHONPATH, COMFYUI_PATH and COMFYUI_PYTHON

Every wheel is named with its version, one for each project; what the machine has itself (HAD) is not packed. Device
code for other GPUs than `--arch` is blanked, so that it packs to nothing. Group `comfyui` has the checkout's sources
too, without nodes of paid services, blueprints, tests and the page. transformer-engine has no wheel of its extension
for torch: `--te` is one that was compiled for that Python and torch. `--test` unpacks everything into a new folder and
imports it with an interpreter that has HAD and nothing else. `--wheels` keeps downloads for the next time.
"""

from __future__ import annotations

import argparse
import lzma
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

from benchmarks.fatbin import blank_other_gpus
from wan_core.config import OptionError

TE = "2.20.2"
GROUPS: dict[str, tuple[str, ...]] = {
    "base": (
        "nvidia-cudnn-frontend==1.32.0", "gguf==0.19.0", "av==19.0.2", "sentencepiece==0.2.3",
        "pydantic==2.14.3", "pydantic-core==2.50.4", "annotated-types==0.8.0", "typing-inspection==0.4.5",
    ),
    "flash": (
        "flash-attn-4==4.0.0b36", "nvidia-cutlass-dsl==4.8.1", "nvidia-cutlass-dsl-libs-core==4.8.1",
        "nvidia-cutlass-dsl-libs-base==4.8.1", "nvidia-cutlass-dsl-libs-cu13==4.8.1", "quack-kernels==0.6.5",
        "apache-tvm-ffi==0.1.15.post2", "torch-c-dlpack-ext==0.1.5",
    ),
    "te": (
        f"transformer-engine=={TE}", f"transformer-engine-cu13=={TE}", "nvdlfw-inspect==0.2.2",
        "importlib-metadata==10.2.0",
    ),
    "comfyui": (
        "alembic==1.20.1", "blake3==1.0.11", "comfy-aimdo==0.4.13", "comfy-kitchen==0.2.31", "greenlet==3.5.6",
        "kornia==0.9.0", "kornia-rs==0.2.0", "mako==1.4.3", "pydantic-settings==2.16.3", "python-dotenv==1.2.4",
        "simpleeval==1.0.8", "sqlalchemy==2.1.9", "torchsde==0.2.6", "trampoline==0.1.2",
    ),
    "peers": ("diffusers==0.42.1",),
}  # fmt: skip
IMPORTS = {
    "base": ("cudnn", "gguf", "av", "sentencepiece"),
    "flash": ("flash_attn.cute",),
    "te": ("transformer_engine.pytorch",),
    "comfyui": ("alembic", "comfy_kitchen", "comfy_aimdo", "torchsde", "kornia", "sqlalchemy", "simpleeval"),
    "peers": ("diffusers",),
}
# Projects that the machine has. What is not here and in no group is missing there.
THERE = """
absl-py accelerate aiohappyeyeballs aiohttp aiosignal attrs certifi charset-normalizer click cuda-bindings cuda-core
cuda-pathfinder einops execnet filelock frozenlist fsspec h11 httpx huggingface-hub hypothesis idna iniconfig jinja2
markupsafe ml-dtypes multidict networkx numpy onnx onnxscript packaging pandas pillow pluggy propcache protobuf psutil
pygments pytest pytest-timeout pytest-xdist pyyaml regex requests safetensors scipy setuptools
sortedcontainers sympy tokenizers torch torchaudio torchvision tqdm transformers triton typing-extensions urllib3 yarl
"""
HAD = frozenset(THERE.split())
# Of ComfyUI's requirements: the page is not used, and a few core nodes say that they lack the others.
PAGE = ("comfyui-frontend-package", "comfyui-workflow-templates", "comfyui-embedded-docs")
LEFT_OUT = frozenset((*PAGE, "spandrel", "comfy-angle", "pyopengl"))
# Required by wheels and not by what is run here.
UNUSED = frozenset(("nvidia-cutlass-dsl-libs-cu12", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "zipp", "lazy-importer"))
DROPPED = re.compile(
    r"(^|/)stubs/|\.a$|^cudnn/moe_ep/|^comfy_kitchen/backends/hip/|^transformer_engine/jax/|^include/|(^|/)__pycache__/"
)
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 31, 34, 35)]
PLATFORMS += [f"manylinux{name}_x86_64" for name in ("1", "2010", "2014")]
PYTHON = "3.12"
NOT_SOURCES = re.compile(
    r"^(\.git|\.ci|\.github|\.venv|tests[^/]*|script_examples|blueprints|comfy_api_nodes|input|output|models|user|temp)(/|$)"
    r"|(^|/)__pycache__(/|$)"
)
UNPACK = """\
# source unpack.sh NAME...: unpack these groups under /tmp/wancore and make them importable.
# Parts may come one after the other: they are kept in /tmp/wancore/parts, and a group is unpacked when all are there.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd); base=/tmp/wancore
mkdir -p $base/parts $base/site
cp -n "$here"/*.tar.xz.* $base/parts/ 2>/dev/null
for name in "$@"; do
  [ -e $base/$name.unpacked ] && continue
  case $name in
@COUNTS@
    *) echo "unpack.sh: no group $name"; continue ;;
  esac
  if [ "$(ls $base/parts/$name.tar.xz.* 2>/dev/null | wc -l)" -lt "$count" ]; then
    echo "unpack.sh: $name waits for parts: $(ls $base/parts | grep -c "^$name.tar") of $count are here"; continue
  fi
  cat $base/parts/$name.tar.xz.* | xz -dc -T0 | tar x -C $base && touch $base/$name.unpacked
done
export PYTHONPATH=$base/site:$base/site/nvidia_cutlass_dsl/dsl_packages
export COMFYUI_PATH=$base/ComfyUI COMFYUI_PYTHON=$(command -v python3)
"""


def main(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    if shutil.which("xz") is None:
        parser().error("xz is needed (Debian: xz-utils)")
    if options.test is not None and shutil.which(options.test) is None:
        parser().error(f"--test {options.test} is no program: name a Python {PYTHON} that has what the machine has")
    names = [name for name in GROUPS if not options.only or name in options.only]
    if "comfyui" in names:
        if options.comfyui is None:
            parser().error("give --comfyui, the checkout to pack, or --only with the other groups")
        check_requirements((options.comfyui / "requirements.txt").read_text())
    if "te" in names and options.te is None:
        parser().error("give --te, the compiled extension of transformer-engine, or --only with the other groups")
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="wancore-pack-") as folder:
        wheels = options.wheels or Path(folder, "wheels")
        for name in names:
            tree = Path(folder, name)
            fill(name, tree, wheels, options.arch, options.comfyui, options.te)
            for old in options.out.glob(f"{name}.tar.xz.*"):
                old.unlink()
            archive(tree, options.out / f"{name}.tar.xz", round(options.part * 1e6))
        write_unpack(options.out)
        for part in sorted(options.out.glob("*.tar.xz.*")):
            print(f"{part.stat().st_size / 1e6:8.1f} MB  {part}")
        return 0 if options.test is None else try_imports(options.test, options.out, names)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks pack", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, required=True, help="folder for the packs")
    made.add_argument("--comfyui", type=Path, help="checkout of ComfyUI to pack")
    made.add_argument("--te", type=Path, help="compiled extension of transformer-engine for torch (.so or .so.xz)")
    made.add_argument("--wheels", type=Path, help="folder where downloaded wheels are kept")
    made.add_argument("--only", action="append", choices=tuple(GROUPS), help="only this group; repeatable")
    made.add_argument("--arch", type=int, default=90, help="compute capability to keep, 90 for Hopper")
    made.add_argument("--part", type=float, default=60, help="MB of a part at most (default %(default)s)")
    made.add_argument("--test", metavar="PYTHON", help="import what was packed with this interpreter")
    return made


def check_requirements(text: str) -> None:
    """Raise OptionError for a requirement of ComfyUI that no group has, or has in another version."""
    pins = dict(pin.split("==") for pins in GROUPS.values() for pin in pins)
    for line in text.splitlines():
        requirement = line.partition("#")[0].strip()
        name, exact = name_of(requirement), requirement.partition("==")[2]
        if not requirement or name in LEFT_OUT or (name in HAD and not exact):
            continue
        if pins.get(name) is None or (exact and pins[name] != exact):
            raise OptionError(f"ComfyUI requires {requirement}: put its version into GROUPS of benchmarks/pack.py")


def fill(name: str, tree: Path, wheels: Path, arch: int, comfyui: Path | None, te: Path | None) -> None:
    """Write into `tree` what is unpacked under /tmp/wancore: `site`, and ComfyUI's sources."""
    site = tree / "site"
    site.mkdir(parents=True)
    for pin in GROUPS[name]:
        wheel = download(pin, wheels)
        if lacking := [one for one in needs(wheel) if one not in known()]:
            raise OptionError(f"{pin} requires {', '.join(lacking)}: put it into GROUPS, HAD or UNUSED")
        with ZipFile(wheel) as file:
            file.extractall(site, [one for one in file.namelist() if not DROPPED.search(one)])
    for path in site.rglob("*.so*"):
        blank_other_gpus(path, arch)
    if name == "te":
        assert te is not None
        add_extension(site, te)
    if name == "comfyui":
        assert comfyui is not None
        shutil.copytree(comfyui, tree / "ComfyUI", ignore=lambda folder, inside: skipped(comfyui, folder, inside))


def known() -> frozenset[str]:
    return HAD | UNUSED | {name_of(pin) for pins in GROUPS.values() for pin in pins}


def skipped(checkout: Path, folder: str, inside: Sequence[str]) -> list[str]:
    """Names in a folder of ComfyUI's checkout that `main.py` does not import."""
    under = Path(folder).relative_to(checkout)
    return [name for name in inside if NOT_SOURCES.search((under / name).as_posix())]


def add_extension(site: Path, te: Path) -> None:
    """transformer-engine finds its extension by the version of a package of its own."""
    target = site / "transformer_engine" / "wheel_lib" / "transformer_engine_torch.cpython-312-x86_64-linux-gnu.so"
    target.write_bytes(lzma.decompress(te.read_bytes()) if te.suffix == ".xz" else te.read_bytes())
    info = site / f"transformer_engine_torch-{TE}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: transformer_engine_torch\nVersion: {TE}\n")


def archive(tree: Path, path: Path, part: int) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder, path.name)
        subprocess.run(["tar", "c", "-I", "xz -T0 -6", "-f", whole, "-C", tree, "."], check=True)
        subprocess.run(["split", "-b", str(part), "-d", whole, f"{path}."], check=True)


def write_unpack(out: Path) -> None:
    """unpack.sh, for the parts that are there."""
    counts = {name: len(list(out.glob(f"{name}.tar.xz.*"))) for name in GROUPS}
    lines = [f"    {name}) count={count} ;;" for name, count in counts.items() if count]
    (out / "unpack.sh").write_text(UNPACK.replace("@COUNTS@", "\n".join(lines)))


def try_imports(python: str, out: Path, names: Sequence[str]) -> int:
    """1 if something that was packed cannot be imported by that interpreter, from a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="wancore-unpacked-") as folder:
        script = (out / "unpack.sh").read_text().replace("/tmp/wancore", folder)
        tried = Path(folder, "unpack.sh")
        tried.write_text(script.replace('here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', f"here={out.resolve()}"))
        modules = [module for name in names for module in IMPORTS[name]]
        code = (
            "import importlib, sys\nfaults = 0\n"
            f"for name in {modules!r}:\n"
            "    try:\n        importlib.import_module(name); print('imported', name)\n"
            "    except Exception as fault:\n        faults = 1; print('NOT imported', name, repr(fault)[:300])\n"
            "sys.exit(faults)\n"
        )
        command = f'source {tried} {" ".join(names)} && exec "$0" -c "$1"'
        return subprocess.run(["bash", "-c", command, shutil.which(python) or python, code], check=False).returncode


def download(pin: str, folder: Path) -> Path:
    """The wheel of NAME==VERSION, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    if (found := wheel_of(pin, folder)) is not None:
        return found
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", "--pre", "--no-deps", "--only-binary=:all:", *platforms]
    command += ["--python-version", PYTHON, "--implementation", "cp", "-d", str(folder), pin]
    subprocess.run(command, check=True)
    found = wheel_of(pin, folder)
    assert found is not None, f"pip wrote no wheel of {pin}"
    return found


def wheel_of(pin: str, folder: Path) -> Path | None:
    name, _, version = pin.partition("==")
    paths = [path for path in folder.glob("*.whl") if (name_of(path.name), path.name.split("-")[1]) == (name, version)]
    return paths[0] if paths else None


def needs(wheel: Path) -> list[str]:
    """The projects that a wheel requires on that machine, without extras."""
    from packaging.requirements import Requirement

    with ZipFile(wheel) as file:
        info = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        lines = file.read(info).decode().splitlines()
    found = [Requirement(line.partition(":")[2].strip()) for line in lines if line.startswith("Requires-Dist:")]
    where = {"python_version": PYTHON, "sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}
    where |= {"platform_system": "Linux", "python_full_version": f"{PYTHON}.3"}
    return [name_of(one.name) for one in found if one.marker is None or one.marker.evaluate(where)]


def name_of(requirement: str) -> str:
    """The project of a requirement or of a wheel's file, in the spelling of GROUPS."""
    name = requirement.partition("-")[0] if requirement.endswith(".whl") else re.split(r"[^\w.-]", requirement)[0]
    return re.sub(r"[-_.]+", "-", name).lower()
