"""A pack for ComfyUI: small nodes in place of what has only one, large size (text, vision, audio and segmentation
encoders), and one that keeps latents. Copied into custom_nodes; imports nothing of this project."""

import hashlib
from pathlib import Path

import folder_paths
import torch


def _rows(text, *shape):
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class _StandIn:
    CATEGORY, FUNCTION = "stand-in", "run"


class StandInText(_StandIn):
    """In place of CLIPTextEncode and its UMT5."""

    RETURN_TYPES = ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"text": ("STRING", {"default": ""})}}

    def run(self, text):
        rows = torch.zeros(1, 512, 4096)
        rows[:, :11] = _rows(text, 1, 11, 4096)
        return ([[rows, {"pooled_output": None}]],)


class _Seen:
    def __init__(self, rows):
        self.penultimate_hidden_states = rows


class StandInVision(_StandIn):
    """In place of CLIPVisionEncode."""

    RETURN_TYPES = ("CLIP_VISION_OUTPUT",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",)}}

    def run(self, image):
        return (_Seen(_rows(str(tuple(image.shape)), 1, 257, 1280)),)


class StandInAudio(_StandIn):
    """In place of AudioEncoderEncode: two seconds of 25 layers. steady: four seconds in which nothing changes."""

    RETURN_TYPES = ("AUDIO_ENCODER_OUTPUT",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {}, "optional": {"steady": ("BOOLEAN", {"default": False})}}

    def run(self, steady=False):
        layers = [_rows(f"audio {n}", 1, 1 if steady else 100, 1024) for n in range(25)]
        layers = [layer.expand(1, 200, 1024) if steady else layer for layer in layers]
        samples = 320 * layers[0].shape[1]
        return ({"encoded_audio": layers[-1], "encoded_audio_all_layers": layers, "audio_samples": samples},)


class StandInMask(_StandIn):
    """In place of SAM3_Detect: the left half of each frame."""

    RETURN_TYPES = ("MASK",)

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"image": ("IMAGE",)}}

    def run(self, image):
        mask = torch.zeros(image.shape[:3])
        mask[..., : image.shape[2] // 2] = 1
        return (mask,)


class StandInPictures(_StandIn):
    """In place of LoadImage and GetVideoComponents."""

    RETURN_TYPES = ("IMAGE", "AUDIO", "FLOAT")

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"name": ("STRING",), "frames": ("INT", {"default": 1})}}

    def run(self, name, frames):
        return (_rows(name, frames, 64, 64, 3).sigmoid(), None, 16.0)


class KeepLatent(_StandIn):
    RETURN_TYPES, OUTPUT_NODE = (), True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"latent": ("LATENT",), "name": ("STRING",)}}

    def run(self, latent, name):
        torch.save(latent["samples"], Path(folder_paths.get_output_directory()) / f"{name}.pt")
        return {}


NODES = (StandInText, StandInVision, StandInAudio, StandInMask, StandInPictures, KeepLatent)
NODE_CLASS_MAPPINGS = {node.__name__: node for node in NODES}
