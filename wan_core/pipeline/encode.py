"""Encode: prompts become rows of the text encoder, and what a family's model takes beside them is made of the pictures,
videos and sound that a request names.

Legend: C latent channels, T/Y/X latent frames, rows, columns, F/H/W video frames, height, width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from wan_core.config import OptionError
from wan_core.media.video import fit_image, load_image, read_frames, short_video, video_facts
from wan_core.models.text.tokenizer import TokenCount, prompt_notes
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.vae.tiling import TileSpec
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.clips import Clip, latents_of
from wan_core.models.wan.families.media import Media, pixels_to_video
from wan_core.parallel.conditioning import text_of_all, text_rank
from wan_core.pipeline.decode import fits_in_memory
from wan_core.pipeline.hearing import hear
from wan_core.pipeline.run import Run
from wan_core.sampling.conditioning import Conditioning, penalty_rows
from wan_core.sampling.denoise import retried
from wan_core.sampling.texts import TimedText, check_cut


@torch.no_grad()
def encode_text(run: Run) -> Conditioning:
    """The prompts, and that of the driving video; of a long video the texts of all clips, see `text_of_clip`. The
    report says what was cut, or is not read as it may be meant. Raises OptionError where prompts of parts of the video
    would be cut."""
    job, ranks, encoded_text = run.job, run.models.ranks, None
    timed = job.texts
    texts = {"prompt": timed[0].text, **{f"prompt {n}": one.text for n, one in enumerate(timed[1:], 2)}}
    if job.plan.reads_negative:
        texts["negative prompt"] = job.negative_prompt
    if job.pose_prompt not in (None, job.request.prompt):
        texts["pose prompt"] = job.pose_prompt
    prompts = list(texts.values())
    prefixes = [prefix for one in timed if one.changes for prefix in one.prefixes]

    def read(missing: Sequence[str]) -> tuple[Tensor, list[TokenCount]]:
        return run.memory.fetch("text encoder", run.models.text_encoder).read(missing)

    def encode() -> tuple[Tensor, list[TokenCount]]:
        cache = run.models.prompts
        with run.report.phase("text"):
            encoded = cache.encode(prompts, read)
            rows = torch.nn.utils.rnn.pad_sequence([one[0] for one in encoded], batch_first=True).to(run.models.device)
            tokenizer = cast(TextEncoder, run.models.residency.models["text_encoder"]).tokenizer
            return rows, [*map(cache.count, prompts), *map(tokenizer.count, prefixes)]

    if ranks is None or ranks.rank == text_rank(ranks):
        encoded_text = retried(run.memory, "text_encoder", encode)
    with run.report.phase("text"):
        rows, counts = text_of_all(ranks, encoded_text, len(prompts) + len(prefixes))
        for (name, text), count in zip(texts.items(), counts, strict=False):
            for note in prompt_notes(name, text, count):
                run.warn(note)
    run.models.wait_for_kernels(run.report)  # what encodes pictures has no memory beside it
    by_name = dict(zip(texts, rows.split(1), strict=True))
    pose = {} if job.pose_prompt is None else {"pose_context": by_name.get("pose prompt", by_name["prompt"])}
    later = [by_name[f"prompt {n}"] for n in range(2, len(timed) + 1)]
    return Conditioning(
        cond=by_name["prompt"],
        uncond=by_name.get("negative prompt"),
        inputs=pose,
        later_cond=tuple(later),
        penalty=penalties(timed, counts[len(prompts) :], job.plan.latent_shape[2] - job.long.leading, rows),
    )


def text_of_clip(run: Run, text: Conditioning, clip: Clip) -> Conditioning:
    """`text`, which `encode_text` made for all clips, for one of them."""
    if run.job.request.prompts_at is None:
        return text
    own = run.job.text_of(clip)
    number, frames = run.job.texts.index(own), run.job.clip_shape(clip)[2] - run.job.long.leading
    penalty = text.penalty[number : number + 1, :frames] if text.penalty is not None and own.changes else None
    return replace(text, cond=text.text("cond", number), later_cond=(), penalty=penalty)


def penalties(texts: Sequence[TimedText], counts: Sequence[TokenCount], frames: int, rows: Tensor) -> Tensor | None:
    """`Conditioning.penalty` of `texts`, for latents of so many frames; None where no text changes. counts: of the
    prefixes of those that do. rows: text rows [N, S, D] that it is for. Raises OptionError for a text that was cut."""
    if not any(one.changes for one in texts):
        return None
    penalty, next_counts = torch.zeros(len(texts), frames, rows.shape[1]), iter(counts)
    for number, text in enumerate(texts):
        if not text.changes:
            continue
        ends = [next(next_counts) for _ in text.prefixes]
        check_cut(ends[-1].given, ends[-1].read)
        penalty[number] = penalty_rows(text, [end.given - 1 for end in ends], frames, rows.shape[1])
    return penalty.to(rows.device)


@torch.no_grad()
def encode_media(run: Run, text: Conditioning) -> Conditioning:
    """`text` with what the family makes of the media of a run; of a long video, for its first clip."""
    clip = run.job.clips[0]
    if run.job.alone and not run.job.request.pictures:
        return text
    return condition(run, clip, clip_media(run, clip, load_media(run), None), text)


@torch.no_grad()
def encode_start(run: Run) -> Tensor | None:
    """The un-normalised latents [1, C, T, Y, X] that video-to-video starts from; None where noise alone does."""
    job = run.job
    if job.request.from_video is None:
        return None
    vae = run.vae()
    with run.report.phase("encode video"):
        frames = load_video(job.request.from_video, (job.width, job.height), job.frames, job.fps)
        return encode_images(vae, frames.to(run.models.device))


def load_media(run: Run) -> Media | None:
    """What drives the clips; None: nothing does."""
    family, job, models = run.family, run.job, run.models
    last = family.clips.driving(job.clips[-1])

    def states(path: str) -> Tensor:
        return hear(models.speech, path, models.residency, run.report)

    return family.load_media(job.request, models.dit_config, (job.width, job.height), job.fps, last, states)


def clip_media(run: Run, clip: Clip, whole: Media | None, carried: Tensor | None) -> dict[str, Tensor]:
    """What a clip is made of, on the device, as `Family.clip_inputs` takes it. whole: of the video. carried: the
    frames that the clip begins with, or of anchored clips latents; None for the first."""
    device, family = run.models.device, run.family
    media: dict[str, Tensor] = {}
    if whole is not None:
        media = {name: part.to(device) for name, part in whole.of(family.clips.driving(clip)).items()}
    if run.job.rules.anchored:
        media |= anchored(run, clip, carried)
    else:
        media |= first_frames(run) if carried is None else {"carried": carried.to(device)}
        media |= keyframes(run, clip)
    if family.leads:
        vae = run.vae()
        with run.report.phase("encode video"):
            media["lead"] = family.clip_lead(vae, media, clip)
    return media


def anchored(run: Run, clip: Clip, latents: Tensor | None) -> dict[str, Tensor]:
    """What a clip that begins with an anchor is given. latents: the newest before it; None: there are none."""
    pictures = first_frames(run)
    media = {"anchor": pictures["image"]}
    if latents is not None:
        media["previous"] = latents[:, :, -latents_of(clip.carried) :]
    if "last_image" in pictures and clip.number + 1 == len(run.job.clips):
        media["last_image"] = pictures["last_image"]
    return media


def condition(run: Run, clip: Clip, media: Mapping[str, Tensor], text: Conditioning) -> Conditioning:
    """What the denoising loop needs for one clip. media: of `clip_media`."""
    job, family, features = run.job, run.family, clip_features(run, clip, media)
    vae = run.vae()
    with run.report.phase("encode video"):
        inputs = family.clip_inputs(job.task, vae, features, media, clip)
    return replace(text, **family.with_settings(job.request, inputs, text.inputs.get("pose_context")))


def clip_features(run: Run, clip: Clip, media: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """CLIP features [1, N, C] of the pictures that the family has CLIP look at for a clip. media: of `clip_media`."""
    request, features = run.job.request, dict[str, Tensor]()
    picture = partial(read_picture, run, next(iter(request.pictures), None))
    for name, frame in run.family.pictures_seen(run.job.task, media, clip, picture).items():
        encoder = run.memory.fetch("CLIP vision encoder", run.models.clip_vision)
        with run.report.phase("encode image"):
            features[name] = encoder(frame[:, :, 0])
    return features


def first_frames(run: Run) -> dict[str, Tensor]:
    """The known first and last frame [1, 3, 1, H, W] in -1..1 on the device, by field of the request."""
    size, paths = (run.job.width, run.job.height), {n: getattr(run.job.request, n) for n in ("image", "last_image")}
    frames = {field: read_picture(run, path, size) for field, path in paths.items()}
    return {field: frame for field, frame in frames.items() if frame is not None}


def keyframes(run: Run, clip: Clip) -> dict[str, Tensor]:
    """The keyframes of a clip for `keyframes_of`; those among carried frames were known in the clip before."""
    size, begin = (run.job.width, run.job.height), clip.first + clip.carried
    within = [one for one in run.job.request.keyframes or () if begin <= one.frame < clip.end]
    pictures = [picture for one in within if (picture := read_picture(run, one.path, size)) is not None]
    if not pictures:
        return {}
    return {"keyframes": torch.cat(pictures, 2), "keyframes_at": torch.tensor([o.frame - clip.first for o in within])}


def read_picture(run: Run, path: str | None, size: tuple[int, int] | None = None) -> Tensor | None:
    """[1, 3, 1, H, W] in -1..1 on the device, resized and cropped to `size` (width, height) if it is given."""
    if path is None:
        return None
    pixels = torch.tensor(load_image(path, size))  # [H, W, 3]
    return pixels_to_video(pixels[None]).to(run.models.device)


def load_video(path: str, size: tuple[int, int], frames: int, fps: int) -> Tensor:
    """So many frames of a video file at `fps`, from its beginning, scaled to cover `size` (width, height) and cropped:
    [F, H, W, 3] in 0..1. Raises OptionError where it is shorter."""
    chosen = video_facts(path, frames / fps).frames_at(fps)[:frames]
    if len(chosen) < frames:
        raise OptionError(short_video(path, len(chosen), frames, fps))
    fitted = (fit_image(np.divide(one, 255, dtype=np.float32), size) for one in read_frames(path, chosen))
    return torch.stack([torch.from_numpy(one) for one in fitted])


@torch.no_grad()
def encode_images(vae: VideoVAE, images: Tensor) -> Tensor:
    """Pictures [F, H, W, 3] in 0..1 -> un-normalised latents float32 [1, C, T, Y, X] on the CPU, F = 4 (T - 1) + 1.

    Out of memory: once more, in tiles. Raises OptionError for a size that does not fit.
    """
    return encode_video(vae, pixels_to_video(images))


@torch.no_grad()
def encode_video(vae: VideoVAE, video: Tensor) -> Tensor:
    """Latents of a video [1, 3, F, H, W] in -1..1, see `encode_images`."""
    latents: list[Tensor] = []
    if not fits_in_memory(lambda: latents.append(vae.encode(video, chunk=1)), retry=True):
        latents.append(vae.encode(video, chunk=1, tile=TileSpec()))
    return latents[0].float().cpu()
