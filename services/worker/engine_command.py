"""How a worker's engine process is started: our own, or vLLM's in an environment of its own."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from services.common.settings import PREFIX
from services.common.vllm_environment import vllm_environment
from services.core.engine_kind import EngineKind
from services.worker.config import WorkerConfig

VLLM_ENGINE = Path(__file__).resolve().parent / "vllm_engine" / "__main__.py"

VISIBLE = "CUDA_VISIBLE_DEVICES"
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""On a GPU: memory of activations, of which each batch needs another size, leaves no gaps."""


def engine_command(config: WorkerConfig) -> list[str]:
    """The command, but for the arguments that every engine takes."""
    if config.engine == EngineKind.VLLM:
        # -P: nothing beside that file is a module of its own.
        return [str(config.engine_python), "-P", str(VLLM_ENGINE)]
    return [sys.executable, "-m", "services.worker.engine"]


def engine_environment(
    config: WorkerConfig, inherited: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Its environment.

    Options in the environment stay here: the servicer gives the engine its configuration, which has
    no secrets.
    """
    kept = {key: value for key, value in inherited.items() if not key.startswith(PREFIX)}
    if config.engine == EngineKind.VLLM:
        assert config.engine_python is not None
        on_cpu = config.device == "cpu"
        seen = kept | _one_gpu(config.device, kept)
        return vllm_environment(seen, config.engine_python, config.threads, on_cpu)
    allocator = {} if config.device == "cpu" else ALLOCATOR
    return allocator | kept | {"OMP_NUM_THREADS": str(config.threads)}


def _one_gpu(device: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Shows vLLM, which takes the first GPU, the one of `cuda:N` alone."""
    number = device.partition(":")[2]
    if not number:
        return {}
    shown = inherited.get(VISIBLE, "").split(",")
    chosen = shown[int(number)] if int(number) < len(shown) and shown != [""] else number
    return {VISIBLE: chosen}
