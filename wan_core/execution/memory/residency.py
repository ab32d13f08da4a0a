"""Which models are on the device, and how they get there.

`resident` keeps everything on the device. Under the others, weights are in host memory, pinned where there is enough of
it, and are copied to the device when they are used: `swap` has one transformer at a time on the device, `stream` only
some of its blocks, and the others pass through (`wan_core.execution.memory.streaming`). Experts of one layout share
their device memory. Text encoder and VAE leave when their memory is needed, and come back when they are used; a text
encoder that does not fit streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import nn

from wan_core.config.host_memory import available_bytes
from wan_core.execution.memory.host_weights import HostWeights, Layout, tensors_of
from wan_core.execution.memory.streaming import Stage
from wan_core.execution.report import GIB
from wan_core.models.text.umt5 import TextEncoder
from wan_core.models.wan.config import PreparedForm
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.linear import is_attached

Policy = Literal["resident", "swap", "stream"]


class Waits(NamedTuple):
    """How weights wait in host memory. copy: pinned there; False: they stay where they are, in a mapped file, all but
    `pinned` bytes of them; None: as the memory allows that is available."""

    copy: bool | None = None
    pinned: int = 0


KEPT_FREE = 0.1  # of the host's available memory that pinned weights leave to others


class Residency:
    """Named models under one policy. `use` returns a model that is ready, and may send others away.

    resident_blocks: under `stream`, how many blocks of a transformer stay on the device. room: bytes on the device for
    weights and what runs beside them; None: one model at a time. beside: what runs beside each model, in bytes.
    streams_text: all blocks of the text encoder stream, unless everything stays on the device. A prompt runs through
    them once, so that blocks that stay would save nothing. form: how transformers keep what they prepare beside text;
    None: they choose.
    """

    def __init__(
        self,
        device: torch.device,
        policy: Policy,
        *,
        resident_blocks: int = 0,
        room: int | None = None,
        beside: Mapping[str, int] | None = None,
        streams_text: bool = False,
        form: PreparedForm | None = None,
    ) -> None:
        self.device, self.streams_text, self.form = device, streams_text, form
        self.policy: Policy = policy
        self.resident_blocks, self.room, self.beside = resident_blocks, room, dict(beside or {})
        self.models: dict[str, nn.Module] = {}
        self.host_weights: dict[str, HostWeights] = {}
        self.stages: dict[tuple[Layout, ...], Stage] = {}  # the one used last stands last
        self.notes: list[str] = []

    @property
    def load_device(self) -> torch.device:
        """Where a loader should put weights: straight on the device if they stay there."""
        return self.device if self.policy == "resident" else torch.device("cpu")

    def add(self, name: str, model: nn.Module, waits: Waits = Waits()) -> None:  # noqa: B008  (immutable)
        """Take `model` over. Its weights move to host memory, unless they stay on the device."""
        self.models[name] = model
        if self.policy != "resident":
            self._move_to_host(name, model, waits)

    def remove(self, name: str) -> None:
        """Forget a model. Its weights are in host memory then, unless they stayed on the device."""
        self.release(name)
        del self.models[name]
        self.host_weights.pop(name, None)

    def use(self, name: str) -> nn.Module:
        """The model, on the device or coming there in time. Others leave where room is short."""
        model = self.models[name]
        if isinstance(model, WanModel):
            model.prepared_form = self.form
        if self.policy != "resident":
            weights = self.host_weights[name]
            stage = self.stages.pop(weights.layout)
            self.stages[weights.layout] = stage
            need = stage.nbytes(weights) + self.beside.get(name, 0)
            self._send_away([other for other in self.stages.values() if other is not stage], need)
            if isinstance(model, WanModel):
                model.runners.weights = stage
            elif isinstance(model, TextEncoder):
                model.encoder.weights = stage
            experts = [one for one in self.host_weights.values() if one.layout == weights.layout]
            stage.use(weights, next((one for one in experts if one is not weights), None))
        return model

    def release(self, name: str) -> None:
        """Give the device memory of a model back, if it is on its stage, or on its way there."""
        if self.policy != "resident":
            stage = self.stages[self.host_weights[name].layout]
            if stage.has(self.host_weights[name]):
                stage.leave_device()

    def forget_copies(self, name: str) -> None:
        """Discard every copy of its weights on the device: those in host memory are about to change."""
        if self.policy != "resident":
            self.stages[self.host_weights[name].layout].leave_device()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

    def follow(
        self,
        policy: Policy,
        resident_blocks: int,
        room: int | None,
        beside: Mapping[str, int],
        streams_text: bool = False,
        form: PreparedForm | None = None,
    ) -> None:
        """Go over to another plan. Weights that are in host memory stay there, also where all would fit."""
        self.beside, self.form = dict(beside), form
        if self.policy == "resident":
            if policy == "resident":
                return
            self.policy, self.streams_text = policy, streams_text
            for name, model in self.models.items():
                self._move_to_host(name, model)
        elif policy == "resident":
            policy = "swap"
        self.room = room
        now = self.policy, self.resident_blocks, self.streams_text
        if (policy, resident_blocks, streams_text) != now or not self.stages:
            self.policy, self.resident_blocks, self.streams_text = policy, resident_blocks, streams_text
            self._rebuild()

    def _rebuild(self) -> None:
        models = {weights.layout: weights.model for weights in self.host_weights.values()}
        for layout, stage in list(self.stages.items()):
            stage.leave_device()
            if layout in models:
                self.stages[layout] = self._stage(models[layout])
            else:
                del self.stages[layout]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def cheaper(self, name: str) -> str | None:
        """After out of memory with the model `name`: the next plan that takes less device memory, in words; None where
        there is none. Nothing is on the device then; `use` brings it back."""
        model, before = self.models[name], self.policy
        if self.policy == "resident":
            self.policy = "swap"
            for other, each in self.models.items():
                self._move_to_host(other, each)
            change = "one model at a time"
        elif self.room is not None:
            self.room, change = None, "one model at a time"
        elif isinstance(model, WanModel) and (self.policy == "swap" or self.resident_blocks > 0):
            blocks = len(model.blocks) if self.policy == "swap" else self.resident_blocks
            self.policy, self.resident_blocks = "stream", blocks // 2
            change = f"{blocks // 2} of {len(model.blocks)} blocks stay, the others stream"
        elif isinstance(model, TextEncoder) and not self.streams_text:
            self.streams_text, change = True, "the blocks of the text encoder stream"
        else:
            return None
        self._rebuild()
        return f"{before} -> {self.policy}: {change}"

    def weights_on_device(self) -> int:
        """Bytes of weights that are there now, attached LoRAs included."""
        distinct = {id(model): model for model in self.models.values()}.values()
        stay = sum(
            tensor.nbytes
            for model in distinct
            for tensor_name, tensor in tensors_of(model).items()
            if self.policy == "resident" or is_attached(tensor_name)
        )
        return stay + sum(stage.held for stage in self.stages.values())

    def weights_in_host_memory(self) -> int:
        """Bytes of weights that wait there, or in their files."""
        distinct = {id(weights): weights for weights in self.host_weights.values()}.values()
        return sum(weights.nbytes for weights in distinct)

    @property
    def kept_form(self) -> PreparedForm | None:
        """`form` of the run before; None: there was none."""
        return next((model.prepared_form for model in self.models.values() if isinstance(model, WanModel)), None)

    def _move_to_host(self, name: str, model: nn.Module, waits: Waits = Waits()) -> None:  # noqa: B008
        same = next((other for other, shared in self.host_weights.items() if shared.model is model), None)
        if same is not None:
            self.host_weights[name] = self.host_weights[same]
            return
        needed = sum(t.nbytes for t in tensors_of(model).values())
        available, copy = available_bytes(), waits.copy
        if copy is None:
            copy = available is None or needed < available * (1 - KEPT_FREE)
        weights = HostWeights(
            model,
            lock=self.device.type == "cuda",
            copy=copy,
            device=self.device,
            pinned=waits.pinned,
        )
        if read := weights.bytes_in_files:
            self.notes.append(
                f"{name}: {read / GIB:.1f} of {needed / GIB:.1f} GiB stay in the file and are read while the device "
                f"computes: {(available or 0) / GIB:.1f} GiB of host memory are available"
            )
        elif not copy:
            self.notes.append(
                f"{name}: weights are not pinned, {needed / GIB:.1f} GiB beside the others would not fit into "
                f"{(available or 0) / GIB:.1f} GiB of host memory: copies to the device are slower"
            )
        self.host_weights[name] = weights
        if weights.layout not in self.stages:
            self.stages[weights.layout] = self._stage(model)

    def _stage(self, model: nn.Module) -> Stage:
        if isinstance(model, TextEncoder):
            return Stage(self.device, 0 if self.streams_text else None)
        return Stage(self.device, self.resident_blocks if self.policy == "stream" else None)

    def make_room(self, nbytes: int) -> None:
        """Send models away until so many bytes fit that are needed only once."""
        self._send_away(list(self.stages.values()), nbytes)

    def _send_away(self, stages: Sequence[Stage], need: int) -> None:
        """Send models of `stages` away, the one used longest ago first, until so many bytes fit beside the others."""
        others, emptied = [stage for stage in stages if not stage.is_empty], False
        for stage in others:
            if self.room is None or need + sum(other.held for other in others) > self.room:
                stage.leave_device()
                emptied = True
        if emptied and self.device.type == "cuda":
            torch.cuda.empty_cache()  # what comes is of other sizes, and must not find holes only
