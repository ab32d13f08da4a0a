"""Three clips in a row by the official loop of S2V, on tiny weights and the embedded VAE, kept in `tests/models/data`.

    python -m tests.s2v_loop FOLDER COMMIT    # of github.com/Wan-Video/Wan2.2; needs torchvision, diffusers, einops

Everything is drawn from seeds. Kept are the latents of every clip and, of the video's frames, the mean of every 8 x 8
pixels.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.animate_references import DATA, draw_weights, packages, sdpa
from wan_core.models.wan.families.s2v import INJECT_AFTER, S2VConfig

CONFIG = S2VConfig(
    in_channels=16, out_channels=16, dim=48, ffn_dim=64, num_heads=2, num_layers=5, text_dim=64, freq_dim=32,
    audio_layers=25, audio_dim=1024, injectors=2,
)  # fmt: skip
SIDE, CLIP, CLIPS, SEED, STEPS, SHIFT, GUIDANCE = 64, 16, 3, 7, 2, 3.0, 2.0  # CLIP: video frames that a clip hears
FRAMES = CLIP * CLIPS - 3
POSES = 40  # frames of the pose video: fewer than the clips have
STATES = 140  # frames of the speech encoder for so many frames of video
KEPT = DATA / "s2v_loop.safetensors"


def drawn_pictures(frames: int, seed: int) -> np.ndarray:
    """uint8 [F, SIDE, SIDE, 3] with large spots, which a VAE keeps."""
    small = np.random.default_rng(seed).integers(0, 256, (frames, SIDE // 8, SIDE // 8, 3), dtype=np.uint8)
    return small.repeat(8, 1).repeat(8, 2)


def drawn_states() -> Tensor:
    """States of a speech encoder: [W, n, C]."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randn(CONFIG.audio_layers, STATES, CONFIG.audio_dim, generator=generator)


def drawn_texts() -> list[Tensor]:
    """Rows of the prompt and of the negative prompt, [S, text_dim]."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return [torch.randn(20, CONFIG.text_dim, generator=generator) for _ in range(2)]


def drawn_noise() -> list[Tensor]:
    """The noise of each clip in turn, [16, T, Y, X]."""
    generator = torch.Generator().manual_seed(SEED)
    shape = 1, 16, CLIP // 4, SIDE // 8, SIDE // 8
    return [torch.randn(shape, generator=generator)[0] for _ in range(CLIPS)]


def spots(video: Tensor) -> Tensor:
    """[3, F, SIDE, SIDE] -> means of every 8 x 8 pixels [F, 3, SIDE / 8, SIDE / 8]."""
    return torch.nn.functional.avg_pool2d(video.transpose(0, 1).float(), 8)


# ------------------------------------------------------------------------------------------------------- the reference


class Poses:
    """In the place of decord's `VideoReader`: the pose video, at 16 frames per second."""

    def __init__(self, path: str) -> None:
        self.frames = drawn_pictures(POSES, SEED + 2)

    def __len__(self) -> int:
        return len(self.frames)

    def get_avg_fps(self) -> float:
        return 16.0

    def get_batch(self, indices: list[int]) -> Any:
        return SimpleNamespace(asnumpy=lambda: self.frames[indices])


class OfficialVAE:
    """The official `WanVAE_` with the embedded model's weights, called as `Wan2_1_VAE` calls it."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, module: ModuleType) -> None:
        from wan_core.checkpoint import load_vae
        from wan_core.pipeline.sources import TINY

        ours = load_vae(TINY / "vae.safetensors")
        config = ours.config
        self.model = module.WanVAE_(
            dim=config.encoder_dim, z_dim=config.z_dim, dim_mult=list(config.dim_mult),
            num_res_blocks=config.num_res_blocks, attn_scales=[],
            temperal_downsample=list(config.temporal_downsample), dropout=0.0,
        )  # fmt: skip
        self.model.eval().load_state_dict(ours.state_dict(), strict=True)
        self.scale = [torch.tensor(config.latents_mean), 1 / torch.tensor(config.latents_std)]
        self.decoded: list[Tensor] = []

    def encode(self, videos: Tensor) -> list[Tensor]:
        return [self.model.encode(one[None], self.scale).float()[0] for one in videos]

    def decode(self, latents: Tensor) -> list[Tensor]:
        self.decoded.append(latents[:, :, -(CLIP // 4) :].clone())
        return [self.model.decode(one[None], self.scale).float().clamp_(-1, 1)[0] for one in latents]


@contextmanager
def official(folder: Path) -> Iterator[Any]:
    """The official module `speech2video`, with stand-ins for what reads videos and sounds or uses several GPUs."""
    import diffusers
    import transformers

    # Imported before librosa is replaced, which they look for.
    assert transformers.Wav2Vec2ForCTC and diffusers.utils
    names = ("wan", "wan.modules", "wan.modules.s2v", "wan.utils", "wan.distributed")
    with packages(folder, *names):
        missing = {
            "decord": ["VideoReader"],
            "librosa": [],
            "wan.modules.t5": ["T5EncoderModel"],
            "wan.distributed.fsdp": ["shard_model"],
            "wan.distributed.util": ["get_world_size"],
            "wan.distributed.sequence_parallel": ["sp_attn_forward", "sp_dit_forward", "distributed_attention",
                                                  "gather_forward", "get_rank", "get_world_size"],
        }  # fmt: skip
        for name, entries in missing.items():
            module = ModuleType(name)
            module.__dict__.update(dict.fromkeys(entries))
            sys.modules[name] = module
        sys.modules["decord"].__dict__["VideoReader"] = Poses
        from wan import speech2video
        from wan.modules import model as base
        from wan.modules.s2v import model_s2v

        base.flash_attention = model_s2v.flash_attention = lambda q, k, v, **_: sdpa(q, k, v)
        yield speech2video


def loop(speech2video: Any, picture: Path, pose: str | None) -> tuple[Tensor, Tensor]:
    """Latents of all clips [CLIPS, 16, T, Y, X] and the video [3, F, H, W]."""
    from wan.modules import vae2_1
    from wan.modules.s2v import audio_encoder, model_s2v

    wan = object.__new__(speech2video.WanS2V)
    model = model_s2v.WanModel_S2V(
        cond_dim=16, audio_dim=CONFIG.audio_dim, enable_adain=True, adain_mode="attn_norm", zero_timestep=True,
        audio_inject_layers=list(INJECT_AFTER[: CONFIG.injectors]), enable_motioner=False, enable_framepack=True,
        framepack_drop_mode="padd", dim=CONFIG.dim, ffn_dim=CONFIG.ffn_dim, freq_dim=CONFIG.freq_dim,
        text_dim=CONFIG.text_dim, num_heads=CONFIG.num_heads, num_layers=CONFIG.num_layers,
    )  # fmt: skip
    model.eval().load_state_dict(draw_weights(CONFIG), strict=True)
    encoder = object.__new__(audio_encoder.AudioEncoder)
    encoder.video_rate = 30
    states, texts, noise = drawn_states(), iter(drawn_texts()), iter(drawn_noise())
    encoder.extract_audio_feat = lambda *_, **__: audio_encoder.linear_interpolation(states, 50, 30)
    wan.__dict__.update(
        device=torch.device("cpu"), rank=0, t5_cpu=True, init_on_cpu=False, num_train_timesteps=1000,
        param_dtype=torch.float32, vae=OfficialVAE(vae2_1), noise_model=model, audio_encoder=encoder, fps=16,
        audio_sample_m=0, motion_frames=73, drop_first_motion=True, sample_neg_prompt="",
        text_encoder=lambda *_: [next(texts)],
    )  # fmt: skip
    randn, torch.randn = torch.randn, lambda *_, **__: next(noise)
    try:
        video = wan.generate(
            "", str(picture), "", False, None, None, None, num_repeat=None, pose_video=pose, max_area=SIDE * SIDE,
            infer_frames=CLIP, shift=SHIFT, sampling_steps=STEPS, guide_scale=GUIDANCE, seed=SEED, offload_model=False,
        )  # fmt: skip
    finally:
        torch.randn = randn
    return torch.cat(wan.vae.decoded), video


@torch.no_grad()
def main(folder: str, commit: str) -> None:
    from PIL import Image
    from safetensors.torch import save_file

    tensors_of_loop = {}
    with tempfile.TemporaryDirectory() as place, official(Path(folder)) as speech2video:
        picture = Path(place, "reference.png")
        Image.fromarray(drawn_pictures(1, SEED)[0]).save(picture)
        for name, pose in (("", None), (" pose", "pose.mp4")):
            latents, video = loop(speech2video, picture, pose)
            assert video.shape == (3, FRAMES, SIDE, SIDE)
            tensors_of_loop |= {f"latents{name}": latents, f"frames{name}": spots(video)}
    tensors = {key: value.contiguous() for key, value in tensors_of_loop.items()}
    save_file(tensors, KEPT, {"program": "official", "version": commit})


if __name__ == "__main__":
    main(*sys.argv[1:])
