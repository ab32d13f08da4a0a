"""Acceleration of Wan models that ComfyUI runs itself ("native" models), through what its hooks hand over.

`schedule` finds the place of a sampler's steps in the whole schedule and `plan` makes the plan of them. `run` is the
state of one sampling run and of one forward, `attention` takes over self-attention, `sparse` makes it sparse. Nothing
here imports ComfyUI.
"""
