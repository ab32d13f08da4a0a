"""Tiny autoencoders for Wan's latents: against their reference, in chunks and tiles, and what their files look like.

`data/taehv.safetensors` has what taehv.py (github.com/madebyollin/taehv) makes of the weights of `weights_of`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tensors import draw
from wan_core.checkpoint import CheckpointError, load_vae
from wan_core.checkpoint.detect import empty_module
from wan_core.checkpoint.save import try_to_save_latents, write_safetensors
from wan_core.cli import main
from wan_core.models.vae.config import VAE_21, VAE_22, TinyVAEConfig, VAEConfig
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.vae.tiny import TinyVAE
from wan_core.models.vae.vae import VideoVAE
from wan_core.pipeline.load import load_vae_only

DATA = Path(__file__).parent / "data" / "taehv.safetensors"
LATENTS, PIXELS = (
    {"taew2_1": (1, 16, 3, 1, 2), "taew2_2": (1, 48, 2, 1, 1)},
    {16: (1, 3, 9, 8, 16), 48: (1, 3, 5, 16, 16)},
)
both = pytest.mark.parametrize("name", LATENTS)


def config_of(name: str, of_model: bool = True) -> TinyVAEConfig:
    """The architecture of the released files."""
    plain = VAE_21 if name == "taew2_1" else VAE_22
    return TinyVAEConfig(
        z_dim=plain.z_dim, encoder_dim=64, decoder_dim=64, widths=(256, 128, 64, 64), patch=plain.patch,
        of_model=of_model, latents_mean=plain.latents_mean, latents_std=plain.latents_std,
    )  # fmt: skip


def weights_of(name: str) -> dict[str, Tensor]:
    shapes = {key: value.shape for key, value in empty_module(config_of(name)).state_dict().items()}
    drawn = {key: draw(*shape, seed=seed) for seed, (key, shape) in enumerate(sorted(shapes.items()))}
    return {key: one / one[0].numel() ** 0.5 if one.ndim > 1 else 0.1 * one for key, one in drawn.items()}


def tiny_vae(name: str, folder: Path, file: str = "") -> TinyVAE:
    """The module of a file called `file`, or by its released name."""
    path = folder / f"{file or name}.safetensors"
    write_safetensors(weights_of(name), path, {})
    vae = load_vae(path)
    assert isinstance(vae, TinyVAE)
    return vae


@both
@pytest.mark.parametrize("chunk", [1, 2, None])
def test_equals_the_reference(name: str, chunk: int | None, tmp_path: Path) -> None:
    """With latents as the transformer has them, which the files are for."""
    vae, expected = tiny_vae(name, tmp_path), load_file(DATA)
    assert vae.config == config_of(name)
    latents = draw(*LATENTS[name], seed=1)
    decoded = vae.decode(vae.denormalise(latents), chunk=chunk) / 2 + 0.5
    torch.testing.assert_close(decoded, expected[f"{name}.decoded"], atol=1e-5, rtol=0)
    pixels = draw(*PIXELS[vae.config.z_dim], seed=2).sigmoid()
    encoded = vae.normalise(vae.encode(pixels * 2 - 1, chunk=chunk))
    torch.testing.assert_close(encoded, expected[f"{name}.encoded"], atol=1e-5, rtol=0)
    stills = torch.cat(list(vae.stills(latents)), 2) / 2 + 0.5
    torch.testing.assert_close(stills.clamp(0, 1), expected[f"{name}.stills"], atol=1e-5, rtol=0)


def test_lightx2v_s_files_take_latents_of_the_vae(tmp_path: Path) -> None:
    """Their tensors are the same; lightx2v's own code tells by the name, too (`need_scaled`)."""
    plain, light = tiny_vae("taew2_1", tmp_path), tiny_vae("taew2_1", tmp_path, "lighttaew2_1")
    assert plain.config.of_model and not light.config.of_model
    latents = draw(*LATENTS["taew2_1"], seed=1)
    as_vae = plain.denormalise(latents)
    torch.testing.assert_close(light.decode(latents), plain.decode(as_vae), atol=1e-5, rtol=0)
    stills = (torch.cat(list(vae.stills(one)), 2) for vae, one in ((light, light.normalise(latents)), (plain, latents)))
    torch.testing.assert_close(*stills, atol=1e-5, rtol=0)


def test_several_videos_and_tiles(tmp_path: Path) -> None:
    vae, latents = tiny_vae("taew2_1", tmp_path), draw(2, 16, 2, 3, 4, seed=3)
    decoded = vae.decode(latents)
    torch.testing.assert_close(decoded[1:], vae.decode(latents[1:]), atol=1e-5, rtol=0)
    assert decoded.shape == (2, 3, 5, 24, 32) and bool(decoded.abs().max() <= 1)
    tiles = vae.decode(latents, tile=TileSpec(height=3, width=4, overlap=1))
    torch.testing.assert_close(tiles, decoded, atol=1e-5, rtol=0)
    assert vae.encode(decoded).shape == latents.shape
    assert vae.channels_last().decode(latents).shape == decoded.shape


def test_a_file_of_hunyuanvideo_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tiny autoencoder of HunyuanVideo by its name"):
        tiny_vae("taew2_1", tmp_path, "taehv")


def test_it_decodes_for_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vae = tiny_vae("taew2_1", tmp_path)
    latents = tmp_path / "x.latents.safetensors"
    assert try_to_save_latents(latents, draw(1, 16, 2, 4, 4, seed=4), 8, {}) is None
    file = str(tmp_path / "taew2_1.safetensors")
    assert main(["decode", str(latents), "--vae", file, "--device", "cpu", "--out", str(tmp_path / "x.mp4")]) == 0
    assert (tmp_path / "x.mp4").exists()
    loaded, _ = load_vae_only(None, file, "cpu", "fp32", 16)
    assert type(loaded) is type(vae)
    assert main(["inspect", file]) == 0
    assert "VAE" in capsys.readouterr().out


def test_lightvae_is_a_vae_of_fewer_channels() -> None:
    """lightx2v's LightVAE has the VAE's names and a quarter of its channels (WanVAE_ with dim 24)."""
    names = {"encoder_dim": 24, "decoder_dim": 24}
    wanted = VAEConfig(z_dim=16, **names, latents_mean=VAE_21.latents_mean, latents_std=VAE_21.latents_std)  # type: ignore[arg-type]
    state = {key: torch.zeros(value.shape) for key, value in empty_module(wanted).state_dict().items()}
    vae = load_vae(state)
    assert type(vae) is VideoVAE and vae.config == wanted
