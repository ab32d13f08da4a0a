"""This process as the engine of sockets (`sockets.Engine`), with models that ComfyUI's memory manager holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from wan_core.execution.memory.planning import TEXT, Beside, Sizes, plan_memory
from wan_core.execution.memory.streaming import stage_bytes
from wan_core.execution.report import Report
from wan_core.models.text.tokenizer import TokenCount
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.vae.vae import VideoVAE
from wan_core.models.wan.families.media import pixels_to_video, video_to_pixels
from wan_core.models.wan.families.wan.inputs import known_frames
from wan_core.pipeline.check import check_tensor
from wan_core.pipeline.decode import Made, Pieces, decode_to
from wan_core.pipeline.denoise import sample_latents
from wan_core.pipeline.encode import encode_images, encode_video
from wan_core.pipeline.host_sizes import check_sampling
from wan_core.pipeline.memory_planning import Workload, host_room, plan_host
from wan_core.pipeline.run import OnStep, RunOwner
from wan_core.sampling.pace import BlockChecks
from wan_core.sampling.plan import Plan
from wan_core.sampling.sparsity.run import check_kernel
from wan_core.sampling.start import Leftover

from . import host
from .memory import ComfyMemory, plan_experts
from .sockets import ModelSocket, Sampling, TextSocket, VAESocket


class ComfyEngine:
    in_workers = False
    read_ahead = staticmethod(host.read_ahead)
    prepare_kernels = staticmethod(host.prepare_kernels)

    @property
    def device(self) -> torch.device:
        return host.device()

    def text(self, text: TextSocket, prompts: Sequence[str]) -> tuple[Tensor, list[TokenCount]]:
        """Blocks of the encoder stream if it does not fit on the device as a whole."""
        patcher, part = text.patcher, text.patcher.part
        sizes = Sizes(units=(0,), experts=1, text_encoder=part.bytes, text_stage=stage_bytes(part.units, 0), vae=0)
        if plan_memory(sizes, Beside(text=TEXT, denoise=0, decode=0), host.room(), "swap").streams_text:
            if not patcher.in_host_memory:
                patcher.wait(part, plan_host({"text_encoder": part}, host_room()).waits("text_encoder"))
            patcher.stream(0)
        return cast(TextEncoder, patcher.use(TEXT)).read(prompts)

    def encode(self, vae: VAESocket, pixels: Tensor) -> Tensor:
        return encode_images(_loaded(vae, *vae.latent_size(pixels)), pixels)

    def encode_known(
        self, vae: VAESocket, first: Tensor | None, last: Tensor | None, frames: int, keyframes: Mapping[int, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The clip exists only on the device."""
        place = {"device": host.device(), "dtype": vae.patcher.part.dtype}

        def there(pictures: Tensor) -> Tensor:
            return pixels_to_video(video_to_pixels(pictures)).to(**place)

        first, last = (None if end is None else there(end) for end in (first, last))
        clip, unknown = known_frames(first, last, frames, {number: there(one) for number, one in keyframes.items()})
        return encode_video(_loaded(vae, *vae.latent_size(clip[0, 0])), clip), unknown.float().cpu()

    def decode_to(
        self, vae: VAESocket, samples: Tensor, report: Report, consume: Callable[[Pieces], Made], **how: Any
    ) -> Made:
        return decode_to(_loaded(vae, *samples.shape[-2:]), samples, report, consume, **how)

    def check(self, model: ModelSocket, plan: Plan, shape: tuple[int, ...]) -> None:
        if len(shape) != 5:
            return  # refused by whatever reads the latents
        dit, settings = model.experts.dit, model.settings
        tokens = dit.tokens(max(plan.window_sizes(shape[2])), *shape[3:])
        if host.device().type == "cpu":
            beside = plan_experts(model, Workload(shape, plan, batched=False)).beside
            check_sampling(shape, max(beside.values()), host.spare_bytes())
        check_tensor("an activation", (shape[0] * tokens, dit.dim), settings.dtype.itemsize, host.device())
        if plan.sparse is not None:
            check_kernel(plan.sparse, settings.attention, host.device(), dit.head_dim, tokens)

    def owner(self, model: ModelSocket, workload: Workload, report: Report) -> RunOwner:
        return ComfyMemory(model, workload, report)

    def sample(self, run: Sampling, on_step: OnStep, on_leftover: Callable[[Leftover], None]) -> Tensor:
        plan, vae = run.workload.plan, run.model.experts.vae
        run.report.notes += run.notes
        return sample_latents(
            plan,
            self.owner(run.model, run.workload, run.report),
            run.conditioning,
            run.start.sample(plan, vae, host.device()),
            vae,
            run.report,
            start=run.start,
            batched=run.workload.batched,
            on_step=on_step,
            on_leftover=on_leftover,
            checks=BlockChecks(host.check_interruption),
        )


HERE = ComfyEngine()


def _loaded(vae: VAESocket, rows: int, columns: int) -> VideoVAE:
    """On the device, with room for latents of `rows` x `columns`."""
    return cast(VideoVAE, vae.patcher.use(vae.working_bytes(rows, columns)))
