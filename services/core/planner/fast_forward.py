"""Fast-forward for a simulator: what `PlannerState` decides, without tokens and without commands.

The functions use private parts of `PlannerState`. They leave it as the events that they replace.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Row

from services.core.line_order import Scheduling
from services.core.planner.batch import IterationShape
from services.core.planner.events import EmitToken
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.state import PlannerState

_ALL_DECODE = (Scheduling.FCFS, Scheduling.PRIORITY, Scheduling.PREFILL_FIRST)
"""With these every sequence that can decode does so in each iteration without a prompt."""


def plan_shape(state: PlannerState, now_s: float) -> IterationShape | None:
    """As `plan` of a group of one, but only the sizes; end it with `finish_filled`."""
    assert state.stages == 1, "a pipeline is planned with plan()"
    plan = state._decide(now_s)
    if not plan:
        return None
    shape = plan.shape()
    state._flight.launch(plan)
    state.sequence_table.take_released()
    return shape


def finish_filled(
    state: PlannerState, token_id: int, now_s: float, number: int | None = None
) -> list[EmitToken]:
    """End an iteration as if `token_id`, which stops no request, had been sampled each time.

    `now_s` and `number` as in `IterationFinished`. Returns only the first and the last token of
    each request.
    """
    plan = state._next_result(number, now_s)
    if plan is None:
        return []
    commands: list[EmitToken] = []
    for sequence in plan.decodes:
        if sequence.phase is Phase.ENDED:
            continue
        if sequence.prompt_tokens < len(sequence.token_ids) < sequence.tokens_max - 1:
            sequence.token_ids.append(token_id)
            sequence.sample_due = False
        else:
            commands.append(state._append(sequence, token_id))
    for sequence, _, _, samples in plan.prefills:
        if not samples or sequence.phase is Phase.ENDED:
            continue
        token = state._append(sequence, token_id)
        if token.index == 0 or token.finish_reason is not None:
            commands.append(token)
    return commands


def decodes_ahead(state: PlannerState) -> int:
    """How many iterations are certain to be the same decodes if nothing arrives.

    In them no sequence starts, ends, is preempted or has its first token. 0 in an iteration, and
    where it is decided anew for each which decodes run.
    """
    table, config = state.sequence_table, state.config
    if state.in_flight or state.stages > 1 or config.scheduling not in _ALL_DECODE:
        return 0
    if table.next_to_admit(config.max_running, config.overtaken_max) is not None:
        return 0
    return certain_decodes(state.running, state.pool.free_count, config.block_size)


def advance_decodes(state: PlannerState, count: int, token_id: int) -> None:
    """Run `count` ≤ `decodes_ahead` iterations at once; each sample is `token_id`.

    The commands, one token of each running request in each iteration, are left out. Stop tokens are
    not looked for.
    """
    for sequence in block_growth(state.running, count, state.config.block_size):
        state.sequence_table.add_block(sequence)
    filling = [token_id] * count
    for sequence in state.running:
        sequence.computed += count
        sequence.token_ids += filling


def certain_decodes(running: Row[Sequence], free_blocks: int, block_size: int) -> int:
    """Iterations in which each of `running` decodes, none starts or ends and blocks suffice.

    0 if one of them has more than its last token to run or has no output yet.
    """
    least = None
    for sequence in running:
        tokens = len(sequence.token_ids)
        if tokens - sequence.computed != 1 or tokens == sequence.prompt_tokens:
            return 0
        left = sequence.tokens_max - tokens - 1
        if least is None or left < least:
            least = left
    if not least:
        return 0
    slots = [s.blocks * block_size - len(s.token_ids) + 1 for s in running]
    if _blocks_taken(slots, least, block_size) <= free_blocks:
        return least
    enough, too_many = 0, least
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        if _blocks_taken(slots, middle, block_size) <= free_blocks:
            enough = middle
        else:
            too_many = middle
    return enough


def block_growth(running: Iterable[Sequence], count: int, block_size: int) -> list[Sequence]:
    """Sequences that take a block in `count` decode iterations of all of `running`, in order.

    Iteration by iteration, and within one in the order of `running`.
    """
    growth: list[tuple[int, int, Sequence]] = []
    for place, sequence in enumerate(running):
        first = sequence.blocks * block_size - len(sequence.token_ids) + 1
        growth += [(step, place, sequence) for step in range(first, count, block_size)]
    growth.sort(key=lambda entry: entry[:2])
    return [sequence for _, _, sequence in growth]


def _blocks_taken(slots: Iterable[int], count: int, block_size: int) -> int:
    """Blocks that `count` iterations take; `slots` are the iterations before each needs one."""
    return sum([-(-(count - left) // block_size) for left in slots if left < count])
