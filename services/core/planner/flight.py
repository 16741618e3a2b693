"""The microbatches in flight (launched, without a result); stages run them in launch order."""

from collections import deque
from dataclasses import dataclass, field

from services.core.planner.plan import Plan
from services.core.planner.sequence_table import SequenceTable


@dataclass(slots=True)
class Flight:
    """Queue of microbatches in flight, and the released ids that they carry.

    The stages free the blocks of these sequences. Until the result of the microbatch arrives, some
    stages may not have received the ids.
    """

    plans: deque[Plan] = field(default_factory=deque)  # oldest first
    number: int = 0  # of the newest microbatch so far
    # Microbatch number → released ids that it carries.
    _unacknowledged: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def launch(self, plan: Plan) -> None:
        """Launch a planned microbatch."""
        if plan.resumes is None:  # a resumed plan has counted its tokens already
            plan.launch()
        self.number = plan.number
        self.plans.append(plan)

    def note_released(self, plan: Plan, released: tuple[str, ...]) -> None:
        """Note that the launched microbatch carries these released ids."""
        self._unacknowledged[plan.number] = released

    def take_result(self, number: int | None) -> Plan | None:
        """Remove and return the plan whose result arrived; None if it was discarded."""
        plans = self.plans
        if number is not None and (not plans or number < plans[0].number):
            assert number <= self.number, f"microbatch {number} was never planned"
            return None
        assert plans, "no iteration is running"
        plan = plans.popleft()
        assert number in (None, plan.number), f"result {number} before that of {plan.number}"
        self._unacknowledged.pop(plan.number, None)
        return plan

    def suspend(self, table: SequenceTable, now_s: float) -> None:
        """Suspend the iteration of a single worker that was interrupted at `now_s`."""
        (plan,) = self.plans
        assert plan.kept_batch is not None, "this iteration cannot be suspended"
        plan.ran_s += now_s - plan.planned_s
        plan.suspended_s = now_s
        self.plans.clear()
        table.release_again(self._unacknowledged.pop(plan.number, ()))
        table.suspend(plan)

    def discard(self, table: SequenceTable) -> None:
        """Discard all microbatches in flight: their tokens run again."""
        # Newest first: each rewinds its sequences to their state before it.
        while self.plans:
            plan = self.plans.pop()
            plan.discard()
            table.release_again(self._unacknowledged.pop(plan.number, ()))

    def check_invariants(self, stages: int) -> None:
        """Microbatches do not exceed the stages and are consecutive; no sequence decodes twice."""
        assert len(self.plans) <= stages
        numbers = [plan.number for plan in self.plans]
        assert numbers == list(range(self.number - len(numbers) + 1, self.number + 1))
        assert set(self._unacknowledged) <= set(numbers)
        for plan in self.plans:
            ids = [seq.seq_id for seq in plan.decodes]
            ids += [prefill.sequence.seq_id for prefill in plan.prefills]
            assert len(ids) == len(set(ids)), "a sequence runs twice in a microbatch"
        decoding = [seq for plan in self.plans for seq in plan.decodes]
        assert len(decoding) == len({id(seq) for seq in decoding}), (
            "a sequence decodes in two microbatches in flight"
        )
