"""The causal video VAE: parity with Diffusers, streaming, tiling, gradients, and what its files look like."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from tests.tensors import relative
from tests.vae_passes import Passes
from wan_core.checkpoint.layouts_vae import diffusers_vae_names, vae_config
from wan_core.config import OptionError
from wan_core.execution.optimize import optimize_vae
from wan_core.models.vae.config import VAE_21, VAE_22, VAEConfig, check_latents
from wan_core.models.vae.layers import CausalConv3d, Chunk, ResidualBlock
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.vae.vae import VideoVAE
from wan_core.ops.kernels import fused
from wan_core.pipeline.load import load_vae_only

if TYPE_CHECKING:
    from diffusers import AutoencoderKLWan

TINY_21 = replace(VAE_21, encoder_dim=16, decoder_dim=16, dim_mult=(1, 2, 3, 3), num_res_blocks=1)
TINY_22 = replace(VAE_22, encoder_dim=8, decoder_dim=16, num_res_blocks=1)
TINY = pytest.mark.parametrize("config", [TINY_21, TINY_22], ids=["2.1", "2.2"])
FULL = pytest.mark.parametrize("config", [VAE_21, VAE_22, TINY_21, TINY_22], ids=["2.1", "2.2", "tiny-2.1", "tiny-2.2"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Weights that keep activations near one, so that an error anywhere shows at the end."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("gamma"):
                p.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                p.copy_(0.1 * noise)
            else:
                p.copy_(1.2 * noise / p[0].numel() ** 0.5)


def make_vae(config: VAEConfig) -> VideoVAE:
    vae = VideoVAE(config)
    randomise(vae)
    return vae.requires_grad_(False)


def diffusers_vae(config: VAEConfig) -> AutoencoderKLWan:
    pytest.importorskip("diffusers")
    from tests import reference_models

    return reference_models.diffusers_vae(config)


def from_diffusers(reference: AutoencoderKLWan, config: VAEConfig) -> VideoVAE:
    weights = reference.state_dict()
    names = diffusers_vae_names(weights.keys())
    assert names is not None
    vae = VideoVAE(config)
    vae.load_state_dict({names[name]: tensor for name, tensor in weights.items()})
    return vae


def make_video(config: VAEConfig, frames: int, rows: int, columns: int, batch: int = 1) -> Tensor:
    """Noise, `rows` x `columns` latent cells large."""
    size = (batch, 3, frames, rows * config.spatial_stride, columns * config.spatial_stride)
    return torch.rand(size, generator=torch.Generator().manual_seed(frames)) * 2 - 1


def make_latents(config: VAEConfig, frames: int, rows: int, columns: int, batch: int = 1) -> Tensor:
    size = (batch, config.z_dim, frames, rows, columns)
    return torch.randn(size, generator=torch.Generator().manual_seed(frames))


# --------------------------------------------------------------------------------------------------------------- parity


@TINY
@pytest.mark.parametrize(("frames", "rows", "columns"), [(1, 3, 1), (5, 2, 3), (17, 1, 2)])
def test_equals_diffusers(config: VAEConfig, frames: int, rows: int, columns: int) -> None:
    reference = diffusers_vae(config).requires_grad_(False)
    randomise(reference)
    vae = from_diffusers(reference, config)
    video, latents = (
        make_video(config, frames, rows, columns, 2),
        make_latents(config, 1 + frames // 4, rows, columns, 2),
    )
    posterior = reference.encode(video).latent_dist
    with torch.no_grad():
        mean, logvar = vae.encode_moments(video)
        assert (mean - posterior.mean).abs().max() < 2e-5
        assert (logvar.clamp(-30, 20) - posterior.logvar).abs().max() < 2e-5
        assert (vae.decode(latents) - reference.decode(latents).sample).abs().max() < 2e-5


@TINY
def test_gradients_equal_diffusers(config: VAEConfig) -> None:
    """Gradients of every parameter: the in-place operations and skipped kernel taps must not cost any."""
    reference = diffusers_vae(config)
    randomise(reference)
    vae = from_diffusers(reference, config)
    video, latents = make_video(config, 5, 1, 2), make_latents(config, 2, 1, 2)
    reference.encode(video).latent_dist.mean.square().sum().backward()
    (reference.decode(latents / 4).sample - 0.1).square().sum().backward()
    vae.encode(video, chunk=None).square().sum().backward()
    (vae.decode(latents / 4, chunk=None) - 0.1).square().sum().backward()
    names = diffusers_vae_names([name for name, _ in reference.named_parameters()])
    assert names is not None
    ours = dict(vae.named_parameters())
    for name, theirs in reference.named_parameters():
        expected, got = theirs.grad, ours[names[name]].grad
        assert expected is not None and got is not None, name
        assert (got - expected).norm() <= 1e-4 * expected.norm() + 1e-6, name


# ------------------------------------------------------------------------------------------------------------ streaming


@TINY
@pytest.mark.parametrize(("begin", "end", "chunk"), [(1, 61, 1), (1, 60, 2), (0, 61, 3), (7, 50, 2), (30, 61, 1)])
def test_frames_that_stand_still_are_encoded_once(config: VAEConfig, begin: int, end: int, chunk: int) -> None:
    """Bit for bit what computing all of them gives, whatever comes before and after them; and faster."""
    vae, video = make_vae(config), make_video(config, 61, 2, 2)
    video[:, :, begin:end] = video[:, :, begin : begin + 1]
    count = Counted(vae.encoder.downsamples[0])
    latents = vae.encode(video, chunk=chunk)
    skipped, count.frames = count.frames, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wan_core.models.vae.vae.still_since", lambda video: list(range(video.shape[2])))
        expected = vae.encode(video, chunk=chunk)
    assert torch.equal(latents, expected)
    assert count.frames == 61 and skipped <= 61 - (end - begin) + 12 + 8 * chunk


def test_pictures_that_stand_still_give_the_same_bits() -> None:
    """Pictures are stored channels last, and the CPU's convolutions are others for them."""
    vae, _ = load_vae_only("tiny", None, "cpu", "fp32", 16)
    pictures = torch.zeros(1, 17, 96, 96, 3)
    pictures[:, 0] = torch.rand(96, 96, 3, generator=torch.Generator().manual_seed(0))
    latents = vae.encode(pictures.movedim(-1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wan_core.models.vae.vae.still_since", lambda video: list(range(video.shape[2])))
        assert torch.equal(latents, vae.encode(pictures.movedim(-1, 1)))


class Counted:
    """How many frames a layer computes."""

    def __init__(self, layer: nn.Module) -> None:
        self.frames, self.forward = 0, layer.forward
        layer.forward = self  # type: ignore[method-assign]

    def __call__(self, x: Tensor, chunk: Chunk) -> Tensor:
        self.frames += x.shape[2]
        return self.forward(x, chunk)


@TINY
def test_chunks_do_not_matter(config: VAEConfig) -> None:
    vae, video, latents = make_vae(config), make_video(config, 17, 1, 2), make_latents(config, 5, 1, 2)
    encoded, decoded = vae.encode(video, chunk=None), vae.decode(latents, chunk=None)
    for chunk in (1, 3, 5):
        assert (vae.encode(video, chunk=chunk) - encoded).abs().max() < 1e-5
        assert (vae.decode(latents, chunk=chunk) - decoded).abs().max() < 1e-5


@TINY
def test_encoder_and_decoder_are_causal(config: VAEConfig) -> None:
    """What comes later changes nothing before it."""
    vae, video, latents = make_vae(config), make_video(config, 13, 1, 1), make_latents(config, 4, 1, 1)
    later_video, later_latents = video.clone(), latents.clone()
    later_video[:, :, 5:] = 0.5
    later_latents[:, :, 2:] = 0.5
    difference = (vae.encode(video) - vae.encode(later_video)).abs().amax(dim=(0, 1, 3, 4))
    assert difference[:2].max() == 0 < difference[2:].min()
    difference = (vae.decode(latents) - vae.decode(later_latents)).abs().amax(dim=(0, 1, 3, 4))
    assert difference[:5].max() == 0 < difference[5:].min()


@TINY
def test_memory_of_a_stream_is_bounded(config: VAEConfig) -> None:
    vae, latents = make_vae(config), make_latents(config, 5, 1, 1)
    history: dict[nn.Module, Tensor] = {}
    history_bytes = []
    for t in range(5):
        vae.decoder(latents[:, :, t : t + 1], Chunk(first=t == 0, last=t == 4, history=history))
        history_bytes.append(sum(tensor.untyped_storage().nbytes() for tensor in history.values()))
    assert 0 < history_bytes[0] < history_bytes[1] == history_bytes[2] == history_bytes[3]
    assert history_bytes[4] == 0


# ---------------------------------------------------------------------------------------------------------------- files


@cache
def shapes_of(config: VAEConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in VideoVAE(config).state_dict().items()}


@FULL
def test_diffusers_names_are_a_bijection(config: VAEConfig) -> None:
    with torch.device("meta"):
        theirs = {name: tuple(tensor.shape) for name, tensor in diffusers_vae(config).state_dict().items()}
    ours = shapes_of(config)
    names = diffusers_vae_names(theirs.keys())
    assert names is not None
    assert names.keys() == theirs.keys()
    assert {names[name]: shape for name, shape in theirs.items()} == ours
    assert diffusers_vae_names(ours.keys()) is None
    assert diffusers_vae_names([*theirs, "decoder.extra.weight"]) is None
    assert diffusers_vae_names([*theirs, "decoder.up_blocks.0.resnets.99999.conv1.weight"]) is None
    assert diffusers_vae_names([]) is None


OTHER = (
    replace(TINY_21, dim_mult=(1, 2), temporal_downsample=(True,), num_res_blocks=3, decoder_dim=8),
    replace(TINY_21, dim_mult=(2, 2, 4), temporal_downsample=(False, False)),
    replace(TINY_22, patch=4, num_res_blocks=2),
)


@pytest.mark.parametrize("config", [VAE_21, VAE_22, TINY_21, TINY_22, *OTHER])
def test_config_from_shapes(config: VAEConfig) -> None:
    assert vae_config(shapes_of(config), {}) == config


@torch.inference_mode()
@pytest.mark.parametrize("channels", [4, 6])
@pytest.mark.parametrize("beside", [False, True])
def test_a_block_in_one_pass(channels: int, beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives what it gives layer by layer, in chunks of one frame and of more, with each frame's earlier ones beside
    it too; and its second convolution finds nothing in memory that it does not read."""
    torch.manual_seed(0)
    block, passes, alive = ResidualBlock(4, channels), Passes(beside), []
    x = torch.randn(1, 4, 8, 5, 6)

    def run() -> Tensor:
        history: dict[Any, Tensor] = {}
        spans = (0, 1), (1, 4), (4, 8)
        chunks = (Chunk(first=start == 0, last=stop == 8, history=history) for start, stop in spans)
        return torch.cat([block(x[:, :, slice(*span)], chunk) for span, chunk in zip(spans, chunks, strict=True)], 2)

    def convolve(conv: CausalConv3d, extended: Tensor, chunk: Chunk, biased: bool = True) -> Tensor:
        alive.append(len(passes.read) % 2 == 0 and conv is block.residual["6"] and passes.read[-1]() is not None)
        return real(conv, extended, chunk, biased)

    expected, real = run(), CausalConv3d.convolve
    monkeypatch.setattr(CausalConv3d, "convolve", convolve)
    with passes.in_place():
        torch.testing.assert_close(run(), expected)
    assert not any(alive) and len(alive) == 3 * (2 + (channels != 4))


# ---------------------------------------------------------------------------------------------------------------- GPUs

CUDA = torch.device("cuda", 0)
WIDE_21, WIDE_22 = (replace(config, encoder_dim=32, decoder_dim=32) for config in (TINY_21, TINY_22))
CONFIGS = pytest.mark.parametrize("config", [WIDE_21, WIDE_22], ids=["2.1", "2.2"])


def on_gpu(config: VAEConfig) -> VideoVAE:
    return optimize_vae(make_vae(config).to(CUDA, torch.bfloat16), CUDA)


@pytest.mark.gpu
@torch.inference_mode()
@CONFIGS
@pytest.mark.parametrize("chunk", [1, 2, None])
@pytest.mark.parametrize("beside", [0, 32])
def test_the_kernel_is_nearer_to_float32_than_torch(
    config: VAEConfig, chunk: int | None, beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wan_core.models.vae.layers.BESIDE", beside)
    vae, exact = on_gpu(config), make_vae(config)
    latents, video = make_latents(config, 5, 4, 6), make_video(config, 17, 4, 6)
    for run, x in (("decode", latents), ("encode", video)):
        expected = getattr(exact, run)(x)
        error = relative(getattr(vae, run)(x, chunk=chunk).cpu(), expected)
        with fused.use("torch"):
            plain = relative(getattr(vae, run)(x, chunk=chunk).cpu(), expected)
        assert error < 1.1 * plain and error < 0.1, (run, error, plain)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("beside", [0, 32])
def test_frames_that_stand_still_are_the_same_bits_on_a_gpu(beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated frame equals a computed one, as on the CPU."""
    monkeypatch.setattr("wan_core.models.vae.layers.BESIDE", beside)
    vae, video = on_gpu(WIDE_21), make_video(WIDE_21, 61, 4, 4).to(CUDA)
    video[:, :, 1:] = 0
    latents = vae.encode(video)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wan_core.models.vae.vae.still_since", lambda video: list(range(video.shape[2])))
        assert torch.equal(latents, vae.encode(video))


@pytest.mark.gpu
@TINY
def test_cuda_equals_cpu_and_decoding_does_not_synchronise(config: VAEConfig) -> None:
    vae, latents = make_vae(config), make_latents(config, 3, 2, 3)
    expected, video = vae.decode(latents), make_video(config, 5, 2, 3)
    encoded = vae.encode(video)
    vae.cuda()
    latents, video = latents.cuda(), video.cuda()
    vae.decode(latents)
    torch.cuda.set_sync_debug_mode("error")
    try:
        frames = vae.decode(latents)
        tiled = vae.decode(latents, tile=TileSpec(height=2, width=3, overlap=1))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    again = vae.normalise(vae.encode(video))  # waits for the GPU: it looks whether the video ends in a still
    # TF32 convolutions round inputs to 10 bits.
    assert (frames.cpu() - expected).std() < 0.01
    assert (vae.denormalise(again).cpu() - encoded).std() < 0.01
    assert (tiled.cpu() - expected).std() < 0.01


def test_latents_of_the_other_vae_are_refused_by_its_name() -> None:
    with pytest.raises(OptionError, match=r"it is that of 5B. Choose wan_2.1_vae, the VAE of A14B"):
        check_latents(48, (1, 16, 2, 6, 6))
    with pytest.raises(OptionError, match=r"Choose wan2.2_vae, the VAE of 5B$"):
        check_latents(16, (1, 48, 2, 6, 6))
    with pytest.raises(OptionError, match=r"this VAE decodes \[batch, 16, frames, rows, columns\]$"):
        check_latents(16, (16, 2, 6, 6))
    check_latents(16, (1, 16, 2, 6, 6))


def test_statistics_from_metadata() -> None:
    config = replace(TINY_21, z_dim=4, latents_mean=(0.5, -1.0, 0.0, 2.0), latents_std=(1.0, 2.0, 0.5, 1e-3))
    shapes = shapes_of(config)
    mean, std = json.dumps(config.latents_mean), json.dumps(config.latents_std)
    assert vae_config(shapes, {"latents_mean": mean, "latents_std": std}) == config
    with pytest.raises(ValueError, match="metadata"):
        vae_config(shapes, {})
    for bad in (
        "",
        "[1, 2, 3]",
        "[1, 2, 3, NaN]",
        '[1, 2, 3, "4"]',
        "{}",
        "[" * 50_000,
        "[1, 1, 1, 0]",
        "[1, 1, 1, true]",
    ):
        with pytest.raises(ValueError, match="latents_std"):
            vae_config(shapes, {"latents_mean": mean, "latents_std": bad})
