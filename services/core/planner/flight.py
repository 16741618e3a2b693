"""The microbatches in flight, which stages run in the order of their launch."""

from collections import deque
from dataclasses import dataclass, field

from services.core.planner.plan import Plan
from services.core.planner.sequence_table import SequenceTable


@dataclass(slots=True)
class Flight:
    """`plans` are in flight, oldest first; `number` is that of the newest microbatch so far.

    A microbatch carries names of released requests. Until its result is here, some stages may not
    have heard of them.
    """

    plans: deque[Plan] = field(default_factory=deque)
    number: int = 0
    _unacknowledged: dict[int, tuple[str, ...]] = field(default_factory=dict)

    def launch(self, plan: Plan) -> None:
        """The decided microbatch runs from now on; one that goes on has counted its tokens."""
        if plan.resumes is None:
            plan.launch()
        self.number = plan.number
        self.plans.append(plan)

    def note_released(self, plan: Plan, released: tuple[str, ...]) -> None:
        """The launched microbatch tells the stages of these."""
        self._unacknowledged[plan.number] = released

    def next_result(self, number: int | None) -> Plan | None:
        """The oldest plan in flight, whose result is here; None if that plan was discarded."""
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
        """Set the iteration of a group of one aside, which was interrupted at `now_s`."""
        (plan,) = self.plans
        assert plan.made is not None, "this iteration cannot be suspended"
        plan.ran_s += now_s - plan.planned_s
        plan.suspended_s = now_s
        self.plans.clear()
        table.release_again(self._unacknowledged.pop(plan.number, ()))
        table.suspend(plan)

    def discard(self, table: SequenceTable) -> None:
        """Discard all of them: their positions run again."""
        while self.plans:
            plan = self.plans.pop()
            plan.discard()
            table.release_again(self._unacknowledged.pop(plan.number, ()))

    def check_invariants(self, stages: int) -> None:
        """There are at most as many as stages, and no sequence runs twice where it must not."""
        assert len(self.plans) <= stages
        numbers = [plan.number for plan in self.plans]
        assert numbers == list(range(self.number - len(numbers) + 1, self.number + 1))
        assert set(self._unacknowledged) <= set(numbers)
        for plan in self.plans:
            names = [seq.request_id for seq in plan.decodes]
            names += [prefill.sequence.request_id for prefill in plan.prefills]
            assert len(names) == len(set(names)), "a request runs twice in a microbatch"
        decoding = [seq for plan in self.plans for seq in plan.decodes]
        assert len(decoding) == len({id(seq) for seq in decoding}), "it decodes twice in flight"
