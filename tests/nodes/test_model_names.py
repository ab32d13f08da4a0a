"""Names of models come from workflows, and a workflow may come from a stranger: only what a node lists is opened.

The nodes and the folders are real. In place of ComfyUI's `folder_paths` stands what the nodes call of it, on folders of
this test, as ComfyUI does it: it lists what it finds, and follows links.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tools.declared_nodes import modules
from wan_core.config import OptionError
from wan_core.pipeline.sources import TINY

FOLDERS = ("diffusion_models", "text_encoders", "vae", "loras")
LISTED = (
    "model.safetensors",
    "sub/inner.safetensors",
    "packed.gguf",
    "linked.safetensors",
    "elsewhere/far.safetensors",
)
SHARDS = ("big/part-00001-of-00002.safetensors", "big/part-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The nodes over model folders that a user has, with links to files and folders outside of them."""
    base = tmp_path_factory.mktemp("models")
    outside = base / "outside"
    (outside / "folder").mkdir(parents=True)
    for path in (outside / "secret.safetensors", outside / "secret", outside / "folder" / "far.safetensors"):
        path.write_bytes(b"secret")
    for root in (base / folder for folder in FOLDERS):
        for name in (*LISTED[:3], *SHARDS, "notes.txt", ".git/hidden.safetensors", "sub/notes.json"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(b"model")
        (root / "linked.safetensors").symlink_to(outside / "secret.safetensors")
        (root / "elsewhere").symlink_to(outside / "folder", target_is_directory=True)
        (root / "gone.safetensors").symlink_to(outside / "deleted.safetensors")
    stubs = modules()
    vars(stubs["folder_paths"]).update(folder_paths_on(base))
    vars(stubs["comfy.model_management"]).update(get_torch_device=lambda: torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stubs.items():
            patch.setitem(sys.modules, name, module)
        yield SimpleNamespace(
            base=base,
            host=importlib.import_module("nodes.host"),
            files=importlib.import_module("nodes.files"),
            **{name: importlib.import_module(f"nodes.{name}") for name in LOADERS},
        )
        for name in [name for name in sys.modules if name.partition(".")[0] == "nodes"]:
            del sys.modules[name]


LOADERS = ("model_loader", "part_loaders", "lora")


def folder_paths_on(base: Path) -> dict[str, Callable[..., Any]]:
    def search(root: str, excluded_dir_names: list[str]) -> tuple[list[str], dict[str, float]]:
        listed = []
        for folder, inner, names in os.walk(root, followlinks=True):
            inner[:] = [name for name in inner if name not in excluded_dir_names]
            listed += [os.path.relpath(os.path.join(folder, name), root) for name in names]
        return listed, {}

    def ending(names: list[str], endings: list[str]) -> list[str]:
        return sorted(name for name in names if os.path.splitext(name)[-1].lower() in endings)

    def roots(folder: str) -> list[str]:
        return [str(base / folder)]

    def listed(folder: str) -> list[str]:
        return ending(search(roots(folder)[0], [".git"])[0], [".safetensors", ".pth"])

    return {
        "get_folder_paths": roots,
        "get_filename_list": listed,
        "recursive_search": search,
        "filter_files_extensions": ending,
    }


def loaders(nodes: SimpleNamespace) -> dict[str, Callable[[Any], object]]:
    """Every way from a name in a workflow to a file, and where ComfyUI asks for it."""
    text, vae = nodes.part_loaders.WanCoreTextEncoderLoader, nodes.part_loaders.WanCoreVAELoader
    model, lora = nodes.model_loader.WanCoreModelLoader, nodes.lora.WanCoreLoRA
    tiny = nodes.files.TINY_T2V
    return {
        "high": lambda name: model.validate_inputs(name, tiny),
        "low": lambda name: model.validate_inputs(tiny, name),
        "run high": lambda name: asyncio.run(model.execute(name, tiny)),
        "run low": lambda name: asyncio.run(model.execute(tiny, name)),
        "stamp": lambda name: model.fingerprint_inputs(name, tiny),
        "text": lambda name: text.validate_inputs(name),
        "text stamp": lambda name: text.fingerprint_inputs(name),
        "vae": lambda name: vae.validate_inputs(name),
        "vae stamp": lambda name: vae.fingerprint_inputs(name),
        "lora": lambda name: nodes.lora._files(name, "none"),
        "lora low": lambda name: nodes.lora._files("none", name),
        "lora stamp": lambda name: lora.fingerprint_inputs(high=name),
    }


def spoilt(name: str) -> st.SearchStrategy[str]:
    """A listed name as systems might take it for the file, or for one elsewhere."""
    before = (
        "/",
        "./",
        "../",
        "sub/../",
        "\\",
        ".\\",
        "C:",
        "C:\\",
        "\\\\host\\share\\",
        "//host/share/",
        "file://",
        " ",
    )
    after = (".", " ", "/", "/.", "\0", "\0.safetensors", "::$DATA", "\n", "?", "/../model.safetensors")
    changed = [*(b + name for b in before), *(name + a for a in after), name.upper(), name.replace("/", "\\") + " "]
    return st.sampled_from([one for one in changed if one not in (*LISTED, "big/")])


HOSTILE = st.one_of(
    st.sampled_from(LISTED).flatmap(spoilt),
    st.sampled_from(
        ["/etc/passwd", "../outside/secret.safetensors", "../outside/secret", "..", ".", "", "/", "big/.."]
    ),
    st.sampled_from(
        ["big", "sub", "sub/", "elsewhere", "elsewhere/", "elsewhere/../secret", "gone.safetensors", *SHARDS]
    ),
    st.sampled_from(["notes.txt", "sub/notes.json", ".git/hidden.safetensors", "~/model.safetensors", "con", "$HOME"]),
    st.text(max_size=300),
    st.integers(),
    st.lists(st.text(), max_size=2),
    st.dictionaries(st.text(), st.text(), max_size=2),
    st.booleans(),
)


@given(HOSTILE)
@example("x" * 5000)
@example("\ud800.safetensors")
def test_no_other_name_is_opened(nodes: SimpleNamespace, name: object) -> None:
    """Links carry values of any type; the answer is one short sentence."""
    for folder in FOLDERS:
        with pytest.raises(OptionError, match="put the file there") as refused:
            nodes.files.locate(folder, name, nodes.files.embedded("vae"))
        assert len(str(refused.value)) < 500 + len(str(nodes.base))


@pytest.mark.parametrize("name", ["/etc/passwd", "../outside/secret.safetensors", "model.safetensors\0", ["a"], {}, 5])
def test_every_loader_goes_through_it(nodes: SimpleNamespace, name: object) -> None:
    absolute = nodes.base / "vae" / "model.safetensors"
    for load in loaders(nodes).values():
        for one in (name, str(absolute)):
            with pytest.raises(OptionError, match="is not a model in"):
                load(one)


def test_names_that_are_listed_are_found(nodes: SimpleNamespace) -> None:
    """Symbolic links that a user made are followed, like ComfyUI does."""
    for folder in FOLDERS:
        assert set(nodes.host.model_names(folder)) == {*LISTED, "big/", "gone.safetensors"}
        for name in (*LISTED, "big/"):
            path = nodes.files.locate(folder, name, {})
            assert path == nodes.base / folder / name and path.exists()
    inside = nodes.files.embedded("vae")
    assert nodes.files.locate("vae", nodes.files.TINY_T2V, inside) == TINY / "vae.safetensors"


def test_what_was_measured_is_found_through_links_too(nodes: SimpleNamespace) -> None:
    """A folder of models may be a link to another disk."""
    far = nodes.base / "outside" / "folder" / "own.magcache.json"
    assert nodes.host.stamps("diffusion_models", ".magcache.json") == []
    far.write_text("{}")
    place = nodes.base / "diffusion_models" / "elsewhere" / far.name
    assert nodes.host.stamps("diffusion_models", ".magcache.json") == [(str(place), far.stat().st_mtime_ns)]
