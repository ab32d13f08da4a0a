"""What names of files tell, on names from public model pages, and that metadata count before names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wan_core.config.file_names import file_says, read_name, safetensors_metadata
from wan_core.sampling.presets import find_preset

# As they are on Hugging Face and Civitai: name -> (steps it is distilled for, expert, SVI).
NAMES: dict[str, tuple[int | None, str | None, str | None]] = {
    # LoRAs of lightx2v, Comfy-Org and Kijai
    "wan2.2_t2v_A14b_high_noise_lora_rank64_lightx2v_4step_1217.safetensors": (4, "high", None),
    "wan2.2_i2v_A14b_low_noise_lora_rank64_lightx2v_4step_1022.safetensors": (4, "low", None),
    "wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_720p_260412.safetensors": (4, "high", None),
    "wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors": (4, "low", None),
    "Wan2.2-Lightning_I2V-A14B-4steps-lora_HIGH_fp16.safetensors": (4, "high", None),
    "Wan2.2-Lightning_T2V-v1.1-A14B-4steps-lora_LOW_fp16.safetensors": (4, "low", None),
    "Wan22_A14B_T2V_LOW_Lightning_4steps_lora_250928_rank64_fp16.safetensors": (4, "low", None),
    "Wan_2_2_I2V_A14B_HIGH_lightx2v_MoE_distill_lora_rank_64_bf16.safetensors": (4, "high", None),
    "Wan_2_2_I2V_A14B_HIGH_lightx2v_4step_lora_260412_rank_64_fp16.safetensors": (4, "high", None),
    "Wan21_T2V_14B_lightx2v_cfg_step_distill_lora_rank32.safetensors": (4, None, None),
    "lightx2v_I2V_14B_480p_cfg_step_distill_rank128_bf16.safetensors": (4, None, None),
    "Wan21_CausVid_14B_T2V_lora_rank32_v2.safetensors": (4, None, None),
    "Wan21_CausVid_bidirect2_T2V_1_3B_lora_rank32.safetensors": (4, None, None),
    "Wan21_AccVid_I2V_480P_14B_lora_rank32_fp16.safetensors": (8, None, None),
    "Wan_2_1_T2V_14B_480p_rCM_lora_average_rank_83_bf16.safetensors": (4, None, None),
    "Wan2_1_self_forcing_sid_v2_1_3B_lora_rank_32_fp16.safetensors": (4, None, None),
    "Wan2.1-T2V-1.3B-Self-Forcing-DMD-FP16-LoRA-Rank32.safetensors": (4, None, None),
    "Wan2_2_5B_FastWanFullAttn_lora_rank_128_bf16.safetensors": (4, None, None),
    "Wan22_TI2V_5B_Turbo_lora_rank_64_fp16.safetensors": (4, None, None),
    "Wan2.1_T2V_14B_FusionX_LoRA.safetensors": (8, None, None),
    # distilled and merged transformers
    "wan2.2_i2v_A14b_high_noise_scaled_fp8_e4m3_lightx2v_4step_comfyui_1030.safetensors": (4, "high", None),
    "wan2.2_i2v_A14b_low_noise_lightx2v_4step.safetensors": (4, "low", None),
    "TurboWan2.2-I2V-A14B-high-720P-quant.pth": (4, "high", None),
    "TurboWan2.2-I2V-A14B-low-720P.pth": (4, "low", None),
    "FastWan2.2-TI2V-5B-FullAttn": (4, None, None),
    "Wan2_2-TI2V-5B-FastWanFullAttn_bf16.safetensors": (4, None, None),
    "self_forcing_dmd.pt": (4, None, None),
    "Wan2.1-T2V-1.3B-Self-Forcing-DMD-VACE-FP16.safetensors": (4, None, None),
    "wan2.2-rapid-mega-aio-v12-Q5_K.gguf": (4, None, None),
    "wan2.2-i2v-rapid-aio-v10-nsfw.safetensors": (4, None, None),
    "DasiwaWAN22I2V14BLightspeed_synthseductionHighV9.safetensors": (4, "high", None),
    "wan21Lightspeed_lightspeedI2v14B480p.safetensors": (4, None, None),
    "Wan2.2_Remix_NSFW_i2v_14b_high_lighting_v2.0.safetensors": (4, "high", None),
    "Wan2.2_Remix_NSFW_i2v_14b_low_lighting_fp8_e4m3fn_v3.0.safetensors": (4, "low", None),
    "Wan14BT2VFusioniX_Phantom_fp16.safetensors": (8, None, None),
    "krea-realtime-video-14b.safetensors": (4, None, None),
    "wan_animate_2_distill_int8_convrot.safetensors": (4, None, None),
    # neither distilled nor of a LoRA that is
    "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors": (None, "high", None),
    "Wan2_2-I2V-A14B-LOW_fp8_e4m3fn_scaled_KJ.safetensors": (None, "low", None),
    "Wan2.2-T2V-A14B-HighNoise-Q4_K_M.gguf": (None, "high", None),
    "wan2.2_ti2v_5B_fp16.safetensors": (None, None, None),
    "wan_animate_2_int8_convrot.safetensors": (None, None, None),
    "wan22RemixT2VI2V_i2vHighV30.safetensors": (None, "high", None),
    "smoothMixWan22I2VT2V_i2vLow-Q5_K_M.gguf": (None, "low", None),
    "DasiwaWAN22I2V14BTastysinV8_q8High.gguf": (None, "high", None),
    "wan22I2VLLSDasiwaNm.low.safetensors": (None, "low", None),
    "Wan2.2-Fun-A14B-InP-high-noise-HPS2.1.safetensors": (None, "high", None),
    "Wan2.1-Fun-14B-InP-MPS.safetensors": (None, None, None),
    "Wan22_PusaV1_lora_HIGH_resized_dynamic_avg_rank_98_bf16.safetensors": (None, "high", None),
    "Wan21_PusaV1_LoRA_14B_rank512_bf16.safetensors": (None, None, None),
    "Wan22_I2V_VBVR_HIGH_rank_64_fp16.safetensors": (None, "high", None),
    "WanAnimate_relight_lora_fp16_resized_from_128_to_dynamic_22.safetensors": (None, None, None),
    "UniAnimate-Wan2.1-14B-Lora-12000-fp16.safetensors": (None, None, None),
    "headswap_bernini_r64_73f640_step3000_low_noise.safetensors": (None, "low", None),
    "WAN2.2-LoRA-V3_000006000_high_noise.safetensors": (None, "high", None),
    "wan22.r3v3rs3_c0wg1rl-14b-High-i2v_e70.safetensors": (None, "high", None),
    "slop_twerk_LowNoise_merged3_7_v2.safetensors": (None, "low", None),
    "NSFW-22-L-e8.safetensors": (None, "low", None),
    "SVI_v2_PRO_Wan2.2-I2V-A14B_HIGH_lora_rank_128_fp16.safetensors": (None, "high", "2.0 Pro"),
    "svi-shot.safetensors": (None, None, "another"),
    "Stable-Video-Infinity_wan2.1_v2.0.safetensors": (None, None, "another"),
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_public_files(name: str) -> None:
    says = read_name(name)
    assert (says.steps, says.expert, says.svi) == NAMES[name]
    assert bool(says.distilled) == (says.steps is not None)
    preset, why = find_preset("auto", [Path("other.safetensors"), Path("/models/loras") / name])
    assert (preset.steps if preset else None) == says.steps
    assert (name in why and "choose preset none" in why) == (says.steps is not None)


def test_releases_and_families() -> None:
    releases = ("Wan2.1_T2V_14B", "Wan21_x", "wan_2.2_x", "WanVideo_2_1", "x-A14B", "high_noise_model", "wan-25")
    assert [read_name(name).release for name in releases] == ["2.1", "2.1", "2.2", "2.1", "2.2", "2.2", None]
    named = [read_name(name).family for name in ("wan_animate_2_bf16", "Wan2.2-Animate2", "Wan2.2-Animate-14B")]
    assert named == ["animate2", "animate2", None]


@pytest.mark.parametrize(
    ("path", "steps", "expert"),
    [
        ("Wan2.2-T2V-A14B-4steps-lora-rank64-Seko-V1.1/high_noise_model.safetensors", 4, "high"),
        ("Wan2.2-T2V-A14B-4steps-lora-250928/low_noise_model.safetensors", 4, "low"),
        ("distill_models/high_noise_model/diffusion_pytorch_model.safetensors.index.json", None, "high"),
        ("Wan2.2-Lightning/wan22_nolightning.safetensors", None, None),
    ],
)
def test_a_folder_counts_after_its_file(path: str, steps: int | None, expert: str | None) -> None:
    says = file_says(Path("models") / path)
    assert (says.steps, says.expert) == (steps, expert)


@pytest.mark.parametrize(
    ("name", "metadata", "steps", "reason"),
    [
        ("plain", {"distilled": "4-step"}, 4, "the metadata of plain.safetensors say that it is step-distilled"),
        ("plain", {"distilled": "8 steps"}, 8, "metadata"),
        ("plain", {"distilled": "yes"}, 4, "metadata"),
        ("lightning", {"distilled": "no"}, None, "not distilled"),
        ("plain", {"modelspec.title": "Wan2.2 Lightning, 8 steps"}, 8, "the metadata of plain.safetensors says 'Light"),
        ("lightning_storm", {"ss_num_train_images": "40"}, None, "was trained (ss_num_train_images)"),
        ("lightning_storm", {"training_info": '{"step": 2000}'}, None, "was trained (training_info)"),
        ("style", {"ss_num_train_images": "40"}, None, ""),
        ("lightning_storm", {}, 4, "the name of lightning_storm.safetensors says 'lightning'"),
    ],
)
def test_metadata_before_names(
    tmp_path: Path, name: str, metadata: dict[str, str], steps: int | None, reason: str
) -> None:
    file = tmp_path / f"{name}.safetensors"
    save_file({"x": torch.zeros(1)}, file, metadata)
    says = file_says(file)
    assert says.steps == steps and reason in says.why and (reason != "" or says.why == "")
    preset, why = find_preset("auto", [file])
    assert (preset is None) == (steps is None) and says.why in why


def test_the_metadata_of_experts_and_of_svi(tmp_path: Path) -> None:
    file = tmp_path / "renamed_high.safetensors"
    save_file({"x": torch.zeros(1)}, file, {"modelspec.title": "SVI 2.0 Pro", "expert": "low"})
    says = file_says(file)
    assert (says.expert, says.expert_by, says.svi) == ("low", "metadata", "2.0 Pro")
    file.write_bytes(b"\xff" * 20)
    assert file_says(file).steps is None


def test_metadata_are_read_again_when_the_file_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before; a file that is gone says nothing."""
    path, opened = tmp_path / "one.safetensors", []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *how: opened.append(self) or real(self, *how))
    for second, text in enumerate(("high", "low", "high")):
        save_file({"x": torch.zeros(1)}, path, {"expert": text})
        os.utime(path, (second, second))
        opened.clear()
        assert [safetensors_metadata(path)["expert"] for _ in range(3)] == [text] * 3 and opened == [path]
    path.unlink()
    assert safetensors_metadata(path) == {}
    save_file({"x": torch.zeros(1)}, path, {"expert": "low"})
    assert safetensors_metadata(path)["expert"] == "low"
