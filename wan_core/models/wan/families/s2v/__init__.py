"""The family `s2v`: Wan2.2-S2V-14B, a picture of a person who speaks or sings what an audio file says.

| file | what it holds |
|---|---|
| `tasks` | the task and its defaults |
| `config` | the numbers of an architecture |
| `keys` | the names of parameters on disk |
| `recognise` | from shapes to an architecture and its task |
| `model` | the transformer (torch) |
| `audio` | features of speech -> tokens, and attention to them (torch) |
| `motion` | frames that came before -> tokens, and all positions (torch) |
| `inputs` | what ComfyUI's CONDITIONING, or the media of a clip, are to the transformer (torch) |
| `features` | from the layers of a wav2vec 2.0 encoder to video frames (torch) |
"""

from __future__ import annotations

from wan_core.models.wan.families.clips import ClipRules, MediaRules
from wan_core.models.wan.families.family import Family, Hearing, class_of, function_of
from wan_core.models.wan.families.s2v.config import (
    COMFYUI_POSITIONS,
    LEAST_SIDE,
    LONGER,
    MOTION_PIXELS,
    padded_frames,
    prepared_bytes,
)
from wan_core.models.wan.families.s2v.keys import official_names, parameter_names
from wan_core.models.wan.families.s2v.recognise import choose, read_config
from wan_core.models.wan.families.s2v.tasks import TASKS
from wan_core.models.wan.families.wan.keys import diffusers_modules

S2V = Family(
    name="s2v",
    tasks=TASKS,
    layouts=(("official", official_names),),
    parameter_names=parameter_names,
    lora_modules=diffusers_modules,
    config=read_config,
    choose=choose,
    model_class=class_of("s2v.model", "S2VModel"),
    image_inputs=function_of("s2v.inputs", "image_inputs"),
    conditioning_keys=frozenset(
        {"audio_embed", "reference_latents", "reference_motion", "control_video", COMFYUI_POSITIONS}
    ),
    read_conditioning=function_of("s2v.inputs", "read_conditioning"),
    branch_keys=frozenset({"audio_embed", "reference_latents"}),
    prepared_bytes=prepared_bytes,
    clips=ClipRules(overlaps=(0,), always=True, longer=LONGER, history=MOTION_PIXELS, padded=padded_frames),
    media=MediaRules(
        needs=("reference", "audio"),
        takes=("pose_video",),
        size_of="reference",
        step=LEAST_SIDE,
        least=LEAST_SIDE,
        length_of="audio",
        resampled=True,
        covering=True,
        past_end="black",
        seen=(),
    ),
    hears=Hearing(lambda dit: (dit.audio_layers, dit.audio_dim), function_of("s2v.features", "features_until")),
    clip_lead=function_of("s2v.inputs", "clip_lead"),
    clip_inputs=function_of("s2v.inputs", "clip_inputs"),
)
