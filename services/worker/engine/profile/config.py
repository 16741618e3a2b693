"""Configuration of one profiling."""

from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.config import choice, device_name, number
from services.worker.engine.runner import RunnerConfig


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """What to profile and where to store the result.

    `companions`: other engines that run each batch at the same time, as workers that share the
    memory of one machine do.
    """

    model_dir: Path
    profile_dir: Path
    memory_bytes: int = number(minimum=1, maximum=2**50)
    device: str = device_name("cpu")
    dtype: str = choice("bfloat16", ("bfloat16", "float32", "float64"))
    load_format: str = choice("auto", ("auto", "dummy"))
    threads: int = number(1, minimum=1, maximum=1024)
    max_batch_tokens: int = number(256, minimum=1, maximum=2**20)
    max_running: int = number(128, minimum=1, maximum=2**16)
    quick: bool = False
    companions: int = number(0, minimum=0, maximum=63)

    def runner(self) -> RunnerConfig:
        """The engine that is measured."""
        return RunnerConfig(
            model_dir=self.model_dir,
            device=self.device,
            dtype=getattr(torch, self.dtype),
            budget_bytes=self.memory_bytes,
            load_format=self.load_format,
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
            threads=self.threads,
        )
