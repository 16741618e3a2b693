"""What runs a worker's model."""

from enum import StrEnum


class EngineKind(StrEnum):
    """Our own engine, whose groups merge and split, or another one, which serves alone."""

    TIDESERVE = "tideserve"
    VLLM = "vllm"
