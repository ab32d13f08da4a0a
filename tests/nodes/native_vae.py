"""Run by ComfyUI's Python: its own VAE objects of Wan's full shapes with random weights, decoded by themselves and by
WanCore's decoder around their weights. `native_checks` runs its checks.
"""

from __future__ import annotations

import importlib
import types
from typing import Any

LATENTS = {"2.1": (1, 16, 3, 2, 2), "2.2": (1, 48, 2, 2, 1)}  # of 9 frames of 16x16, and 5 of 32x16


def random_vae(kind: str, stored: Any, dtype: Any) -> Any:
    """ComfyUI's VAE object of a file with random weights in the dtype `stored`, which computes in `dtype`. Activations
    and pixels are about as large as a trained one's."""
    import torch
    from comfy.ldm.wan import vae, vae2_2
    from comfy.sd import VAE

    shape: dict[str, Any] = {"dim": 96, "z_dim": 16} if kind == "2.1" else {"dim": 160, "z_dim": 48}
    shape["temperal_downsample"] = [False, True, True]
    with torch.device("meta"):
        names = (vae if kind == "2.1" else vae2_2).WanVAE(**shape).state_dict()
    draw = torch.Generator().manual_seed(3)
    state = {}
    for name, tensor in names.items():
        random = torch.randn(tensor.shape, generator=draw)
        if name.endswith("gamma"):
            state[name] = 1 + 0.1 * random
        else:
            state[name] = random * (0.05 if tensor.ndim == 1 else tensor[0].numel() ** -0.5)
    state["decoder.head.2.weight"] *= 0.4
    return VAE(sd={name: tensor.to(stored) for name, tensor in state.items()}, dtype=dtype)


class World:
    def __init__(self, pack: types.ModuleType) -> None:
        self.host = pack.host  # type: ignore[attr-defined]


def compare(host: Any, kind: str, dtype: str) -> None:
    """fp32: levels differ only where a rounding error crosses from one to the next. Half precision: two orders of the
    same operations differ by some levels of 255 where both round; WanCore's is as close to fp32 as ComfyUI's."""
    import torch

    from wan_core.execution.report import Report

    own = getattr(torch, dtype)
    vae = random_vae(kind, own, own)
    config = host.native_vae_config(vae)
    latents = torch.randn(LATENTS[kind], generator=torch.Generator().manual_seed(5))
    native = vae.decode(latents).flatten(0, -4)
    held = {name: tensor.data_ptr() for name, tensor in vae.first_stage_model.named_parameters()}

    decoded = []
    for kind_of_number in (torch.float32, torch.uint8):
        how = {"dtype": kind_of_number, "tile": None}
        consume = lambda pieces: torch.cat([piece for _, piece in pieces])  # noqa: E731
        decoded.append(host.decode_native_to(vae, config, latents, Report(torch.device("cpu")), consume, **how))
    floats, levels = decoded
    assert floats.shape == native.shape and native.float().std() > 0.02
    assert held == {name: one.data_ptr() for name, one in vae.first_stage_model.named_parameters()}
    if own == torch.float32:
        scaled, exact = 255 * native, native
        boundary = (scaled - scaled.floor() - 0.5).abs()  # from which a level is another one
        apart = (levels.int() - scaled.round().int()).abs()
        assert (floats - native).abs().max() <= 1e-5 and apart.max() <= 1 and not apart[boundary > 0.01].any()
    else:
        exact = random_vae(kind, own, torch.float32).decode(latents).flatten(0, -4)
    ours, theirs = ((one - exact).square().mean().sqrt() for one in (floats, native))
    assert ours <= 1.05 * theirs or own == torch.float32, (ours, theirs)


def check_frames(it: World) -> None:
    """The frames of WanCore Decode to Video are those of VAE Decode."""
    import torch

    with torch.inference_mode():
        for kind, dtype in (("2.1", "float32"), ("2.2", "float32"), ("2.1", "bfloat16"), ("2.1", "float16")):
            compare(it.host, kind, dtype)


def check_still_frames(it: World) -> None:
    """Pictures with grey frames behind and between them are encoded as ComfyUI does it, without its encoder running;
    all others by it."""
    import torch

    def encoded_by_comfyui(vae: Any, pixels: Any) -> int:
        calls: list[int] = []
        kind_of_model = type(vae.first_stage_model)
        original = kind_of_model.encode
        kind_of_model.encode = lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
        try:
            found = it.host.with_still_frames(vae).encode(pixels)
        finally:
            kind_of_model.encode = original
        native = vae.encode(pixels)
        assert found.is_contiguous() and found.untyped_storage().nbytes() == found.nbytes
        assert found.shape == native.shape and found.dtype == native.dtype and found.device == native.device
        if own == torch.float32:
            assert (found - native).abs().max() <= 1e-5 * native.abs().max(), (kind, len(pixels))
        else:
            exact = random_vae(kind, own, torch.float32).encode(pixels)
            ours, theirs = ((one.float() - exact).square().mean().sqrt() for one in (found, native))
            assert ours <= 1.1 * theirs, (ours, theirs)
        return len(calls)

    draw = torch.Generator().manual_seed(7)
    with torch.inference_mode():
        for kind, dtype in (("2.1", "float32"), ("2.2", "float32"), ("2.1", "float16")):
            own = getattr(torch, dtype)
            vae = random_vae(kind, own, own)
            held = {name: tensor.data_ptr() for name, tensor in vae.first_stage_model.named_parameters()}
            picture = torch.rand(1, 20, 16, 3, generator=draw)  # four of 20 rows are cropped
            grey = torch.full((12, 20, 16, 3), 0.5)
            assert encoded_by_comfyui(vae, torch.cat([picture, grey])) == 0
            if own == torch.float32:
                moving = torch.rand(5, 20, 16, 3, generator=draw)
                assert encoded_by_comfyui(vae, torch.cat([moving[:2], grey[:10], picture])) == 0
                assert encoded_by_comfyui(vae, torch.cat([picture, grey[:5]])) == 1  # six frames: the last is left out
                assert encoded_by_comfyui(vae, moving) == 1
                assert encoded_by_comfyui(vae, picture) == 1
            assert held == {name: one.data_ptr() for name, one in vae.first_stage_model.named_parameters()}


def check_still_frames_left_to_comfyui(it: World) -> None:
    """What does not fit into memory, and VAEs that a node changed, before or after."""
    import copy

    import torch
    from comfy import model_management

    class Compiled(torch.nn.Module):  # has the names of torch.compile
        def __init__(self, module: Any) -> None:
            super().__init__()
            self._orig_mod = module

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self._orig_mod(*args, **kwargs)

    vae = random_vae("2.1", torch.float32, torch.float32)
    faster, pixels = it.host.with_still_frames(vae), torch.full((9, 16, 16, 3), 0.25)
    assert faster is not vae and it.host.native_vae_config(faster) and it.host.native_vae_config(vae)
    loaded = model_management.load_models_gpu
    short = [None, torch.AcceleratorError("out of memory"), None, torch.OutOfMemoryError("no")]  # ComfyUI's, ours, ...

    def load(*args: Any, **kwargs: Any) -> None:
        if (fault := short.pop()) is not None:
            raise fault
        loaded(*args, **kwargs)

    elsewhere = copy.copy(vae)
    elsewhere.device = torch.device("mps")
    assert it.host.native_vae_config(vae) and it.host.native_vae_config(elsewhere) is None
    other = copy.copy(faster)  # as ComfyUI's Select VAE Device does
    other.process_input = lambda image: 0 * image
    dark = other.encode(pixels)
    model = vae.first_stage_model
    with torch.inference_mode():
        native = vae.encode(pixels)
        model_management.load_models_gpu = load
        try:
            for _ in range(2):
                assert torch.equal(faster.encode(pixels), native)
        finally:
            model_management.load_models_gpu = loaded
        assert not short and (dark - vae.encode(0.5 + 0 * pixels)).abs().max() <= 1e-5 and not torch.equal(dark, native)
        model.encode = lambda pixels: torch.zeros(1, 16, 3, 2, 2)
        assert not faster.encode(pixels).any() and it.host.native_vae_config(vae)  # which still decodes as Wan's
        del model.encode
        model.encoder = Compiled(model.encoder)
        assert (faster.encode(pixels) - native).abs().max() <= 1e-5 * native.abs().max()
    for left in (None, elsewhere, vae.patcher, it.host.with_still_frames(vae)):
        assert it.host.with_still_frames(left) is left


def check_pictures_that_are_no_video(it: World) -> None:
    """A batch of pictures, by the attribute or by the argument of a newer ComfyUI, is encoded one by one."""
    import torch
    from comfy import sd

    vae = random_vae("2.1", torch.float32, torch.float32)
    faster, pictures, real = it.host.with_still_frames(vae), torch.full((5, 16, 16, 3), 0.25), sd.VAE.encode

    def newer(self: Any, pixel_samples: Any, not_video: bool | None = None) -> Any:
        self.not_video = bool(not_video)
        return real(self, pixel_samples)

    with torch.inference_mode():
        faster.not_video = True
        one_by_one = faster.encode(pictures)
        faster.not_video, sd.VAE.encode = False, newer
        try:
            assert torch.equal(faster.encode(pictures, not_video=True), one_by_one) and len(one_by_one) == 5
        finally:
            sd.VAE.encode = real


def check_pictures_of_our_nodes(it: World) -> None:
    """WanCore's own nodes encode a picture with ComfyUI's VAE so."""
    import torch
    from comfy.ldm.wan.vae import WanVAE

    inputs = importlib.import_module("pack.nodes.video_inputs")
    vae, real, calls = random_vae("2.1", torch.float32, torch.float32), WanVAE.encode, []
    video = inputs.VideoInputs(positive=[], negative=[], vae=vae, width=16, height=16, frames=9)
    clip = torch.zeros(1, 3, 9, 16, 16)
    clip[:, :, 0] = 0.5
    with torch.inference_mode():
        expected = vae.encode(inputs.video_to_pixels(clip))
        WanVAE.encode = lambda *args: calls.append(1) or real(*args)
        try:
            assert (video.encode(clip) - expected).abs().max() <= 1e-5 * expected.abs().max() and not calls
        finally:
            WanVAE.encode = real


def check_more_colours(it: World) -> None:
    """A VAE that makes pictures of twice the size, 12 colours of a pixel, is ComfyUI's."""
    import torch
    from comfy.sd import VAE

    state = random_vae("2.1", torch.float32, torch.float32).get_sd()
    assert it.host.native_vae_config(VAE(sd=dict(state))) is not None
    twice = VAE(sd={name: torch.cat([one] * 4) if "decoder.head.2" in name else one for name, one in state.items()})
    assert it.host.native_vae_config(twice) is None and it.host.with_still_frames(twice) is twice


def check_options(it: World) -> None:
    """WanCore's VAE runs where ComfyUI's options for VAEs say, and in that precision; a precision that the node names
    holds. On a GPU, that of a report of decoding elsewhere too. A GPU is simulated, where weights cannot be."""
    import asyncio

    import torch
    from comfy import model_management
    from comfy.cli_args import args

    from wan_core.execution.report import Report

    loaders, video = (importlib.import_module(f"pack.nodes.{name}") for name in ("part_loaders", "video"))
    real, latents = model_management.get_torch_device, torch.randn(1, 16, 2, 4, 4)
    gpu, cpu = torch.device("mps"), torch.device("cpu")

    def load(precision: str) -> tuple[Any, str]:
        made = asyncio.run(loaders.WanCoreVAELoader.execute(loaders.TINY_T2V, precision))
        return made.args[0], made.ui.as_dict()["text"][0]

    model_management.get_torch_device = lambda: gpu
    try:
        vae, words = load("auto")
        assert vae.device == gpu and vae.patcher.part.dtype == torch.bfloat16 and "--" not in words, words
        args.cpu_vae = True
        vae, words = load("auto")
        assert vae.patcher.part.dtype == torch.float32 and words.endswith("on the CPU by --cpu-vae"), words
        with torch.inference_mode():
            images, report = video.WanCoreVAEDecode.execute(vae, {"samples": latents}, "auto").args
            assert images.shape == (5, 32, 32, 3) and report.device == cpu and vae.encode(images).shape[1] == 16
            known, _ = vae.encode_known(images[:1].movedim(-1, 0)[None], None, 5)
            assert known.device == cpu
            [note] = video.WanCoreVAEDecode.execute(vae, {"samples": latents}, "auto", Report(gpu)).args[1].notes
            assert note.startswith("decode: the VAE ran on cpu, "), note
        for option, precision, dtype, told in (
            ("bf16_vae", "auto", torch.bfloat16, "precision by --bf16-vae"),
            ("bf16_vae", "fp32", torch.float32, None),
            ("fp16_vae", "auto", torch.float32, "warning: --fp16-vae does not hold: WanCore's VAE computes in"),
        ):
            setattr(args, option, True)
            vae, words = load(precision)
            setattr(args, option, False)
            assert vae.patcher.part.dtype == dtype, words
            assert "16-vae" not in words if told is None else told in words, words
    finally:
        model_management.get_torch_device, args.cpu_vae = real, False
