"""ComfyUI's own models and samplers inside one process, on tiny random weights: for checks of hooks.

Runs under ComfyUI's Python, started by `tests/nodes/test_native_cache.py`: COMFYUI_PATH is on the module path.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch

PACK = Path(__file__).resolve().parents[2]
SIZE = (1, 16, 3, 6, 4)


def load_hooks(*names: str) -> list[Any]:
    """Modules of `nodes/host`, without the package around them, which starts ComfyUI's server."""
    package = types.ModuleType("wancore_host")
    package.__path__ = [str(PACK / "nodes" / "host")]
    sys.modules["wancore_host"] = package
    return [importlib.import_module(f"wancore_host.{name}") for name in names]


def random_weights(net: torch.nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in net.state_dict().items():
            if tensor.is_floating_point():
                scale = 0.5 if "modulation" in name else 1.0 if tensor.ndim < 2 else tensor[0].numel() ** -0.5
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
                if "norm" in name and name.endswith("weight"):
                    tensor.add_(1)
    return net.state_dict()


def native(kind: str = "t2v", seed: int = 0) -> Any:
    """A ModelPatcher around a tiny random model of ComfyUI's own class, through ComfyUI's own detection."""
    import comfy.ldm.wan.model as wan
    import comfy.ops
    import comfy.sd
    from comfy.ldm.wan.model_animate import AnimateWanModel
    from comfy.ldm.wan.model_animate2 import WanAnimate2Model

    classes = {
        "t2v": (wan.WanModel, {}),
        "vace": (wan.VaceWanModel, {"vace_layers": 2, "vace_in_dim": 96}),
        "s2v": (wan.WanModel_S2V, {}),
        "animate": (AnimateWanModel, {"in_dim": 36, "num_layers": 5}),
        "animate2": (WanAnimate2Model, {"in_dim": 36}),
    }
    cls, extra = classes[kind]
    sizes = {"dim": 256, "ffn_dim": 256, "num_heads": 2, "num_layers": 4, "in_dim": 16, "model_type": kind, **extra}
    net = cls(**sizes, device="cpu", dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    metadata = {"config": json.dumps({"transformer": {"model_type": "animate2"}})} if kind == "animate2" else None
    return comfy.sd.load_diffusion_model_state_dict(dict(random_weights(net, seed)), metadata=metadata)


def text(seed: int, **extra: Any) -> list[Any]:
    rows = torch.zeros(1, 512, 4096)
    rows[:, :7] = torch.randn(1, 7, 4096, generator=torch.Generator().manual_seed(seed))
    return [[rows, {"pooled_output": None, **extra}]]


def noise(seed: int = 5, size: tuple[int, ...] = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


class OneByOne:
    """Runs the prompts of guidance one after the other: as with memory for one only."""

    def __enter__(self) -> None:
        import comfy.model_patcher

        self.kind = comfy.model_patcher.ModelPatcher
        self.method = self.kind.get_free_memory
        self.kind.get_free_memory = lambda *_: 0

    def __exit__(self, *_: object) -> None:
        self.kind.get_free_memory = self.method


def sample(
    model: Any,
    sigmas: list[float],
    latent: torch.Tensor | None = None,
    start: torch.Tensor | None = None,
    *,
    sampler: str = "euler",
    cfg: float = 4.0,
    extra: dict[str, Any] | None = None,
) -> torch.Tensor:
    """Latents after the steps with `sigmas`. latent: where to start, and then without noise."""
    import comfy.sample
    import comfy.samplers

    start = noise() if start is None else start
    given = torch.zeros_like(start) if latent is None else latent
    drawn = start if latent is None else torch.zeros_like(start)
    return comfy.sample.sample_custom(
        model, drawn, cfg, comfy.samplers.sampler_object(sampler), torch.tensor(sigmas),
        text(1, **(extra or {})), text(2, **(extra or {})), given, disable_pbar=True, seed=0,
    )  # fmt: skip
