"""WanCore from MODEL in a running ComfyUI: native MODELs give the same bits as the files in our loader."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.comfy_graphs import with_defaults
from tests.comfyui import ComfyUI, Graph, Run
from tests.nodes.comfy_files import LOOK, facts_of, looked_at
from tools.embedded_graphs import node
from wan_core.checkpoint.random import random_module
from wan_core.checkpoint.save import save, write_safetensors
from wan_core.models.wan.config import DiTConfig

pytestmark = pytest.mark.comfy
CONFIG = DiTConfig(  # ComfyUI takes text of 4096 and heads of 128 for granted
    in_channels=16, out_channels=16, dim=256, ffn_dim=128, num_heads=2, num_layers=2, text_dim=4096, text_len=512
)

# A second pack: conditioning without a text encoder, and patches of other kinds.
HELPERS = """
import hashlib, json, torch

class Base:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("MODEL",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",)}}

class Text:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("CONDITIONING",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0}), "rows": ("INT", {"default": 7, "max": 512})}}
    def run(self, seed, rows):
        rows = torch.randn(1, rows, 4096, generator=torch.Generator().manual_seed(seed))
        return ([[rows, {"pooled_output": None}]],)

class ObjectPatch(Base):
    def run(self, model):
        model = model.clone()
        model.add_object_patch("diffusion_model.head", model.model.diffusion_model.head)
        return (model,)

class Wrapped(Base):
    def run(self, model):
        model = model.clone()
        model.add_wrapper_with_key("apply_model", "some_cache", lambda run, *args, **kwargs: run(*args, **kwargs))
        return (model,)

class SetWeight(Base):
    def run(self, model):
        model = model.clone()
        key = "diffusion_model.blocks.0.self_attn.q.weight"
        model.add_patches({key: ("set", (torch.zeros(256, 256),))}, 1.0)
        return (model,)

class Attention(Base):
    def run(self, model):
        model = model.clone()
        model.model_options["transformer_options"]["optimized_attention_override"] = lambda f, *a, **k: f(*a, **k)
        return (model,)

class Prefers(Base):
    # What ComfyUI 0.37 and newer make of a file, and of a LoRA, with `comfy_attention.config`.
    def run(self, model):
        class Preference(torch.nn.Module):
            config = {"attention": "comfy_kitchen_int8"}
            def _save_to_state_dict(self, destination, prefix, keep_vars):
                text = json.dumps(self.config).encode()
                destination[prefix + "config"] = torch.tensor(list(text), dtype=torch.uint8)
        model = model.clone()
        model.model.diffusion_model.blocks[0].self_attn.comfy_attention = Preference()
        model.add_object_patch("diffusion_model.blocks.0.self_attn.comfy_attention", Preference())
        model.cached_patcher_init = None
        return (model,)

class ForgetFile(Base):
    def run(self, model):
        model = model.clone()
        model.cached_patcher_init = None
        return (model,)

class Elsewhere(Base):
    def run(self, model):
        model = model.clone()
        model.load_device = torch.device("cpu", 1)  # as Select Model Device does
        return (model,)

class Hash:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("STRING",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",)}}
    def run(self, latent):
        return (hashlib.sha256(latent["samples"].contiguous().numpy().tobytes()).hexdigest(),)

class Distance:
    CATEGORY, FUNCTION, RETURN_TYPES = "test", "run", ("STRING",)
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"one": ("LATENT",), "other": ("LATENT",)}}
    def run(self, one, other):
        one, other = one["samples"], other["samples"]
        return (str(float((one - other).norm() / other.norm())),)

CLASSES = (Text, ForgetFile, ObjectPatch, Wrapped, SetWeight, Attention, Prefers, Elsewhere, Hash, Distance)
NODE_CLASS_MAPPINGS = {made.__name__: made for made in CLASSES}
"""


PACKS = {"helpers": HELPERS, "look": LOOK}


@pytest.fixture(scope="module")
def files(base: Path) -> None:
    for seed, expert in enumerate(("high", "low")):
        model = random_module(CONFIG, device=torch.device("cpu"), dtype=torch.bfloat16, seed=seed)
        save(model, base / "models" / "diffusion_models" / f"t2v_{expert}_noise.safetensors", torch.bfloat16)
        write_lora(base / "models" / "loras" / f"style_{expert}.safetensors", seed, every=1)
        write_lora(base / "models" / "loras" / f"other_{expert}.safetensors", seed + 7, every=2)


def write_lora(path: Path, seed: int, every: int) -> None:
    """On every so-manyeth matrix of the blocks, with an alpha, and a difference of a bias."""
    draw, state = torch.Generator().manual_seed(seed), {}
    matrices = [f"blocks.{n}.{m}" for n in range(2) for m in ("self_attn.q", "self_attn.o", "cross_attn.k", "ffn.0")]
    for name in matrices[::every]:
        n, k = (CONFIG.ffn_dim if name.endswith("ffn.0") else 256), 256
        state[f"diffusion_model.{name}.lora_down.weight"] = torch.randn(4, k, generator=draw) * k**-0.5
        state[f"diffusion_model.{name}.lora_up.weight"] = torch.randn(n, 4, generator=draw) * 0.3
        state[f"diffusion_model.{name}.alpha"] = torch.tensor(2.0)
    state["diffusion_model.blocks.1.self_attn.v.diff_b"] = torch.randn(256, generator=draw) * 0.1
    write_safetensors(state, path, {})


def sampled(graph: Graph, model: str, shift: float = 0.0) -> Graph:
    graph["positive"], graph["negative"] = (node("Text", seed=seed, rows=7) for seed in (1, 2))
    graph["size"] = node("EmptyHunyuanLatentVideo", width=64, height=64, length=5, batch_size=1)
    links = {"model": [model, 0], "positive": ["positive", 0], "negative": ["negative", 0], "latent": ["size", 0]}
    numbers = {"steps": 3, "shift": shift, "boundary": 0.9, "guidance_high": 2.0, "guidance_low": 1.0}
    graph["sampler"] = node("WanCoreSampler", **links, seed=5, **numbers, solver="unipc", guidance_mode="auto")
    return looked_at(graph, model)


def ours(*loras: tuple[str, float], shift: float = 5.0) -> Graph:
    """The files in our loader, and our LoRA nodes."""
    graph: Graph = {
        "model": node("WanCoreModelLoader", high="t2v_high_noise.safetensors", low="t2v_low_noise.safetensors",
                      precision="checkpoint", attention="auto", residency="auto")
    }  # fmt: skip
    last = "model"
    for name, strength in loras:
        files = {"high": f"{name}_high.safetensors", "low": f"{name}_low.safetensors"}
        strengths = {"strength_high": strength, "strength_low": strength}
        graph[f"lora {name}"] = node("WanCoreLoRA", model=[last, 0], **files, **strengths)
        last = f"lora {name}"
    return sampled(graph, last, shift)


def native(*loras: tuple[str, float], shift: float | None = 5.0, extra: str = "", **inputs: Any) -> Graph:
    """ComfyUI's loaders, LoRA loaders and ModelSamplingSD3, and our bridge."""
    graph: Graph = {}
    ends = {}
    for expert in ("high", "low"):
        graph[expert] = node("UNETLoader", unet_name=f"t2v_{expert}_noise.safetensors", weight_dtype="default")
        last = expert
        for name, strength in loras:
            lora_node = f"{expert} lora {name}"
            graph[lora_node] = node("LoraLoaderModelOnly", model=[last, 0], lora_name=f"{name}_{expert}.safetensors",
                               strength_model=strength)  # fmt: skip
            last = lora_node
        if shift is not None:
            graph[f"{expert} shift"] = node("ModelSamplingSD3", model=[last, 0], shift=shift)
            last = f"{expert} shift"
        if extra and (expert == "high" or extra == "ForgetFile"):
            graph[f"{expert} extra"] = node(extra, model=[last, 0])
            last = f"{expert} extra"
        ends[expert] = [last, 0]
    choices = {"precision": "checkpoint", "attention": "auto", "residency": "auto"}
    graph["bridge"] = node("WanCoreFromModel", model=ends["high"], low=ends["low"], **choices, **inputs)
    return sampled(graph, "bridge")


def facts(run: Run) -> dict[str, Any]:
    shown = facts_of(run)
    assert shown["finite"]
    return shown


def test_native_models_give_what_our_loader_gives(comfy: ComfyUI) -> None:
    """With no LoRA, with one, and with two of which the second is on half of the matrices."""
    seen = set()
    for loras in ((), (("style", 0.8),), (("style", 0.8), ("other", -0.5))):
        run = comfy.run(native(*loras))
        bridged, expected = facts(run), facts(comfy.run(ours(*loras)))
        assert bridged["hash"] == expected["hash"], loras
        seen.add(bridged["hash"])
        info = run.outputs["bridge"]["text"][0]
        assert "shift 5, as ModelSamplingSD3" in info and info.count("LoRA #") == 2 * len(loras)
    assert len(seen) == 3
    assert facts(comfy.run(native(shift=9.0)))["hash"] == facts(comfy.run(ours(shift=9.0)))["hash"]
    assert facts(comfy.run(native(shift=None)))["hash"] == facts(comfy.run(ours(shift=0.0)))["hash"]


def in_one_place(first: dict[str, Any], last: dict[str, Any], **inputs: Any) -> Graph:
    """What the page's command makes of one KSampler (Advanced) or of two that go on, beside these. inputs: of our
    sampler."""
    graph = native(shift=8.0)
    graph |= {"positive": node("Text", seed=1, rows=512), "negative": node("Text", seed=2, rows=512)}  # as is encoded
    prompts = {name: [name, 0] for name in ("positive", "negative")}
    run = {"steps": 6, "cfg": 2.0, "scheduler": "simple", **prompts, "start_at_step": 0, "end_at_step": 10000}
    run |= {"add_noise": "enable", "noise_seed": 5, "return_with_leftover_noise": "disable"}
    graph["first"] = node("KSamplerAdvanced", **run | first, model=["high shift", 0], latent_image=["size", 0])
    if last:
        graph["last"] = node("KSamplerAdvanced", **run | last, model=["low shift", 0], latent_image=["first", 0])
    else:
        del graph["bridge"]["inputs"]["low"]
    graph["sigmas"] = node("BasicScheduler", model=["high shift", 0], scheduler="simple", steps=6, denoise=1.0)
    graph["sampler"]["inputs"] |= {"steps": 0, "shift": 0.0, "boundary": 0.0, "preset": "none", "sigmas": ["sigmas", 0]}
    graph["sampler"]["inputs"] |= {"guidance_high": 2.0, "solver": first["sampler_name"], **inputs}
    graph["distance"] = node("Distance", one=["sampler", 0], other=["last" if last else "first", 0])
    graph["shown"] = node("PreviewAny", source=["distance", 0])
    return graph


def distance(run: Run) -> float:
    assert run.ok, run.status
    return float(run.outputs["shown"]["text"][0])


def test_one_sampler_gives_the_latents_of_two_that_change_experts_at_any_step(comfy: ComfyUI) -> None:
    """The model's own boundary is at step 4."""
    for split in (1, 3, 4, 5, 6, 10000):
        first = {"sampler_name": "euler", "end_at_step": split, "return_with_leftover_noise": "enable"}
        last = {"sampler_name": "euler", "start_at_step": split, "add_noise": "disable", "noise_seed": 0, "cfg": 1.5}
        graph = in_one_place(first, last, guidance_low=1.5, low_from_step=split)
        assert distance(comfy.run(graph)) < 1e-5, split
        if split == 3:  # the same model twice, as two samplers with guidance of their own may have it
            both = {"last": graph["last"], "bridge": graph["bridge"]}
            graph |= {name: {**one, "inputs": dict(one["inputs"])} for name, one in both.items()}
            graph["last"]["inputs"]["model"], graph["bridge"]["inputs"]["low"] = ["high shift", 0], ["high shift", 0]
            assert distance(comfy.run(graph)) < 1e-5
            graph |= both
        graph["sampler"]["inputs"]["low_from_step"] = 0
        assert (distance(comfy.run(graph)) < 1e-5) == (split == 4)


@pytest.mark.parametrize("solver", ["euler", "heun", "res_multistep"])
def test_solvers_of_the_same_name_give_the_same_latents(comfy: ComfyUI, solver: str) -> None:
    assert distance(comfy.run(in_one_place({"sampler_name": solver}, {}, guidance_low=0.0))) < 1e-5


def test_a_step_of_the_change_without_sigmas_or_beside_a_boundary_is_refused(comfy: ComfyUI) -> None:
    def refused(one: Graph, words: str, **inputs: Any) -> bool:
        one["sampler"]["inputs"] |= {"low_from_step": 2, **inputs}
        return words in comfy.run(one).message("execution_error")["exception_message"]

    assert refused(native(), "low_from_step 2 given, which counts steps of `sigmas`", boundary=0.0)
    first, last = {"sampler_name": "euler", "end_at_step": 2}, {"sampler_name": "euler", "start_at_step": 2}
    assert refused(in_one_place(first, last), "boundary 0.5 given, too", boundary=0.5)
    assert refused(in_one_place(first, {}, guidance_low=0.0), "the model has one transformer")


def test_another_strength_loads_nothing_again(comfy: ComfyUI) -> None:
    first = facts(comfy.run(native(("style", 0.8))))
    second = facts(comfy.run(native(("style", 0.3))))
    without = facts(comfy.run(native()))
    assert first["modules"] == second["modules"] == without["modules"]
    assert len({first["hash"], second["hash"], without["hash"]}) == 3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("ObjectPatch", "object patch diffusion_model.head"),
        ("Wrapped", "wrapper some_cache"),
        ("SetWeight", "patch of kind 'set'"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(comfy: ComfyUI, extra: str, message: str) -> None:
    run = comfy.run(native(extra=extra))
    assert not run.ok and message in str(run.status) and "the high MODEL" in str(run.status)


WINDOWS = {"context_length": 9, "context_overlap": 4, "context_schedule": "standard_uniform", "context_stride": 1,
           "closed_loop": False, "fuse_method": "relative", "freenoise": True}  # fmt: skip


def test_context_windows_are_refused_by_name(comfy: ComfyUI) -> None:
    graph = native()
    graph["low windows"] = node("WanContextWindowsManual", model=["low shift", 0], **WINDOWS)
    graph["bridge"]["inputs"]["low"] = ["low windows", 0]
    run = comfy.run(with_defaults(graph, comfy.get("/object_info")))
    message = run.message("execution_error")["exception_message"]
    assert not run.ok and "the low MODEL" in message and "context windows" in message and "Accelerate" in message


def test_the_attention_that_a_lora_asks_for_is_reported(comfy: ComfyUI) -> None:
    run = comfy.run(native(extra="Prefers"))
    info = run.outputs["bridge"]["text"][0]
    assert facts(run)["hash"] == facts(comfy.run(ours()))["hash"]
    assert "the high MODEL: not taken over: the attention that a LoRA asks for: choose 'attention' here" in info


def test_another_device_is_reported(comfy: ComfyUI) -> None:
    info = comfy.run(native(extra="Elsewhere")).outputs["bridge"]["text"][0]
    assert "the high MODEL: not taken over: its device cpu:1: without a WanCore Launcher it runs on cpu" in info


def test_weights_in_memory_stand_for_a_file_that_is_not_known(comfy: ComfyUI) -> None:
    """Also while ComfyUI has LoRAs merged into them, and its weights stay as they were."""
    for loras in ((), (("style", 0.8),)):
        expected = facts(comfy.run(ours(*loras)))
        own = native(*loras)
        own["native"] = node("KSampler", model=own["sampler"]["inputs"]["model"], seed=1, steps=1, cfg=1.0,
                             sampler_name="euler", scheduler="simple", positive=["positive", 0],
                             negative=["negative", 0], latent_image=["size", 0], denoise=1.0)  # fmt: skip
        own["native"]["inputs"]["model"] = own["bridge"]["inputs"]["model"]
        own["hash"] = node("Hash", latent=["native", 0])
        own["before"] = node("PreviewAny", source=["hash", 0])
        before = comfy.run({name: one for name, one in own.items() if name not in ("sampler", "look", "facts")})
        run = comfy.run(native(*loras, extra="ForgetFile"))
        assert "the file is not known" in run.outputs["bridge"]["text"][0]
        assert facts(run)["hash"] == expected["hash"], loras
        comfy.post("/free", {"unload_models": True, "free_memory": True})
        after = comfy.run({name: one for name, one in own.items() if name not in ("sampler", "look", "facts")})
        assert before.outputs["before"] == after.outputs["before"]


def test_workers_read_loras_after_temporary_files_were_deleted(comfy: ComfyUI) -> None:
    graph = native(("style", 0.8), workers=["launcher", 0])
    graph["launcher"] = node("WanCoreLauncher", devices="cpu", mesh="auto", start_timeout=120, step_timeout=300)
    first = facts(comfy.run(graph))["hash"]
    comfy.post("/free", {"unload_models": True})
    shutil.rmtree(comfy.base / "temp", ignore_errors=True)
    graph["sampler"]["inputs"]["seed"] = 6
    assert facts(comfy.run(graph))["hash"] != first


def test_what_newer_versions_take_is_told_to_them(comfy: ComfyUI) -> None:
    """Search words, folded inputs, and a loader's text when its result comes from the cache."""
    info = comfy.get("/object_info")["WanCoreFromModel"]
    if not info.get("search_aliases"):
        pytest.skip("this ComfyUI has no search words")
    assert "convert model" in info["search_aliases"] and info["input"]["optional"]["keep_blocks"][1]["advanced"]
    first, again = native(), native()
    again["sampler"]["inputs"]["seed"] = 77
    text = comfy.run(first).outputs["bridge"]["text"]
    run = comfy.run(again)
    assert "bridge" in run.cached and run.outputs["bridge"]["text"] == text
