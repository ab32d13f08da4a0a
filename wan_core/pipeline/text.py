"""Text: the prompts of a run become rows of the text encoder, and the frames that each holds for become penalties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wan_core.models.text.tokenizer import TokenCount, prompt_notes
from wan_core.models.wan.families.clips import Clip
from wan_core.parallel.conditioning import counts_of_all, rows_of_all, text_rank
from wan_core.pipeline.run import Run
from wan_core.sampling.conditioning import Conditioning, penalty_rows
from wan_core.sampling.denoise import retried
from wan_core.sampling.timed_prompts import TimedText, check_cut


@torch.no_grad()
def encode_text(run: Run) -> Conditioning:
    """The prompts, and that of the driving video; of a long video the texts of all clips, see `text_of_clip`. The
    report says what was cut, or is not read as it may be meant. Raises OptionError where prompts of parts of the video
    would be cut."""
    job, ranks, rows, counts = run.job, run.models.ranks, None, None
    timed = job.texts
    texts = {"prompt": timed[0].text, **{f"prompt {n}": one.text for n, one in enumerate(timed[1:], 2)}}
    if job.plan.reads_negative:
        texts["negative prompt"] = job.negative_prompt
    if job.pose_prompt not in (None, job.request.prompt):
        texts["pose prompt"] = job.pose_prompt
    prompts = list(texts.values())
    prefixes = [prefix for one in timed if one.changes for prefix in one.prefixes]

    def encode() -> tuple[Tensor, list[TokenCount]]:
        encoder = run.memory.fetch("text encoder", run.models.text_encoder)
        with run.report.phase("text"):
            rows, counts = encoder.read(prompts)
            return rows, [*counts, *map(encoder.tokenizer.count, prefixes)]

    if ranks is None or ranks.rank == text_rank(ranks):
        rows, counts = retried(run.memory, "text_encoder", encode)
    with run.report.phase("text"):
        rows = rows_of_all(ranks, rows)
        all_counts = counts_of_all(ranks, counts, len(prompts) + len(prefixes))
        for (name, text), count in zip(texts.items(), all_counts, strict=False):
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
        later_cond=torch.cat(later) if later else None,
        penalty=penalties(timed, all_counts[len(prompts) :], job.latent_shape[2] - job.leading, rows),
    )


def text_of_clip(run: Run, text: Conditioning, clip: Clip) -> Conditioning:
    """`text`, which `encode_text` made for all clips, for one of them."""
    if run.job.request.prompts_at is None:
        return text
    own = run.job.text_of(clip)
    number, frames = run.job.texts.index(own), run.job.clip_shape(clip)[2] - run.job.leading
    penalty = text.penalty[number : number + 1, :frames] if text.penalty is not None and own.changes else None
    return replace(text, cond=text.text("cond", number), later_cond=None, penalty=penalty)


def penalties(texts: Sequence[TimedText], counts: Sequence[TokenCount], frames: int, rows: Tensor) -> Tensor | None:
    """`Conditioning.penalty` of `texts`, for latents of so many frames; None where no text changes. counts: of the
    prefixes of those that do. rows: text rows [N, S, D] that it is for. Raises OptionError for a text that was cut."""
    if not any(one.changes for one in texts):
        return None
    found, left = torch.zeros(len(texts), frames, rows.shape[1]), iter(counts)
    for number, text in enumerate(texts):
        if not text.changes:
            continue
        ends = [next(left) for _ in text.prefixes]
        check_cut(ends[-1].given, ends[-1].read)
        found[number] = penalty_rows(text, [end.given - 1 for end in ends], frames, rows.shape[1])
    return found.to(rows.device)
