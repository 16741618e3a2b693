"""A rough cost model, measured in moments before the first request.

Deadlines cannot bound iterations without one. It is not stored: the profile of an idle worker
replaces it at the next start, and until then the planner corrects it by what iterations take.
"""

from services.common.clock import monotonic_s
from services.core.cost.model import Chunks, CostModel, Sample, fit
from services.core.planner.block_pool import BlockPool
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.profile.measurer import Measurer, room_of
from services.worker.engine.profile.point import Room

TIME_MAX_S = 2.0
"""No batch begins later."""
REPEATS = 2
"""The first run of a batch warms up."""


def sketch(runner: ModelRunner, max_batch_tokens: int, max_running: int) -> CostModel:
    """Measure a few batches, quickest first; no sequence has blocks yet.

    The pool is one of its own, so that the planner's gives its blocks out as a replay expects.
    """
    measurer = Measurer(runner, BlockPool(runner.num_blocks))
    began_s = monotonic_s()
    best_s: dict[Chunks, float] = {}
    for chunks in sketch_points(room_of(runner, max_batch_tokens, max_running)):
        for _ in range(REPEATS):
            if best_s and monotonic_s() - began_s > TIME_MAX_S:
                break
            measured_s = measurer.duration_s(chunks)
            assert measured_s is not None, "nothing interrupts it"
            best_s[chunks] = min(measured_s, best_s.get(chunks, measured_s))
    return fit([Sample(chunks, seconds) for chunks, seconds in best_s.items()])


def sketch_points(room: Room) -> list[Chunks]:
    """Batches of both phases that `room` holds; every room holds one token."""
    points: list[Chunks] = [
        ((0, 1),),
        ((0, 16),),
        ((16, 1),) * 8,
        ((128, 1),) * 8,
        ((128, 64),),
        ((0, min(256, room.max_batch_tokens)),),
    ]
    return [chunks for chunks in points if room.holds(chunks)]
