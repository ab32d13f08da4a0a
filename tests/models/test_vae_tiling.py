"""Tiles of the VAE, its statistics and sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.models.test_vae import TINY, TINY_21, make_latents, make_vae, make_video
from wan_core.config import OptionError
from wan_core.models.vae.config import VAEConfig
from wan_core.models.vae.layers import CausalConv3d, Chunk
from wan_core.models.vae.tiling import TileSpec, plan_tiles
from wan_core.models.vae.vae import VideoVAE


@given(rows=st.integers(1, 24), columns=st.integers(1, 24), height=st.integers(3, 12), width=st.integers(3, 12))
@settings(max_examples=16, deadline=None)
def test_tiles_restore_what_they_cut(rows: int, columns: int, height: int, width: int) -> None:
    x = torch.randn(2, rows * 8, columns * 8)
    canvas = torch.zeros_like(x)
    for tile in plan_tiles(rows, columns, TileSpec(height=height, width=width, overlap=2), scale=8):
        tile.add_to(canvas, tile.crop(x, 8), 8)
    assert (canvas - x).abs().max() < 1e-5


def make_local(vae: VideoVAE) -> VideoVAE:
    """Without the spatial taps around the centre and without attention a position only depends on itself."""
    for name, p in vae.named_parameters():
        if "proj" in name:
            p.zero_()
        elif name.endswith("weight") and p.shape[-1] == 3:
            # A downsampling kernel covers inputs 2i, 2i + 1, 2i + 2: its first tap stays inside the position.
            tap = 0 if ".resample." in name and name.startswith("encoder") else 1
            centre = p[..., tap, tap].clone()
            p.zero_()
            p[..., tap, tap] = 3 * centre
    return vae


@TINY
def test_tiles_of_a_local_model_are_exact(config: VAEConfig) -> None:
    """Places, sizes and weights of tiles are right: if nothing is seen across borders, tiling changes nothing."""
    vae = make_local(make_vae(config))
    tile = TileSpec(height=3, width=4, overlap=2)
    video, latents = make_video(config, 5, 4, 7), make_latents(config, 3, 4, 7)
    assert (vae.encode(video, tile=tile) - vae.encode(video)).abs().max() < 1e-5
    whole = vae.decode(latents)
    assert whole.std() > 0.1
    assert (vae.decode(latents, tile=tile) - whole).abs().max() < 1e-5
    streamed = torch.cat(list(vae.decode_stream(latents, chunk=2, tile=tile)), dim=2)
    assert (streamed - whole).abs().max() < 1e-5


def smooth(x: Tensor) -> Tensor:
    """Low frequencies only, of the size of `x`, standard deviation one."""
    coarse = x[..., :2, :2].flatten(0, 2)[None]
    fine = nn.functional.interpolate(coarse, size=x.shape[-2:], mode="bilinear", align_corners=True).view(x.shape)
    return fine / fine.std()


def seam(difference: Tensor) -> float:
    """The largest step between neighbouring columns over the usual one: large where a tile ends abruptly."""
    steps = difference.diff(dim=-1).abs().mean(dim=(0, 1, 2, 3))
    return float(steps.max() / steps.median())


def test_tiles_blend_without_seams() -> None:
    """Smooth content, untrained weights as initialised (no attention: its projection starts at zero).

    A convolution invents zeros beyond a tile's border and tiles this small are mostly border, so the bounds are wide: a
    third of the signal, where 0.06 to 0.18 is measured, and two thirds of the error of tiles that do not overlap,
    measured 0.29 to 0.44.
    """
    torch.manual_seed(0)
    config = TINY_21
    vae = VideoVAE(config).requires_grad_(False)
    latents, video = smooth(make_latents(config, 2, 10, 16)), smooth(make_video(config, 5, 10, 16)).clamp(-1, 1)
    blended, cut = TileSpec(height=8, width=10, overlap=6), TileSpec(height=8, width=8, overlap=0)
    for run, x in ((vae.decode, latents), (vae.encode, video)):
        whole = run(x)
        error, hard = run(x, tile=blended) - whole, run(x, tile=cut) - whole
        assert error.std() < whole.std() / 3
        assert error.std() < hard.std() * 2 / 3
        if x is latents:
            assert seam(error) < 3 < 5 < seam(hard)


def test_a_tile_that_cannot_overlap_so_is_refused() -> None:
    for height, width, overlap in ((8, 8, 8), (8, 4, 6), (8, 8, -1), (0, 8, 0)):
        with pytest.raises(OptionError, match="overlap"):
            TileSpec(height=height, width=width, overlap=overlap)


@TINY
def test_bf16_stays_close(config: VAEConfig) -> None:
    vae, video, latents = make_vae(config), make_video(config, 5, 2, 2), make_latents(config, 2, 2, 2)
    encoded, decoded = vae.encode(video), vae.decode(latents)
    vae.to(torch.bfloat16)
    low, frames = vae.encode(video), vae.decode(latents)
    assert low.dtype == frames.dtype == torch.bfloat16
    # Some 25 layers each round to 8 bits: a few times 2**-8 of the signal.
    assert (low.float() - encoded).std() < 0.03 * encoded.std()
    assert (frames.float() - decoded).std() < 0.03 * decoded.std()


@TINY
def test_normalise(config: VAEConfig) -> None:
    vae, latents = VideoVAE(config).to(torch.bfloat16), make_latents(config, 2, 2, 3)
    expected = (latents.double().movedim(1, -1) - torch.tensor(config.latents_mean).double()) / torch.tensor(
        config.latents_std
    ).double()
    assert vae.normalise(latents).dtype == vae.denormalise(latents.bfloat16()).dtype == torch.float32
    assert (vae.normalise(latents).movedim(1, -1) - expected).abs().max() < 1e-5
    assert (vae.denormalise(vae.normalise(latents)) - latents).abs().max() < 1e-5


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.parametrize("kernel", [(3, 3, 3), (3, 1, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
def test_small_videos_take_no_slow_convolution(kernel: tuple[int, int, int], last: bool) -> None:
    """torch has oneDNN's for large ones only; by it, one frame, several, and every second of them are the same."""
    layout = torch.channels_last_3d if last else torch.contiguous_format
    for time_stride, frames in ((1, 1), (1, 4), (2, 5))[: 3 if kernel[0] > 1 else 2]:
        layer = CausalConv3d(8, 12, kernel, time_stride)
        x = torch.randn(1, 8, frames, 12, 20).to(memory_format=layout)
        with torch.no_grad(), torch.profiler.profile() as profile:
            output = layer(x, Chunk(first=True, last=True))
        front = torch.zeros(1, 8, layer.lead, 12, 20, dtype=torch.float64)
        with torch.no_grad():
            expected = layer.double()._conv_forward(torch.cat([front, x.double()], 2), layer.weight, layer.bias)
        assert (output - expected).abs().max() < 1e-5
        assert {"aten::mkldnn_convolution"} == {
            e.name for e in profile.events() or () if "conv" in e.name.split("::")[-1]
        }


@pytest.mark.gpu
@TINY
def test_channels_last_survives_every_layer(config: VAEConfig) -> None:
    """Convolutions put out the layout of their weights; what layers remember of their inputs shows where it is lost."""
    vae = make_vae(config).cuda().channels_last()
    last = torch.channels_last_3d
    pixels = torch.randn(1, 3 * config.patch**2, 9, 16, 16).cuda()
    for coder, x, cut in ((vae.encoder, pixels, 5), (vae.decoder, make_latents(config, 3, 2, 2).cuda(), 1)):
        history: dict[nn.Module, Tensor] = {}
        coder(x[:, :, :cut], Chunk(first=True, last=False, history=history))
        coder(x[:, :, cut:], Chunk(first=False, last=False, history=history))
        names = {layer: name for name, layer in coder.named_modules()}
        lost = [names[layer] for layer, past in history.items() if not past.is_contiguous(memory_format=last)]
        assert set(lost) <= {"conv1"}  # its input comes from the caller


@TINY
def test_sizes_that_do_not_fit(config: VAEConfig) -> None:
    vae, stride = VideoVAE(config), config.spatial_stride
    for size, message in (
        ((1, 3, 6, stride, stride), "drop the last 1 or add 3"),
        ((1, 3, 5, stride + 1, 2 * stride), f"crop or resize to {2 * stride}x{stride}"),
        ((1, 4, 5, stride, stride), "the shape must be"),
        ((3, 5, stride, stride), "the shape must be"),
        ((1, 3, 0, stride, stride), "the shape must be"),
    ):
        with pytest.raises(OptionError, match=message):
            vae.encode(torch.zeros(size))
    with pytest.raises(OptionError, match="chunk"):
        vae.encode(torch.zeros(1, 3, 1, stride, stride), chunk=0)
    with pytest.raises(OptionError, match="decodes"):
        vae.decode_stream(torch.zeros(1, config.z_dim + 1, 1, 2, 2))
    with pytest.raises(OptionError, match="means"):
        VideoVAE(replace(config, latents_mean=(0.0,)))
    with pytest.raises(OptionError, match="one entry less"):
        VideoVAE(replace(config, temporal_downsample=(True,)))
