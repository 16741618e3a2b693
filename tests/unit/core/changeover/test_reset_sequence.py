"""A sequence returned from a lost leader is held until its KV is freed there."""

from services.core.planner.config import IterationConfig
from services.core.planner.configuration_events import (
    BlocksReleased,
    SequenceHeld,
    SequenceReset,
    SequenceResumed,
)
from services.core.planner.events import RequestArrived
from services.core.planner.state import PlannerState
from services.core.request import Limits, Request, Sampling


def test_a_leader_agrees_with_itself_while_blocks_of_a_reset_sequence_are_freed() -> None:
    planner = PlannerState(
        IterationConfig(4, 16, max_batch_tokens=32, max_running=4, max_waiting=4)
    )
    planner.handle(RequestArrived(0.0, Request("r", (5,) * 6, Sampling(), Limits(4), 0.0)))
    assert planner.plan(0.0) is not None
    planner.in_flight.clear()
    planner.handle(SequenceHeld("r"))
    planner.handle(SequenceReset("r"))
    planner.sequence_table.check_invariants()
    assert planner.table.block_ids("r") and not planner.sequences["r"].blocks
    planner.handle(BlocksReleased("r"))
    planner.handle(SequenceResumed("r"))
    planner.sequence_table.check_invariants()
    assert [sequence.seq_id for sequence in planner.waiting] == ["r"]
