"""Limits of partial splits equal the room that the memory of real stages leaves."""

import pytest

from services.core.groups.layer_map import ModelShape
from services.core.groups.slab_names import EMBEDDING, HEAD, layer_name
from services.core.groups.vocabulary import Group, GroupPhase, Member
from services.core.overload.partial_split import partial_splits_of, partial_targets
from services.core.overload.worker_facts import WorkerFacts
from tests.support.device import CHUNK_BYTES
from tests.unit.worker.engine.memory.test_stage_memory import LAYERS, SHAPE, make_memory


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("members", [4, 5, 6])
def test_partial_splits_are_planned_with_the_room_that_each_member_has(
    members: int, tied: bool
) -> None:
    """While it is prepared, each member holds its layers before and after the split."""
    memories = [make_memory(tied) for _ in range(members)]
    plan = memories[0].plan
    layer_bytes, embedding_bytes, head_bytes = (
        memories[0].slabs[name].chunks * CHUNK_BYTES for name in (layer_name(0), EMBEDDING, HEAD)
    )
    kv_bytes = SHAPE.size_bytes // SHAPE.block_size
    model = ModelShape(LAYERS, layer_bytes, embedding_bytes, head_bytes, tied, kv_bytes)
    names = [f"w{number}" for number in range(members)]
    facts = {
        name: WorkerFacts(
            name,
            "m",
            SHAPE.block_size,
            plan.num_blocks,
            plan.arena_bytes,
            model,
            ("h",),
            chunk_bytes=plan.chunk_bytes,
        )
        for name in names
    }
    ends = [LAYERS * number // members for number in range(members + 1)]
    for memory, first, end in zip(memories, ends, ends[1:], strict=False):
        memory.set_stage(first, end)
    stages = tuple(map(Member, names, ["i"] * members, ends, ends[1:]))
    group = Group("g", 1, GroupPhase.STABLE, stages, "m")
    splits, _ = partial_splits_of(group, facts)
    assert splits
    for split in splits:
        room = [
            memories[names.index(stage.worker_id)].blocks_after_adding(
                stage.first_layer, stage.end_layer
            )
            for target in partial_targets(group, facts, split.parts)
            for stage in target
        ]
        assert split.limit_tokens == min(room) * SHAPE.block_size
    for memory in memories:
        memory.arena.close()
