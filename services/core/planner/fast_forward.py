"""Shortcuts for the simulator: plan and finish iterations without token ids and most commands.

The functions access private parts of `PlannerState` and leave it in the same state as the calls of
`plan` and `handle` that they replace.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Row

from services.core.planner.batch import IterationShape
from services.core.planner.events import EmitToken
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.state import PlannerState
from services.core.queue_order import Scheduling

_ALL_DECODE = (Scheduling.FCFS, Scheduling.PRIORITY, Scheduling.PREFILL_FIRST)
"""Policies under which every iteration without prefills runs all decodes; so does `slo` without
batch requests and TPOT targets."""


def plan_shape(state: PlannerState, now_s: float) -> IterationShape | None:
    """Like `PlannerState.plan` of a single worker, but returns only sizes; see `finish_filled`."""
    assert state.stages == 1, "a pipeline is planned with plan()"
    plan = state._decide(now_s)
    if not plan:
        return None
    shape = plan.shape(state.config.execution)
    state._flight.launch(plan)
    state.sequence_table.take_released()
    state.sequence_table.tails.take_turns()
    return shape


def finish_filled(
    state: PlannerState, token_id: int, now_s: float, number: int | None = None
) -> list[EmitToken]:
    """Finish an iteration as if every sample were `token_id`, which is not a stop token.

    `now_s` and `number` are those of `IterationFinished`. Returns only the first and the last token
    of each request.
    """
    plan = state._take_result(number, now_s)
    if plan is None:
        return []
    commands: list[EmitToken] = []
    for sequence in plan.decodes:
        if sequence.phase is Phase.ENDED:
            continue
        # Neither the first nor the last output token: append it without a command.
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
    """Number of coming iterations that run exactly the current decodes if no request arrives.

    No sequence starts, ends, is preempted or gets its first token in these. 0 while an iteration is
    in flight, and where the policy chooses among the decodes in each iteration.
    """
    table, config = state.sequence_table, state.config
    if state.in_flight or state.stages > 1 or not _runs_all_decodes(state):
        return 0
    if table.next_to_admit(config.max_running, config.overtaken_max) is not None:
        return 0
    return certain_decodes(state.running, state.pool.free_count, config.block_size)


def _runs_all_decodes(state: PlannerState) -> bool:
    """Whether the policy runs every decode in each of the coming iterations."""
    config = state.config
    if config.scheduling is not Scheduling.SLO:
        return config.scheduling in _ALL_DECODE
    return not (
        config.adaptive_slots
        or state.sequence_table.batch
        or any(sequence.request.service.tpot_s is not None for sequence in state.running)
    )


def advance_decodes(state: PlannerState, count: int, token_id: int, now_s: float) -> None:
    """Apply `count` ≤ `decodes_ahead` iterations at once, of which the last ends at `now_s`.

    Each sample is `token_id`. Emits no commands, and does not check stop tokens. The corrections of
    the cost model (`Feedback`) learn nothing from these iterations.
    """
    for sequence in block_growth(state.running, count, state.config.block_size):
        state.sequence_table.add_block(sequence)
    filling = [token_id] * count
    for sequence in state.running:
        sequence.computed += count
        sequence.token_ids += filling
        sequence.token_s = now_s
    state.sequence_table.prefixes.publish(state.running)


def certain_decodes(running: Row[Sequence], free_blocks: int, block_size: int) -> int:
    """Number of iterations in which all of `running` decode, none ends and blocks suffice.

    0 if any sequence has a prefill to run or no output yet.
    """
    least = None  # iterations before the first sequence ends
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
    # The demand for blocks grows with the iterations: bisect for the last that fits.
    enough, too_many = 0, least
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        if _blocks_taken(slots, middle, block_size) <= free_blocks:
            enough = middle
        else:
            too_many = middle
    return enough


def block_growth(running: Iterable[Sequence], count: int, block_size: int) -> list[Sequence]:
    """Sequences that take a block in `count` decode iterations of all of `running`.

    Ordered by iteration, then by the order of `running`.
    """
    growth: list[tuple[int, int, Sequence]] = []
    for place, sequence in enumerate(running):
        first = sequence.blocks * block_size - len(sequence.token_ids) + 1
        growth += [(step, place, sequence) for step in range(first, count, block_size)]
    growth.sort(key=lambda entry: entry[:2])
    return [sequence for _, _, sequence in growth]


def _blocks_taken(slots: Iterable[int], count: int, block_size: int) -> int:
    """Blocks allocated in `count` iterations; `slots`: iterations before each sequence grows."""
    return sum([-(-(count - left) // block_size) for left in slots if left < count])
