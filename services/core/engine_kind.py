"""The kinds of inference engines that a worker can run."""

from enum import StrEnum


class EngineKind(StrEnum):
    """tideserve's own engine, whose workers can merge into pipelines, or others, which cannot.

    `OPENAI`: a server with OpenAI's API that runs already, such as `vllm serve`.
    """

    TIDESERVE = "tideserve"
    VLLM = "vllm"
    OPENAI = "openai"
