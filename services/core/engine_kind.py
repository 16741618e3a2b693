"""Kinds of inference engines that a worker can run."""

from enum import StrEnum


class EngineKind(StrEnum):
    """tideserve's own engine, whose groups merge and split, or vLLM, which never merges."""

    TIDESERVE = "tideserve"
    VLLM = "vllm"
