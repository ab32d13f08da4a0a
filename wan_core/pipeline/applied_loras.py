"""The LoRAs of a transformer that is in memory, and how they are changed and taken off.

merged    the sums are computed while parameters are read (`wan_core.checkpoint.lora.merge`). Other LoRAs or strengths
          write the parameters that change again, in place: read from the file, summed and encoded as when the model was
          loaded. So nothing is kept of what was there before, and addresses stay as they are (compiled blocks go
          on)
attached  matrices of low rank beside the linears (`wan_core.ops.quant.linear`); where one cannot be attached, all that
          change its parameter are summed into it in place, and what was there is kept on the host

Without LoRAs every bit is that of a model that never had one. Who holds a model holds its `ModelLoras` beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from wan_core.checkpoint.load import StoredValues, read_again
from wan_core.checkpoint.lora.merge import Change, dense
from wan_core.checkpoint.staged import USUAL, Reading
from wan_core.models.wan.model import WanModel
from wan_core.ops.quant.linear import LowRank, QuantLinear, attach, detach, move_attached
from wan_core.ops.quant.packed import Changed, Packed, PackedLinear
from wan_core.ops.quant.swap import Quantization, encoded_weight
from wan_core.pipeline.loras import Wanted, attachable, merging
from wan_core.pipeline.model_parts import is_packed
from wan_core.pipeline.settings import PartToLoad


def load_with_loras(
    part: PartToLoad, wanted: Sequence[Wanted], device: torch.device, compute: torch.device, how: Reading = USUAL
) -> nn.Module:
    """Read a model to `device`, with LoRAs summed in where that is how they are applied. compute: where it will run."""
    return part.load(device, merging(merged_of(part, wanted), compute), how)


def merged_of(part: PartToLoad, wanted: Sequence[Wanted]) -> Sequence[Wanted]:
    """Those of `wanted` that are summed into the weights of a model that is loaded as `part`: all or none."""
    return wanted if part.lora_mode == "merge" else ()


class ModelLoras:
    def __init__(self, device: torch.device, merged: Sequence[Wanted] = ()) -> None:
        """device: where the model computes. merged: those that were summed in when it was read."""
        self.merged, self.attached = MergedLoras(device, merged), AttachedLoras(device)

    def changes_weights(self, wanted: Sequence[Wanted], part: PartToLoad) -> bool:
        """Whether `apply` would change parameters."""
        merged = merged_of(part, wanted)
        return self.merged.writes_weights(merged) or self.attached.writes_weights(() if merged else wanted)

    def has(self, wanted: Sequence[Wanted], part: PartToLoad) -> bool:
        """Whether just these are on the model, at their strengths."""
        if self.changes_weights(wanted, part):
            return False
        return bool(merged_of(part, wanted)) or self.attached.values == tuple(one.strength for one in wanted)

    def apply(
        self,
        model: WanModel,
        wanted: Sequence[Wanted],
        part: PartToLoad,
        before_writing: Callable[[], None] = lambda: None,
        how: Reading = USUAL,
    ) -> None:
        """Have just these LoRAs on `model`: summed in or attached, as `part` says. before_writing: called before
        weights change; if they stream, it discards their copies on the device. how: weights that change are read
        again."""
        if self.changes_weights(wanted, part):
            before_writing()
        merged = merged_of(part, wanted)
        self.merged.apply(model, merged, part, how)
        original = None if part.part.path is None else StoredValues(part.part.path)
        self.attached.apply(model, () if merged else wanted, original)


class MergedLoras:
    """LoRAs summed into the weights of a model. `parameters`: official names of those that may differ from the file.
    `applied`: which LoRAs are summed in; None while they change, and after a change that was interrupted."""

    def __init__(self, device: torch.device, wanted: Sequence[Wanted]) -> None:
        """device: where sums are computed. wanted: those that were summed in when the model was read."""
        self.device = device
        self.applied: tuple[object, ...] | None = _applied(wanted)
        self.parameters = _changed(wanted)

    def writes_weights(self, wanted: Sequence[Wanted]) -> bool:
        """Whether `apply` would change parameters."""
        return _applied(wanted) != self.applied

    def apply(self, model: WanModel, wanted: Sequence[Wanted], part: PartToLoad, how: Reading = USUAL) -> None:
        """Have just these summed in. part: what `model` was loaded as; one that stays packed is loaded again instead.
        Weights that stream must all be in host memory. After an interruption, the next call writes all that may be
        changed."""
        if not self.writes_weights(wanted):
            return
        source = part.part.path or part.part.memory
        assert source is not None and not is_packed(part.quantization), "loaded again instead"
        self.parameters, self.applied = self.parameters | _changed(wanted), None
        read_again(
            model,
            source,
            self.parameters,
            device=self.device,
            dtype=part.dtype,
            quantization=part.quantization,
            loras=merging(wanted, self.device),
            how=how,
        )
        self.parameters, self.applied = _changed(wanted), _applied(wanted)


class AttachedLoras:
    """LoRAs beside the linears of a model."""

    def __init__(self, device: torch.device) -> None:
        """device: where the model computes."""
        self.device = device
        self.files: tuple[object, ...] = ()
        self.values: tuple[float, ...] = ()
        self.strengths: dict[tuple[tuple[int, int], ...], Tensor] = {}  # ((which LoRA, rank), ...) -> float32 [R]
        self.attached: list[LowRank] = []
        self.patched: dict[str, list[tuple[int, Change]]] = {}  # parameter -> (which LoRA, change)
        self.before: dict[str, dict[str, Tensor]] = {}  # parameter -> the tensors that it was made of, on the host

    def writes_weights(self, wanted: Sequence[Wanted]) -> bool:
        """Whether `apply` would change parameters, or strengths alone."""
        strengths = tuple(one.strength for one in wanted)
        return _files(wanted) != self.files or (bool(self.patched) and strengths != self.values)

    @torch.no_grad()
    def apply(self, model: WanModel, wanted: Sequence[Wanted], original: StoredValues | None = None) -> None:
        """Have just these on `model`, at their strengths. The same files again with other strengths change numbers in
        place and nothing else. Weights that stream must all be in host memory if `writes_weights`.

        original: the parameters in the precision of their file; without it, quantised weights that have to be summed
        into are dequantised, and so rounded twice.
        """
        files = _files(wanted)
        if files != self.files:
            self.clear(model)
            self._put_on(model, wanted)
            self.files = files
        else:
            self._move(self.device)
        strengths = tuple(one.strength for one in wanted)
        if strengths == self.values:
            return
        for ranks, tensor in self.strengths.items():
            tensor.copy_(torch.tensor([strengths[which] for which, rank in ranks for _ in range(rank)]))
        for name, changes in self.patched.items():
            self._patch(model, name, [(change, strengths[which]) for which, change in changes], original)
        self.values = strengths

    @torch.no_grad()
    def clear(self, model: WanModel) -> None:
        """Take all away: every bit is as it was before."""
        for linear in self.attached:
            detach(linear)
        for tensors in self.before.values():
            for name, value in tensors.items():
                model.get_parameter(name).copy_(value)
        self.files = self.values = ()
        self.attached, self.strengths, self.patched, self.before = [], {}, {}, {}

    def offload(self) -> None:
        """Move attached matrices to host memory, until `apply` is called again."""
        self._move(torch.device("cpu"))

    def _move(self, device: torch.device) -> None:
        for linear in self.attached:
            move_attached(linear, device)

    def _put_on(self, model: WanModel, wanted: Sequence[Wanted]) -> None:
        pairs: dict[str, list[tuple[int, Tensor, Tensor]]] = {}
        linears = {f"{name}.weight" for name in attachable(model.config)}
        dtype = model.patch_embedding.weight.dtype
        listed: dict[str, list[tuple[int, Change]]] = {}
        for which, one in enumerate(wanted):
            for name, changes in one.lora.changes.items():
                listed.setdefault(name, []).extend((which, change) for change in changes)
        for name, several in listed.items():
            if name not in linears or not all(change.has_low_rank for _, change in several):
                self.patched[name] = several  # together: DoRA divides by the lengths of rows that others have changed
                continue
            for which, change in several:
                pair = change.low_rank(self.device)
                assert pair is not None
                # All wait here: in float32 they need twice the room.
                up, down = (side.to(dtype) for side in pair)
                pairs.setdefault(name.removesuffix(".weight"), []).append((which, up, down))
        for module, several in pairs.items():
            ranks = tuple((which, up.shape[1]) for which, up, _ in several)
            if ranks not in self.strengths:
                with torch.inference_mode(False):  # written later, in whatever mode
                    self.strengths[ranks] = torch.zeros(sum(rank for _, rank in ranks), device=self.device)
            linear = cast(LowRank, model.get_submodule(module))
            attach(linear, [(up, down) for _, up, down in several], self.strengths[ranks], dtype)
            self.attached.append(linear)

    def _patch(
        self, model: WanModel, name: str, changes: list[tuple[Change, float]], original: StoredValues | None
    ) -> None:
        """Write parameter `name` with `changes` summed in; the first time, keep what it was."""
        module = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(module, nn.Linear | QuantLinear) or not name.endswith(".weight"):
            module = None
        quantized = module if isinstance(module, QuantLinear) else None
        prefix = name.rpartition(".")[0]
        assert not isinstance(quantized, PackedLinear), "refused by check_packed"
        names = [name] if quantized is None else [f"{prefix}.weight", f"{prefix}.weight_scale"]
        if name not in self.before:
            self.before[name] = {n: model.get_parameter(n).detach().to("cpu", copy=True) for n in names}
        original_values = self.before[name]
        stored = None if quantized is None or original is None else original.read(name)
        if quantized is None:
            total = dense(original_values[name], self.device)
        elif stored is not None:
            total = dense(stored, self.device)
        else:
            total = quantized.decode(*(original_values[n].to(self.device) for n in names))
        for change, strength in changes:
            total = change.apply(total, strength)
        made = {"weight": total}
        if quantized is not None:
            value = Changed(stored, total) if isinstance(stored, Packed) else total
            made = encoded_weight(value, Quantization(type(quantized), self.device))
        for n in names:
            model.get_parameter(n).copy_(made[n.rpartition(".")[2]] if quantized is not None else total)


def _files(wanted: Sequence[Wanted]) -> tuple[object, ...]:
    return tuple(one.key for one in wanted)


def _applied(wanted: Sequence[Wanted]) -> tuple[object, ...]:
    return tuple((one.key, one.strength) for one in wanted if one.strength)


def _changed(wanted: Sequence[Wanted]) -> frozenset[str]:
    return frozenset(name for one in wanted if one.strength for name in one.lora.changes)
