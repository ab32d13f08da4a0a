"""Acceleration of Wan models that ComfyUI runs itself ("native" models), through what its hooks hand over.

`plan` makes the plan of a sampler's steps. `run` is the state of one sampling run and of one forward, `attention` takes
over self-attention, `sparse` makes it sparse. Nothing here imports ComfyUI.
"""
