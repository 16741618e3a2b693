"""Fast-forward: how many decode iterations need no decision, and which blocks they take."""

from collections.abc import Iterable
from collections.abc import Sequence as Row

from services.core.planner.sequence import Sequence


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
