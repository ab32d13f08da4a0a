"""The most device memory in use, by all processes of the visible GPUs, as nvidia-smi says five times a second."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from threading import Thread

EVERY_MS = 200


class DeviceMemory:
    """Reads until `stop`. `peak_gib` is the most on any one GPU since `reset`; None where no GPU answers."""

    def __init__(self) -> None:
        self.most: float | None = None
        command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"-lms={EVERY_MS}"]
        if seen := os.environ.get("CUDA_VISIBLE_DEVICES"):
            command += ["-i", seen]
        self.process: subprocess.Popen[str] | None = None
        with suppress(OSError):
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):
                used = float(line)
                self.most = used if self.most is None else max(self.most, used)

    def reset(self) -> None:
        self.most = None

    @property
    def peak_gib(self) -> float | None:
        return None if self.most is None else round(self.most / 1024, 2)

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
