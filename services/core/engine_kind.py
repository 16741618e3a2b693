"""The kinds of inference engines that a worker can run."""

from enum import StrEnum


class EngineKind(StrEnum):
    """tideserve's own engine, whose workers can merge into pipelines, or vLLM, which cannot."""

    TIDESERVE = "tideserve"
    VLLM = "vllm"
