"""Other nodes on the same MODEL, and how WanCore Accelerate works beside them.

- Model Sparse Attention puts itself on top of every attention override in each step. It computes the calls that it
  takes, WanCore the others. Two sparse attentions on one model are refused.
- EasyCache and LazyCache skip whole forwards, WanCore computes the others. Two step caches on one model are refused.
- An attention override of another pack stays (`wan_core.sampling.native.attention`): the report says who computed.
- TorchCompileModel ignores changed hooks: `apart` gives forwards with other hooks compiled code of their own.
- Packs that put new patches on the model in every forward: nothing is kept for later steps (`Patches`).
- ComfyUI's own compiler plans the memory of a forward: what outlives it is allocated under `pause`.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch.overrides import BaseTorchFunctionMode

from wan_core.config import OptionError, SparseOptions
from wan_core.models.wan.families import NAG, PROMPTS
from wan_core.ops.cards import capability, card_of
from wan_core.sampling.native.attention import NativeAttention, name_of, qualified
from wan_core.sampling.native.run import WARNING, NativeRun

try:
    from comfy import model_prefetch
except ImportError:  # ComfyUI 0.8
    model_prefetch = None

OVERRIDE = "optimized_attention_override"
SPARSE_KEY = "block_sparse_attention"  # of the callbacks of Model Sparse Attention (ComfyUI 0.36 and newer)
COMPILE_KEY = "torch.compile"  # of the wrapper of comfy_api.torch_helpers
SPARSE_NODE = "Model Sparse Attention"
ROUNDING = {"sage": "sage", "comfy_kitchen_int8": "int8"}  # kernels that round: their names in ComfyUI -> here


def pause() -> AbstractContextManager[Any]:
    """What is allocated inside may outlive a forward: ComfyUI's compiler, where it is active, does not plan it.
    https://github.com/Comfy-Org/ComfyUI/pull/16148. It ends with the innermost: not to be nested."""
    return getattr(model_prefetch, "pause_malloc_graph", nullcontext)()


@torch.compiler.disable
def apart(options: Mapping[str, Any], hooks: Hashable) -> AbstractContextManager[Any]:
    """Around a forward with `hooks` in its options: compiled code of other forwards is not used for it, nor its own for
    others. TorchCompileModel removes all guards on the options, so torch would use code that was compiled without the
    hooks, or with others. The torch function modes that are active belong to the guards that stay."""
    return _mode(hooks)() if is_compiled(options) else nullcontext()


def is_compiled(options: Mapping[str, Any]) -> bool:
    return COMPILE_KEY in options.get("wrappers", {}).get(WrappersMP.APPLY_MODEL, {})


@functools.cache
def _mode(hooks: Hashable) -> type[BaseTorchFunctionMode]:
    """A mode that changes nothing: guards compare types."""
    return type(f"Mode{hooks}", (BaseTorchFunctionMode,), {})


def split_earlier(override: Any) -> dict[str, Any]:
    """The override that was set before, as `NativeAttention` takes it. One of an Accelerate node is replaced."""
    if isinstance(override, NativeAttention):
        return {"earlier": override.earlier, "chosen": override.chosen}
    setter = getattr(ModelPatcher, "set_model_optimized_attention", None)  # ComfyUI 0.33 and newer
    chosen = setter is not None and getattr(override, "__qualname__", "").startswith(f"{setter.__qualname__}.")
    return {"chosen": override} if chosen else {"earlier": override}


def why_comfyui(patcher: ModelPatcher) -> str | None:
    """Why `auto` leaves self-attention of a model to ComfyUI, in words: it computes by a kernel that rounds, which its
    user chose and which is faster on this card than all exact ones; or the GPU is none of those that `auto` knows,
    where torch may need memory for all scores at once. None: it leaves nothing."""
    from comfy.ldm.modules import attention

    card, device = capability(patcher.load_device), patcher.load_device
    if device.type != "cpu" and card is None:
        return "its choice for what is no NVIDIA GPU"
    chosen = split_earlier(patcher.model_options["transformer_options"].get(OVERRIDE)).get("chosen")
    for name, here in ROUNDING.items():
        theirs = getattr(attention, "REGISTERED_ATTENTION_FUNCTIONS", {}).get(name)
        if theirs is None or here not in card_of(card).rounding:
            continue
        by_node = chosen is not None and computes_by(chosen, theirs)
        if by_node or (chosen is None and attention.optimized_attention is theirs):
            return f"{here}, which was chosen there and is faster on this card than 'auto'"
    return None


def computes_by(chosen: Any, function: Any) -> bool:
    """Whether the override of Model Attention Backend calls ComfyUI's attention `function`."""
    return any(cell.cell_contents is function for cell in chosen.__closure__ or ())


def has_sparse_node(patcher: ModelPatcher) -> bool:
    from comfy.patcher_extension import CallbacksMP

    return SPARSE_KEY in patcher.callbacks.get(CallbacksMP.ON_PREPARE_STATE, {})


def step_cache_of(options: Mapping[str, Any]) -> str | None:
    """The name of ComfyUI's step cache that is in transformer_options."""
    holder = options.get("easycache")
    return None if holder is None else holder.name


def check_sparse(patcher: ModelPatcher, sparse: SparseOptions | None) -> None:
    """Raises OptionError for two sparse attentions on a model."""
    if sparse is not None and has_sparse_node(patcher):
        raise OptionError(
            f"{SPARSE_NODE} and WanCore's sparse attention are on one model: remove {SPARSE_NODE}, or set sparse to "
            "'off' and disconnect WanCore Sparse Attention"
        )


def check_step_cache(options: Mapping[str, Any]) -> None:
    """Raises OptionError for two step caches on a model. options: its transformer_options."""
    other = step_cache_of(options)
    if other is not None:
        raise OptionError(
            f"{other} and WanCore's step cache are on one model: remove {other}, or set cache to 'off' and disconnect "
            "the WanCore cache"
        )


def check_conditions(conditions: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Raises OptionError for what WanCore's nodes put on a prompt and ComfyUI's samplers would leave out. conditions:
    of each prompt, by its name."""
    entries = [entry for several in conditions.values() for entry in several]
    for key, node in ((NAG, "WanCore NAG"), (PROMPTS, "WanCore Prompts over Time")):
        given = [entry[key] for entry in entries if entry.get(key) is not None]
        if key == PROMPTS:
            given = [one for one in given if len(one["starts"]) > 1]
        if given:
            raise OptionError(
                f"a prompt comes from {node}, which ComfyUI's own samplers do not read: use WanCore from MODEL and "
                "WanCore Sampler, or leave that node out"
            )


def words_before(patcher: ModelPatcher) -> list[str]:
    """What nodes before WanCore Accelerate do beside it, for its text. patcher: with WanCore's override."""
    options = patcher.model_options["transformer_options"]
    override, lines = options[OVERRIDE], shared_words(patcher, options)
    if override.chosen is not None:
        lines.append("Model Attention Backend, set before: computes only what WanCore leaves")
    if override.earlier is not None and not has_sparse_node(patcher):
        lines.append(
            f"{name_of(override.earlier)}, set before: gets every call first, WanCore computes what it passes on"
        )
    return lines


def words_after(patcher: ModelPatcher, options: Mapping[str, Any], run: NativeRun) -> list[str]:
    """What other nodes did beside WanCore Accelerate in a run, for its report."""
    lines = shared_words(patcher, options)
    if run.outer is not None and not has_sparse_node(patcher):
        name = f"{name_of(run.outer)} was set later"
        put = "put WanCore Accelerate after that node"
        first, all_of_it = f"{name} and gets every call first", f"{WARNING}{name} and computes attention: {put}"
        lines.append(first if run.taken else all_of_it)
    if run.began and not run.taken and not run.left and not lines:
        lines.append(
            f"{WARNING}no call of attention came to WanCore: another node replaced this model's attention, or it was "
            "compiled before; remove that node, or restart ComfyUI"
        )
    return lines


def shared_words(patcher: ModelPatcher, options: Mapping[str, Any]) -> list[str]:
    lines, cache = [], step_cache_of(options)
    if has_sparse_node(patcher):
        lines.append(f"{SPARSE_NODE} computes the self-attention that it takes, WanCore the rest")
    if cache is not None:
        lines.append(f"{cache} skips forwards, WanCore computes the others")
    return lines


Ids = tuple[tuple[str, str, int], ...]
"""(kind, place, id of the object)"""


def patches_of(options: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """What is put on a model's blocks and attention in transformer_options, by kind and place."""
    patches = {**options.get("patches_replace", {}), "attention": {OVERRIDE: options.get(OVERRIDE)}}
    patches |= {kind: dict(enumerate(added)) for kind, added in options.get("patches", {}).items()}
    return {(kind, str(at)): patch for kind, placed in patches.items() for at, patch in placed.items()}


def ids_of(patches: Mapping[tuple[str, str], Any]) -> Ids:
    return tuple(sorted((*place, id(patch)) for place, patch in patches.items()))


class Patches:
    """What other nodes put on a model's blocks and attention during a run, beside what is there when it begins.

    A node may put new objects there in every forward: nothing that was kept of one can be used for the next. So a
    forward is kept only if its patches were there in an earlier step, and what was not there for a whole step is
    dropped. Until then it is held: no other object gets its id.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """options: transformer_options where the run begins."""
        self.lasting = list(patches_of(options).values())
        self.seen: dict[Ids, tuple[int, int, list[Any]]] = {}  # first and last step, and the objects
        self.step = -1
        self.renewed: dict[int, str] = {}  # steps with patches that were in no other step, and the name of one

    def enter(self, step: int, options: Mapping[str, Any]) -> bool:
        """Whether what is kept of a forward may be used in later steps, by its patches."""
        patches = patches_of(options)
        ids, constant = ids_of(patches), {id(one) for one in self.lasting}
        new = [patch for patch in patches.values() if id(patch) not in constant]
        if step != self.step:
            for before, (first, last, objects) in list(self.seen.items()):
                if last != self.step:
                    del self.seen[before]
                    if objects and first == last:
                        self.renewed[first] = qualified(objects[0])
            self.step = step
        first, _, objects = self.seen.get(ids, (step, step, new))
        self.seen[ids] = first, step, objects
        return not new or first != step

    def words(self, advice: str) -> list[str]:
        """For the report, where a node makes keeping impossible. advice: what to do beside removing it."""
        if len(self.renewed) < 2:
            return []
        name = next(iter(self.renewed.values()))
        return [
            f"a new {name} was put on the model in {len(self.renewed)} steps or more, of which nothing could be used "
            f"again: remove that node, or {advice}"
        ]
