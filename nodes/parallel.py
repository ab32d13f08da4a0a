"""The launcher: worker processes on several GPUs, outside of ComfyUI's process."""

from __future__ import annotations

import os

from comfy_api.latest import io, ui

from wan_core.workers.options import ALLOW_CPU, WorkerOptions, parse_devices

from . import host
from .schema import ADVANCED, schema
from .workers import WORKERS, WorkersSocket


class WanCoreLauncher(io.ComfyNode):
    """Several GPUs for everything downstream of its output."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "WanCoreLauncher",
            "WanCore Launcher",
            aliases=("multi gpu", "xdit", "ulysses", "parallel", "distributed"),
            shows_text=True,
            description="Starts one worker process for each GPU. Connect it to the loaders: sampling, decoding and "
            "text then run there, on all GPUs together.",
            inputs=[
                io.String.Input(
                    "devices",
                    default="auto",
                    tooltip="'auto': every GPU. Otherwise how many, or which: '4', '0,1', '2,3'. 'cpu,cpu' works "
                    "without a GPU, to try it out.",
                ),
                io.String.Input(
                    "mesh",
                    **ADVANCED,
                    default="auto",
                    tooltip="How the GPUs share the work: guidance x ring x ulysses, for example '2x1x2' for four. "
                    "'auto' takes the fastest for the size of the video, and refuses what one GPU would do faster.",
                ),
                io.Int.Input(
                    "start_timeout",
                    **ADVANCED,
                    default=300,
                    min=5,
                    max=86400,
                    tooltip="Seconds until all workers must be there.",
                ),
                io.Int.Input(
                    "step_timeout",
                    **ADVANCED,
                    default=600,
                    min=5,
                    max=86400,
                    tooltip="Seconds after which workers that get no further are ended, and an error says where each "
                    "of them was. Must be longer than loading the models, and than one step.",
                ),
            ],
            outputs=[
                WORKERS.Output("workers", display_name="workers", tooltip="For the WanCore loaders."),
            ],
        )

    @classmethod
    def validate_inputs(
        cls,
        devices: str | None = None,
        mesh: str | None = None,
        start_timeout: int | None = None,
        step_timeout: int | None = None,
    ) -> bool:
        if devices is not None:
            seconds = (300 if start_timeout is None else start_timeout, 600 if step_timeout is None else step_timeout)
            cls._options(devices, "auto" if mesh is None else mesh, *seconds)
        return True

    @classmethod
    def execute(cls, devices: str, mesh: str, start_timeout: int, step_timeout: int) -> io.NodeOutput:
        options = cls._options(devices, mesh, start_timeout, step_timeout)
        socket = WorkersSocket(options)
        socket.held.begin()
        socket.workers.start()  # they come up while other nodes work
        return io.NodeOutput(socket, ui=ui.PreviewText(f"{len(options.devices)} workers: {', '.join(options.devices)}"))

    @staticmethod
    def _options(devices: str, mesh: str, start_timeout: int, step_timeout: int) -> WorkerOptions:
        return WorkerOptions(
            devices=parse_devices(devices, host.gpu_count(), cpu=os.environ.get(ALLOW_CPU) == "1"),
            mesh=mesh.strip().lower(),
            start_timeout=start_timeout,
            step_timeout=step_timeout,
        )
