"""Small models with random weights, and every way in which a file or a folder stores them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import safetensors.torch
import sentencepiece
import torch
from torch import Tensor, nn

from tests.reference_models import diffusers_transformer, diffusers_vae, transformers_encoder
from wan_core.checkpoint import (
    CheckpointError,
    load_dit,
    load_text_encoder,
    load_vae,
    save,
)
from wan_core.checkpoint.layouts import hf_text_names
from wan_core.checkpoint.layouts_vae import diffusers_vae_names
from wan_core.checkpoint.save import write_safetensors
from wan_core.models.text.tokenizer import Tokenizer
from wan_core.models.text.umt5 import TextConfig, TextEncoder, UMT5Encoder
from wan_core.models.vae.config import VAE_21, VAE_22
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.config import DiTConfig
from wan_core.models.wan.families.plain import diffusers_names
from wan_core.models.wan.model import WanModel

DIT = DiTConfig(in_channels=16, out_channels=16, dim=256, ffn_dim=320, num_heads=2, num_layers=2, text_dim=48)
SMALL_HEADS = replace(DIT, in_channels=36, dim=96, num_heads=3)
TEXT = TextConfig(vocab_size=80, dim=32, dim_attn=48, dim_ffn=40, num_heads=4, num_layers=2, max_distance=100)
VAE_A = replace(VAE_21, encoder_dim=4, decoder_dim=4, dim_mult=(1, 2, 2, 2), num_res_blocks=1)
VAE_B = replace(VAE_22, encoder_dim=4, decoder_dim=8, num_res_blocks=1)


@dataclass(frozen=True)
class Model:
    """A module with random weights, the same weights under the names of Diffusers or transformers, its config.json."""

    kind: str
    module: WanModel | VideoVAE | TextEncoder
    official: Mapping[str, Tensor]
    foreign: Mapping[str, Tensor]
    config_json: Mapping[str, object]
    metadata: Mapping[str, str]

    def load(self, source: object, **options: object) -> nn.Module:
        if self.kind == "text_encoder":
            options.setdefault("tokenizer", None)
        loaded = LOADERS[self.kind](source, **options)
        return loaded.encoder if isinstance(loaded, TextEncoder) else loaded


LOADERS: dict[str, Callable[..., nn.Module]] = {"dit": load_dit, "vae": load_vae, "text_encoder": load_text_encoder}


@cache
def spiece() -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a red circle moves right on blue", "a green square turns left"] * 9),
        model_writer=model,
        vocab_size=30,
        hard_vocab_limit=False,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=3,
    )
    return model.getvalue()


@cache
def model(name: str) -> Model:
    torch.manual_seed(0)
    if name.startswith("dit"):
        config = {"dit": DIT, "dit heads": SMALL_HEADS}[name]
        return _model("dit", WanModel(config), diffusers_transformer(config), diffusers_names)
    if name == "text":
        encoder = TextEncoder(UMT5Encoder(TEXT), Tokenizer(spiece()))
        return _model("text_encoder", encoder, transformers_encoder(TEXT), hf_text_names)
    config = {"vae 2.1": VAE_A, "vae 2.2": VAE_B}[name]
    return _model("vae", VideoVAE(config), diffusers_vae(config), diffusers_vae_names)


def _model(kind: str, module: WanModel | VideoVAE | TextEncoder, theirs: nn.Module, table: Callable) -> Model:
    source = module.encoder if isinstance(module, TextEncoder) else module
    for parameter in source.parameters():
        nn.init.normal_(parameter)
    dtype = torch.float32 if kind == "vae" else torch.bfloat16
    official = {name: value.to(dtype) for name, value in source.state_dict().items()}
    names = table(theirs.state_dict().keys())
    foreign = {theirs_name: official[ours] for theirs_name, ours in names.items()}
    assert {n: t.shape for n, t in foreign.items()} == {n: t.shape for n, t in theirs.state_dict().items()}
    settings = json.loads(json.dumps({**theirs.config.to_dict()} if kind == "text_encoder" else dict(theirs.config)))
    settings.update(
        {"architectures": ["UMT5EncoderModel"]} if kind == "text_encoder" else {"_class_name": type(theirs).__name__}
    )
    metadata = {"num_heads": str(module.config.num_heads)} if isinstance(module, WanModel) else {}
    if kind == "text_encoder":
        metadata = {"relative_attention_max_distance": str(TEXT.max_distance)}
    return Model(kind, module, official, foreign, settings, metadata)


Writer = Callable[[Model, Path], object]
WRITERS: dict[str, Writer] = {}


def writer(write: Writer) -> Writer:
    WRITERS[write.__name__] = write
    return write


def shards(state: Mapping[str, Tensor], folder: Path, metadata: Mapping[str, str], count: int = 3) -> dict[str, str]:
    """`state` dealt onto shards with the official names; returns the weight map."""
    names = [f"diffusion_pytorch_model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
    placed = {name: names[i % count] for i, name in enumerate(state)}
    for file in names:
        write_safetensors({n: t for n, t in state.items() if placed[n] == file}, folder / file, metadata)
    return placed


@writer
def official_file(m: Model, folder: Path) -> Path:
    write_safetensors(m.official, folder / "model.safetensors", m.metadata)
    return folder / "model.safetensors"


@writer
def official_index(m: Model, folder: Path) -> Path:
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards(m.official, folder, m.metadata)}))
    return index


@writer
def official_folder(m: Model, folder: Path) -> Path:
    return official_index(m, folder).parent


@writer
def shards_without_index(m: Model, folder: Path) -> Path:
    shards(m.official, folder, m.metadata)
    return folder


@writer
def pth(m: Model, folder: Path) -> Path:
    torch.save(dict(m.official), folder / "models.pth")
    (folder / "config.json").write_text(json.dumps(m.config_json))
    return folder / "models.pth"


@writer
def nested_pth(m: Model, folder: Path) -> Path:
    state = {n: nn.Parameter(t) for n, t in m.official.items()}
    torch.save({"state_dict": state, "epoch": 3, "lr": 1e-4}, folder / "last.pt")
    (folder / "config.json").write_text(json.dumps(m.config_json))
    return folder


@writer
def prefixed(m: Model, folder: Path) -> Path:
    prefixes = {"dit": "model.diffusion_model.", "vae": "first_stage_model.", "text_encoder": "text_encoders.umt5xxl."}
    state = {prefixes[m.kind] + name: value for name, value in m.official.items()}
    write_safetensors(state, folder / "comfy.safetensors", m.metadata)
    return folder / "comfy.safetensors"


@writer
def foreign_file(m: Model, folder: Path) -> Path:
    write_safetensors(m.foreign, folder / "diffusion_pytorch_model.safetensors", m.metadata)
    return folder / "diffusion_pytorch_model.safetensors"


@writer
def foreign_folder(m: Model, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(m.config_json))
    safetensors.torch.save_file(
        {n: t.clone() for n, t in m.foreign.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


@writer
def foreign_shards(m: Model, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(m.config_json))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards(m.foreign, folder, {}, 2)}))
    return folder


@writer
def prefixed_foreign_bin(m: Model, folder: Path) -> Path:
    torch.save({"module." + n: t for n, t in m.foreign.items()}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(m.config_json))
    return folder / "pytorch_model.bin"


@writer
def state_dict(m: Model, folder: Path) -> object:
    return m.official if m.metadata.get("num_heads") != "3" else official_file(m, folder)  # it cannot carry metadata


@writer
def saved(m: Model, folder: Path) -> Path:
    copy = m.load(official_file(m, folder)) if m.kind != "text_encoder" else None
    save(copy or TextEncoder(encoder_of(m), Tokenizer(spiece())), folder / "saved.safetensors")
    return folder / "saved.safetensors"


def encoder_of(m: Model) -> UMT5Encoder:
    encoder = UMT5Encoder(TEXT)
    encoder.load_state_dict(dict(m.official), assign=True)
    return encoder


def tokenizer_file(folder: Path) -> Path:
    path = folder / "elsewhere" / "spiece.model"
    path.parent.mkdir()
    path.write_bytes(spiece())
    return path


def same_bits(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        a.dtype == theirs[n].dtype and a.shape == theirs[n].shape and torch.equal(as_bytes(a), as_bytes(theirs[n]))
        for n, a in ours.items()
    )


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


def refusal(source: object, load: Callable[..., object] = load_dit) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(source)
    return str(caught.value)
