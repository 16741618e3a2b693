"""Configuration of one profiling."""

from dataclasses import dataclass
from pathlib import Path

from services.common.config import choice, device_name, number


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """What to profile and where to store the result.

    A `companion` stores nothing and measures until it is killed: it keeps the memory that workers
    of one machine share as busy as another worker would.
    """

    model_dir: Path
    profile_dir: Path
    memory_bytes: int = number(minimum=1, maximum=2**50)
    device: str = device_name("cpu")
    dtype: str = choice("bfloat16", "bfloat16", "float32", "float64")
    load_format: str = choice("auto", "auto", "dummy")
    threads: int = number(1, minimum=1, maximum=1024)
    max_batch_tokens: int = number(256, minimum=1, maximum=2**20)
    max_running: int = number(128, minimum=1, maximum=2**16)
    quick: bool = False
    companion: bool = False
