"""Decides whether recalling the KV of a prefix from host memory is faster than computing it."""

from services.core.cost.model import CostModel
from services.core.host.vocabulary import HostSettings

RECALL_MIN = 2
"""Least blocks of a recall: a sequence does not start before the end of its recall."""
RECALL_MIN_UNMEASURED = 4
"""The same without a cost model."""


def recall_pays(
    settings: HostSettings,
    cost_model: CostModel | None,
    block_size: int,
    have: int,
    more: int,
    wait_s: float,
) -> bool:
    """Whether to recall `more` blocks, which follow `have` blocks on the device.

    `wait_s`: seconds until the lane to the host is free.
    """
    if more < RECALL_MIN:
        return False
    if cost_model is None:
        return more >= RECALL_MIN_UNMEASURED
    recall_s = wait_s + more * settings.block_bytes / settings.link_bytes_per_s
    return recall_s < cost_model.chunk_s(have * block_size, more * block_size)
