"""What is refused before a cluster is asked, and how files travel; without Ray."""

from __future__ import annotations

import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wan_core.cli import main
from wan_core.cluster.connect import Node, Wanted, check_allowed, check_token, inventory
from wan_core.cluster.files import media_of, models_there, put, with_paths, with_words
from wan_core.cluster.places import spread
from wan_core.config import LoadOptions, LoraOptions, OptionError, Request
from wan_core.config.keys import model_paths
from wan_core.config.table import table

ASKED = ["generate", "--model", "tiny", "--ray", "auto"]


@pytest.mark.parametrize("which", [["--prompt", "x"], ["--prompts", "list.jsonl"]])
def test_ray_is_not_installed(
    which: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says what to install, and nothing is written."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "list.jsonl").write_text('{"prompt": "x"}')
    assert main([*ASKED, *which, "--out", "x.mp4"]) == 2
    assert "pip install 'ray>=2.60'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["list.jsonl"]


def test_a_cluster_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANCORE_RAY_WITHOUT_TOKEN", raising=False)
    with pytest.raises(OptionError, match=r"asks for no token.*RAY_AUTH_MODE=token.*WANCORE_RAY_WITHOUT_TOKEN=1"):
        check_token(False)
    check_token(True)
    monkeypatch.setenv("WANCORE_RAY_WITHOUT_TOKEN", "1")
    check_token(False)


@pytest.mark.parametrize(
    ("allowed", "fine"), [("", False), ("auto", True), ("other:1, auto", True), ("automatic", False)]
)
def test_addresses_that_a_workflow_may_name(allowed: str, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANCORE_CLUSTERS", allowed)
    if fine:
        check_allowed("auto")
    else:
        with pytest.raises(OptionError, match="WANCORE_CLUSTERS=auto"):
            check_allowed("auto")


@pytest.mark.parametrize(
    ("text", "kind", "count"),
    [(None, "GPU", None), ("auto", "GPU", None), ("16", "GPU", 16), ("cpu,cpu", "CPU", 2), ("cpu", "CPU", 1)],
)
def test_gpus_of_a_cluster(text: str | None, kind: str, count: int | None) -> None:
    assert Wanted.parse(text) == Wanted(kind, count)


@pytest.mark.parametrize(
    ("have", "count", "nodes"),
    [
        ([8, 8], 16, (8, 8)),
        ([8, 8], 8, (8,)),
        ([8, 4, 4], 8, (8,)),
        ([4, 4, 4], 8, (4, 4)),
        ([4, 4, 4], 12, (4, 4, 4)),
        ([8, 4], 12, ()),
        ([8, 3, 3], 9, (3, 3, 3)),
        ([], 1, ()),
    ],
)
def test_a_video_gets_equally_many_of_few_nodes(
    have: list[int], count: int, nodes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_nodes = [Node(str(i), f"host-{i}", number) for i, number in enumerate(have)]
    monkeypatch.setattr("wan_core.cluster.places.nodes", lambda kind: fake_nodes)
    if nodes:
        assert spread(Wanted("GPU", count)) == nodes
    else:
        with pytest.raises(OptionError, match=inventory(fake_nodes, "GPU")):
            spread(Wanted("GPU", count))


def test_models_in_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "models"
    options = LoadOptions(
        high=str(here / "a.safetensors"), vae="/other/vae.safetensors", loras=(LoraOptions(path=str(here / "l.st")),)
    )
    assert models_there(asdict(options)) == asdict(options)
    monkeypatch.setenv("WANCORE_CLUSTER_MODELS", f"{here}=/mnt/models")
    there = models_there(asdict(options))
    assert sorted(model_paths(there)) == ["/mnt/models/a.safetensors", "/mnt/models/l.st", "/other/vae.safetensors"]
    assert models_there({"model": "tiny"}) == {"model": "tiny"} and model_paths({"model": "tiny"}) == []
    monkeypatch.setenv("WANCORE_CLUSTER_MODELS", "/mnt/models")
    with pytest.raises(OptionError, match="FOLDER_HERE=FOLDER_ON_THE_NODES"):
        models_there({"model": "tiny"})


def test_pictures_travel(tmp_path: Path) -> None:
    """Each content once, under a name of its own; what goes into video and report is the name that the user gave."""
    there = tmp_path / "there"
    there.mkdir()
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"a cat")
    request = asdict(Request(prompt="x", image=str(picture)))
    media = media_of(request)
    assert media == {str(picture): b"a cat"}
    here = put(media, there)
    assert (
        put(media, there) == here
        and Path(here[str(picture)]).parent == there
        and Path(here[str(picture)]).read_bytes() == b"a cat"
    )
    sent = with_paths(request, here)
    assert sent["image"] == here[str(picture)] and sent["prompt"] == "x"
    assert with_paths(sent, {place: name for name, place in here.items()}) == request
    assert with_words(f"cannot read {sent['image']} as a picture", here) == f"cannot read {picture} as a picture"


def entry_fields() -> dict[str, set[str]]:
    """The fields of the objects that a field of a request has several of."""
    hints = get_type_hints(Request)
    kinds = {name: get_args(get_args(hints[name])[0])[0] for name, one in table(Request).items() if one.several}
    return {name: {field.name for field in fields(kind)} for name, kind in kinds.items()}


@given(path=st.text(min_size=1).filter(str.strip), data=st.data())
def test_a_text_is_no_path_whatever_it_says(path: str, data: st.DataObject) -> None:
    """Each field that names a file is renamed, and no other one, where all of them hold the same text."""
    names = {path: "/tmp/there"}
    plain = [name for name, one in table(Request).items() if one.type is str and not one.several]
    chosen = data.draw(st.lists(st.sampled_from(plain), unique=True))
    request = {**dict.fromkeys(chosen, path), "keyframes": ({"frame": 4, "path": path},)}
    request["prompts_at"] = ({"frame": 0, "text": path},)
    moved = with_paths(request, names)
    assert {name for name in chosen if moved[name] != path} == {name for name in chosen if table(Request)[name].path}
    assert moved["keyframes"] == [{"frame": 4, "path": "/tmp/there"}] and moved["prompts_at"] == request["prompts_at"]
    assert [name for name, held in entry_fields().items() if "path" in held] == ["keyframes"]
    settings = {"prompt": path, "prompts": {0: path}, "video": path, "keyframes": {4: path}, "image": path}
    moved = with_paths(settings, names)
    assert {name: moved[name] for name in ("prompt", "prompts")} == {"prompt": path, "prompts": {0: path}}
    assert (moved["video"], moved["keyframes"], moved["image"]) == ("/tmp/there", {4: "/tmp/there"}, "/tmp/there")
