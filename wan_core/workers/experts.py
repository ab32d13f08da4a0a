"""The transformers of a task on a rank, without its other parts: what a sampler's node needs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch

from wan_core.checkpoint.load import StoredValues
from wan_core.config import LoraOptions, OptionError
from wan_core.execution.memory.planning import device_room
from wan_core.execution.memory.residency import GIB, Policy, Residency
from wan_core.execution.optimize import check_compile, optimize
from wan_core.models.wan.model import WanModel
from wan_core.ops.attention.registry import resolve_attention
from wan_core.parallel.mesh import RankMesh
from wan_core.parallel.sequence import check_lse
from wan_core.parallel.sharded import load_sharded_dit, why_not_shard
from wan_core.parallel.weights import shared_checkpoint
from wan_core.pipeline.builder import compute_dtype, find_quantization, precision_of
from wan_core.pipeline.loras import AppliedLoras, check_packed, choose_mode, lora_bytes, merging, read_loras
from wan_core.pipeline.memory_planning import forward_bytes
from wan_core.pipeline.sources import Experts, is_packed
from wan_core.sampling.plan import Expert


def choose_policy(mode: str, device: torch.device, weights: int, beside: int) -> tuple[Policy, str]:
    """Where this rank's transformers are, and why; `weights` of all of them and what runs `beside`, in bytes."""
    if mode in ("swap", "stream"):
        return ("swap" if mode == "swap" else "stream"), "asked for"
    if mode in ("resident", "shard") or device.type != "cuda":
        return "resident", "asked for" if mode != "auto" else "weights stay in host memory on a CPU"
    room = device_room(device)
    need = f"weights {weights / GIB:.1f} + {beside / GIB:.1f} GiB beside them, {room / GIB:.1f} GiB free"
    return ("resident", need) if weights + beside <= room else ("swap", f"{need}: one expert at a time on the device")


class LoadedExperts:
    """One or two transformers, loaded with the other ranks and shared with them over a mesh that may change."""

    def __init__(self, spec: Mapping[str, Any], found: Experts, ranks: RankMesh, tokens: int) -> None:
        """spec: precision, keep_blocks, attention, compile and residency, as in `LoadOptions`. tokens: of the largest
        forward that is known of. Raises OptionError or AttentionError."""
        device = ranks.device
        self.compile, self.mesh = spec["compile"], None
        check_compile(self.compile, device)
        stored = spec["precision"] == "checkpoint"
        precision = precision_of(spec["precision"], found.high, device, found.low)
        dtype = compute_dtype(precision, device)
        quantization = find_quantization(precision, device, spec["keep_blocks"], as_stored=stored)
        self.attention, self.attend = resolve_attention(spec["attention"], device, dtype, found.dit.head_dim)
        parts = {"high": found.high, **({"low": found.low} if found.low else {})}
        options = tuple(LoraOptions(**one) for one in spec.get("loras", ()))
        wanted = read_loras(options, found.dit, found.low is not None)
        loras = [one for several in wanted.values() for one in several]
        weights = sum(part.bytes(dtype, quantization) for part in parts.values()) + lora_bytes(loras)
        policy, why = choose_policy(spec["residency"], device, weights, forward_bytes(found.dit, tokens))
        scaled, on_disk = found.high.scaled, found.high.path is not None
        why_not = why_not_shard(ranks, quantization is not None, self.compile != "off", scaled, on_disk)
        self.sharded = spec["residency"] == "shard"
        if self.sharded and why_not is not None:
            raise OptionError(f"residency 'shard' cannot be had: {why_not}")
        if ranks.agree(policy != "resident") and policy == "resident":
            policy, why = "swap", "another rank has no room for more"
        if policy != "resident" and spec["residency"] == "auto" and why_not is None:
            policy, why, self.sharded = "resident", f"{why}; the ranks of a sequence hold the experts in parts", True
        self.residency, self.why = Residency(device, policy), f"{'shard' if self.sharded else policy} ({why})"
        share = partial(shared_checkpoint, ranks=ranks) if policy == "resident" else None
        if self.sharded and loras:
            raise OptionError("LoRAs cannot be applied to experts that GPUs hold in parts: choose another residency")
        mapped = policy == "swap" and quantization is None
        packed = is_packed(quantization)
        how, _ = choose_mode("auto", scaled=scaled or packed, quantized=quantization is not None, mapped=mapped)
        if how == "attach" and packed:
            check_packed(loras, found.dit)
        for name, part in parts.items():
            mine = wanted.get(name, [])
            if self.sharded:
                assert part.path is not None
                model = load_sharded_dit(part.path, ranks, dtype)
            else:
                merge = merging(mine, device) if how == "merge" else None
                model = part.load(self.residency.load_device, dtype, quantization, merge, share)
            if mine and how == "attach":
                original = None if part.path is None else StoredValues(part.path)
                AppliedLoras.of(cast(WanModel, model), device).apply(mine, original=original)
            self.residency.add(name, model)

    def fits(self, ranks: RankMesh) -> bool:
        """Whether they can be shared over this mesh: those that are held in parts belong to the one they came with."""
        return not self.sharded or self.mesh in (None, ranks.mesh)

    def arrange(self, ranks: RankMesh) -> None:
        """Share the forwards over this mesh from now on."""
        assert self.fits(ranks)
        if self.mesh == ranks.mesh:
            return
        check_lse(self.attend.gives_lse, self.attention, ranks.mesh)
        for model in self.residency.models.values():
            optimize(
                cast(WanModel, model),
                attend=self.attend,
                compile=self.compile,
                device=self.residency.device,
                ranks=ranks,
            )
        self.mesh = ranks.mesh

    @torch.no_grad()
    def acquire(self, expert: Expert) -> WanModel:
        """Ready on the device; where a single transformer runs every step, that."""
        return cast(WanModel, self.residency.use(expert if expert in self.residency.models else "high"))
