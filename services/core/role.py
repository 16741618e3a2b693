"""What a worker does best: the prompts, the answers, or both."""

from enum import StrEnum


class Role(StrEnum):
    """Advice for dispatch: every worker can run every request.

    A PREFILL worker computes prompts and hands the requests over to DECODE workers.
    """

    MIXED = "mixed"
    PREFILL = "prefill"
    DECODE = "decode"
