"""The configuration of a profiling run."""

from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.config import like
from services.core.setting import number
from services.worker.config import WorkerConfig
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.profile.batches import FULL, GPU, QUICK, Effort


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """The model and device to profile, and the folder for the profile.

    `co_runners`: number of other processes that run each batch at the same time, like the other
    workers of a machine. `quick`: measure fewer batches in less time.
    """

    model_dir: Path
    profile_dir: Path
    memory_bytes: int = like(WorkerConfig, "memory_bytes")
    device: str = like(WorkerConfig, "device")
    dtype: str = like(WorkerConfig, "dtype")
    load_format: str = like(WorkerConfig, "load_format")
    threads: int = like(WorkerConfig, "threads")
    max_batch_tokens: int = like(WorkerConfig, "max_batch_tokens")
    max_running: int = like(WorkerConfig, "max_running")
    quick: bool = False
    co_runners: int = number(0, minimum=0, maximum=63)

    @property
    def effort(self) -> Effort:
        """The grid of batches to measure on this device, and the time to spend."""
        if self.quick:
            return QUICK
        return GPU if torch.device(self.device).type == "cuda" else FULL

    def runner(self) -> RunnerConfig:
        """Return the runner configuration of the profiled engine."""
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
