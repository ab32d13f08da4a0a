"""What the nodes ask of the engine: conditioning and masks as ComfyUI carries them, pictures, previews, drawings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.decoded import decode_images
from wan_core import OptionError, load_text_encoder, load_vae
from wan_core.execution.report import Report
from wan_core.media.preview import TINY as TINY_MAP
from wan_core.media.video import fit_image
from wan_core.models.text.tokenizer import TokenCount
from wan_core.models.text.umt5 import PromptCache
from wan_core.models.vae.config import VAE_21, VAE_22
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.media import video_to_pixels
from wan_core.models.wan.families.wan.inputs import (
    check_first,
    frame_mask,
    hold_first,
    image_channels,
    join_image,
    known_first,
    known_frames,
)
from wan_core.pipeline.decode import decode_latents
from wan_core.pipeline.sources import TINY, find_experts
from wan_core.sampling.conditioning import empty_latents
from wan_lab.shapes import SCENES, draw

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def vae() -> VideoVAE:
    return load_vae(TINY / "vae.safetensors", dtype=torch.float32)


# -------------------------------------------------------------------------------------------------------- conditioning


@pytest.mark.parametrize("ends", ["first", "last", "both"])
def test_image_conditioning_is_the_same_through_comfyui_s_keys(vae: VideoVAE, ends: str) -> None:
    """The CLI's way in one go, and the nodes' way by latents and mask, one channel or four."""
    first, last = torch.rand(2, 1, 3, 1, 32, 32) * 2 - 1
    pictures = (first if ends != "last" else None, last if ends != "first" else None)
    whole = image_channels(vae, *pictures, 9)
    video, unknown = known_frames(*pictures, 9)
    latents = vae.encode(video)
    mask = frame_mask(unknown, latents)
    assert torch.equal(join_image(latents, mask, vae.config), whole)
    assert whole.shape == (1, 20, 3, 4, 4)
    known_mask = whole[0, :4, :, 0, 0]
    assert known_mask[:, 0].tolist() == ([1] * 4 if ends != "last" else [0] * 4)
    assert known_mask[:, -1].tolist() == ([0, 0, 0, 1] if ends != "first" else [0] * 4)
    if ends == "first":  # WanImageToVideo's mask: one channel per latent frame
        native = torch.ones(1, 1, 3, 4, 4)
        native[:, :, 0] = 0
        assert torch.equal(join_image(latents, native, vae.config), whole)
        assert torch.equal(join_image(latents, native[:, :, :1], vae.config), whole), "frames left out are unknown"


def test_image_conditioning_that_does_not_fit_is_refused() -> None:
    with pytest.raises(OptionError, match="none was given"):
        known_frames(None, None, 5)
    with pytest.raises(OptionError, match=r"latents \[batch, 16"):
        join_image(torch.zeros(1, 48, 2, 4, 4), torch.ones(1, 1, 2, 4, 4), VAE_21)
    with pytest.raises(OptionError, match="mask"):
        join_image(torch.zeros(1, 16, 2, 4, 4), torch.ones(1, 1, 2, 32, 32), VAE_21)


def test_a_known_first_latent_frame_travels_in_the_latent() -> None:
    latents, first = empty_latents(VAE_22, 64, 32, 9), torch.randn(1, 48, 1, 2, 4)
    samples, unknown = hold_first(first, latents)
    first_latents = known_first(samples, unknown, VAE_22)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (VAE_22.latents_mean, VAE_22.latents_std))
    assert first_latents is not None
    torch.testing.assert_close(first_latents, (first - mean) / std)
    assert known_first(samples, torch.ones_like(unknown), VAE_22) is None
    for bad in (torch.zeros_like(unknown), unknown.flip(2), unknown[:, :, :1], torch.rand(unknown.shape)):
        with pytest.raises(OptionError, match="mask"):
            known_first(samples, bad, VAE_22)


@given(first=st.integers(0, 6), last=st.integers(0, 3))
def test_several_first_and_last_frames_are_known(first: int, last: int) -> None:
    """The mask of ComfyUI's WanFirstLastFrameToVideo: a latent frame has four video frames, the first repeats."""
    given_ones = [torch.rand(1, 3, n, 8, 8) if n else None for n in (first, last)]
    if first + last == 0:
        return
    video, unknown = known_frames(*given_ones, 9)
    native = torch.ones(12)
    native[: first + 3 if first else 0] = 0
    native[len(native) - last :] = 0
    mask = frame_mask(unknown, torch.zeros(1, 16, 3, 1, 1))
    assert torch.equal(mask[0, :, :, 0, 0], native.view(3, 4).T)
    for image, frames in ((given_ones[0], slice(0, first)), (given_ones[1], slice(9 - last, 9))):
        assert image is None or torch.equal(video[:, :, frames], image)
    with pytest.raises(OptionError, match="known frames given"):
        known_frames(*given_ones, first + last - 1)


@given(count=st.integers(1, 20), frames=st.integers(0, 4))
def test_first_frames_of_ti2v_are_whole_latent_frames(count: int, frames: int) -> None:
    total = 4 * frames + 1
    if count % 4 == 1 and count < total:
        check_first(count, total, VAE_22)
        first = torch.rand(1, 48, (count - 1) // 4 + 1, 2, 2)
        samples, unknown = hold_first(first, torch.zeros(2, 48, frames + 1, 2, 2))
        first_latents = known_first(samples, unknown, VAE_22)
        assert first_latents is not None and first_latents.shape[2] == first.shape[2]
    else:
        with pytest.raises(OptionError, match="this model takes 1, 5, 9"):
            check_first(count, total, VAE_22)


# ------------------------------------------------------------------------------------------------------------ pictures


class Short:
    """A VAE that runs out of memory unless it may tile."""

    def __init__(self, vae: VideoVAE) -> None:
        self.vae, self.config, self.strips = vae, vae.config, vae.strips

    def decode_stream(self, latents: Tensor, *, tile: TileSpec | None = None, **how: Any) -> Iterator[Tensor]:
        if tile is None:
            raise torch.cuda.OutOfMemoryError("no memory")
        return self.vae.decode_stream(latents, tile=tile, **how)


def test_decoding_gives_pictures_of_all_videos_and_says_how_far_it_is(vae: VideoVAE) -> None:
    latents = torch.randn(2, 16, 2, 4, 6)
    said: list[tuple[int, int]] = []
    images = decode_images(vae, latents, Report(CPU), on_frames=lambda done, total: said.append((done, total)))
    assert images.shape == (10, 32, 48, 3) and images.dtype == torch.float32
    assert said == [(1, 10), (5, 10), (6, 10), (10, 10)]
    expected = torch.cat([video_to_pixels(vae.decode(video)) for video in latents.split(1)])
    torch.testing.assert_close(images, expected)
    small = decode_images(vae, latents, Report(CPU), dtype=torch.uint8)
    assert (small.float() / 255 - images).abs().max() <= 0.5 / 255 + 1e-6


def test_decoding_out_of_memory_goes_on_in_tiles_and_is_reported(vae: VideoVAE) -> None:
    latents, report = torch.randn(1, 16, 2, 4, 4), Report(CPU)
    images = decode_images(Short(vae), latents, report)  # type: ignore[arg-type]
    torch.testing.assert_close(images, decode_images(vae, latents, Report(CPU)), atol=1e-5, rtol=0)
    assert "decoded in tiles" in report.notes[0]
    with pytest.raises(OptionError, match="this VAE decodes"):
        decode_images(vae, latents[0], report)


class ShortLater(Short):
    """Runs out of memory when some frames are finished."""

    def decode_stream(self, latents: Tensor, *, tile: TileSpec | None = None, **how: Any) -> Iterator[Tensor]:
        pieces = self.vae.decode_stream(latents, tile=tile, **how)
        if tile is not None:
            yield from pieces
            return
        yield next(pieces)
        yield next(pieces)
        raise torch.cuda.OutOfMemoryError("no memory")


def test_each_frame_is_written_once_where_memory_runs_out_later(vae: VideoVAE) -> None:
    latents, report, taken = torch.randn(1, 16, 3, 4, 4), Report(CPU), []
    frames = decode_latents(ShortLater(vae), latents, report, taken.extend)  # type: ignore[arg-type]
    expected = decode_latents(vae, latents, Report(CPU))
    assert "decoded in tiles" in report.notes[0]
    assert len(taken) == len(frames) == 9 and np.abs(np.stack(taken).astype(int) - expected).max() <= 1


def test_all_frames_are_there_where_writing_them_ends_early(vae: VideoVAE) -> None:
    latents, report = torch.randn(1, 16, 3, 4, 4), Report(CPU)
    with torch.inference_mode():  # as ComfyUI runs nodes
        frames = decode_latents(vae, latents, report, lambda frames: next(frames))
    assert np.array_equal(frames, decode_latents(vae, latents, Report(CPU)))
    assert set(report.phases) == {"decode", "write"}
    with torch.inference_mode():
        assert decode_images(vae, latents, Report(CPU)).shape == (9, 32, 32, 3)


def test_pictures_are_scaled_to_cover_and_cut_in_the_middle() -> None:
    wide = np.zeros((40, 120, 3), np.float32)
    wide[:, 40:80] = 1
    fitted = fit_image(wide, (32, 32))
    assert fitted.shape == (32, 32, 3) and fitted[:, 2:-2].min() > 0.99
    assert fit_image(wide, (120, 40)) is wide


# ------------------------------------------------------------------------------------------------- previews and drawing


def test_the_preview_of_the_embedded_model_shows_the_colours_of_a_clip(vae: VideoVAE) -> None:
    """The clips are none that the map was fitted to; the error is in levels of 255."""
    for scene in SCENES[7::61]:
        clip = draw([scene], seed=7, frames=9)
        picture = TINY_MAP.picture(vae.normalise(vae.encode(clip)))
        assert picture.size == (256, 256)
        shown = np.asarray(picture.resize((12, 12)), dtype=float)
        truth = ((clip[0, :, 4] + 1) / 2).permute(1, 2, 0).numpy() * 255
        assert np.abs(shown - truth.reshape(12, 8, 12, 8, 3).mean((1, 3))).mean() < 36, scene


# ------------------------------------------------------------------------------------------------------ text and files


def test_known_prompts_never_run_the_encoder_again() -> None:
    encoder, runs = load_text_encoder(TINY / "text_encoder.safetensors", dtype=torch.float32), []

    def read(prompts: Sequence[str]) -> tuple[torch.Tensor, list[TokenCount]]:
        runs.append(1)
        return encoder.read(prompts)

    cache = PromptCache(limit=2)
    texts = ["a red circle moving right on a blue background", ""]
    first = cache.encode(texts, read)
    again = cache.encode(texts, read)
    assert len(runs) == 1 and all(map(torch.equal, first, again))
    for text, rows in zip(texts, first, strict=True):
        torch.testing.assert_close(rows, encoder.encode([text]), atol=1e-5, rtol=1e-4)
    cache.encode(["a green star"], read)
    cache.encode(texts, read)
    assert len(runs) == 3, "the oldest was dropped"


def test_experts_are_recognised_with_or_without_the_second_file(tmp_path: Path) -> None:
    both = find_experts(TINY / "t2v_high.safetensors", TINY / "t2v_low.safetensors")
    assert both.task.name == "t2v-tiny" and both.task.boundary == 0.875 and both.low is not None
    assert both.vae == load_vae(TINY / "vae.safetensors").config
    alone = find_experts(TINY / "i2v_low.safetensors")
    assert alone.task.name == "i2v-tiny" and not alone.task.two_experts and alone.task.boundary == 0
    with pytest.raises(OptionError, match="experts differ"):
        find_experts(TINY / "t2v_high.safetensors", TINY / "i2v_low.safetensors")
