"""Text: the prompts of a run become rows of the text encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from wan_core.models.text.tokenizer import TokenCount, prompt_notes
from wan_core.parallel.conditioning import counts_of_all, rows_of_all, text_rank
from wan_core.pipeline.run import Run
from wan_core.sampling.conditioning import Conditioning
from wan_core.sampling.denoise import retried


@torch.no_grad()
def encode_text(run: Run) -> Conditioning:
    """The prompts, and that of the driving video. The report says what was cut, or is not read as it may be meant."""
    job, ranks, rows, counts = run.job, run.models.ranks, None, None
    texts = {"prompt": job.request.prompt}
    if job.plan.reads_negative:
        texts["negative prompt"] = job.negative_prompt
    if job.pose_prompt not in (None, job.request.prompt):
        texts["pose prompt"] = job.pose_prompt
    prompts = list(texts.values())

    def encode() -> tuple[Tensor, list[TokenCount]]:
        encoder = run.memory.fetch("text encoder", run.models.text_encoder)
        with run.report.phase("text"):
            return encoder.read(prompts)

    if ranks is None or ranks.rank == text_rank(ranks):
        rows, counts = retried(run.memory, "text_encoder", encode)
    with run.report.phase("text"):
        rows = rows_of_all(ranks, rows)
        for (name, text), count in zip(texts.items(), counts_of_all(ranks, counts, len(prompts)), strict=True):
            for note in prompt_notes(name, text, count):
                run.warn(note)
    run.models.wait_for_kernels(run.report)  # what encodes pictures has no memory beside it
    by_name = dict(zip(texts, rows.split(1), strict=True))
    pose = {} if job.pose_prompt is None else {"pose_context": by_name.get("pose prompt", by_name["prompt"])}
    return Conditioning(cond=by_name["prompt"], uncond=by_name.get("negative prompt"), inputs=pose)
