"""Partial splits of groups whose workers have equal memory."""

from collections.abc import Sequence

from services.core.groups.layer_map import MemberMemory, ModelShape, Stage, grow_stages


def interleaved(group: Sequence[Stage], parts: int, layers: int) -> list[tuple[Stage, ...]]:
    """Split a group into `parts` groups as a memory manager does: each member keeps its layers."""
    shape = ModelShape(layers, 1, 0, 0, tied_embeddings=False, kv_bytes=1)
    divided = [group[first::parts] for first in range(parts)]
    return [
        grow_stages(shape, [MemberMemory(stage.worker_id, 1 << 20) for stage in part], part)
        for part in divided
    ]
