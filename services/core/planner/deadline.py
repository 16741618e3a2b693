"""When the next token of a sequence is due, by what its request was promised.

The first token is due `ttft_s` after the request began. Later ones are due in groups (BROS):
the last of `token_group` tokens is due `token_group` times `tpot_s` after the group before it
ended.

Where nothing is promised, a prompt sorts as if its token were due `UNTARGETED_S` after the request
began, and a decode as if it were due so long after the token before it. So no stream of deadlines
leaves it out for ever, and an answer that is long takes nobody's turn.
"""

from math import inf

from services.core.line_order import UNTARGETED_S
from services.core.planner.sequence import Sequence


def begin(sequence: Sequence, began_s: float) -> None:
    """The request came to the gateway at `began_s`, by the clock of this worker.

    Of a sequence that has output already, the next token is promised nothing: when the one before
    it came is not known here. With a target between tokens it is late, most likely, and goes before
    those that begin.
    """
    service, sequence.due_s, sequence.group_left = sequence.request.service, inf, 1
    sequence.implied_due_s = sequence.arrival_s + UNTARGETED_S
    sequence.token_s = sequence.arrival_s
    if not sequence.output_count:
        sequence.implied_due_s = began_s + UNTARGETED_S
        if service.ttft_s is not None:
            sequence.due_s = began_s + service.ttft_s
    elif service.tpot_s is not None:
        sequence.implied_due_s = began_s


def note_token(sequence: Sequence, now_s: float) -> bool:
    """Its next token is here at `now_s`; returns whether it ended a group too late."""
    sequence.token_s = now_s
    if sequence.group_left > 1:
        sequence.group_left -= 1
        return False
    missed = now_s > sequence.due_s
    service = sequence.request.service
    sequence.group_left = service.token_group
    if service.tpot_s is None:
        sequence.due_s = inf
    else:
        sequence.due_s = now_s + service.token_group * service.tpot_s
    return missed


def slack_s(sequence: Sequence, now_s: float, iteration_s: float) -> float:
    """The residual time (BROS §4.2): how long the next iteration may take, negative if too late.

    The tokens of its group after the next one take `iteration_s` seconds each, or what the target
    allows if that is less: else long iterations would leave a group no time, bound nothing any
    more, and stay long.
    """
    if sequence.group_left == 1:
        return sequence.due_s - now_s
    tpot_s = sequence.request.service.tpot_s
    later_s = iteration_s if tpot_s is None else min(iteration_s, tpot_s)
    return sequence.due_s - now_s - (sequence.group_left - 1) * later_s


def slack_in_flight_s(sequence: Sequence, now_s: float, iteration_s: float) -> float:
    """The residual time of a sequence whose next token is in flight: that of the one after it."""
    service = sequence.request.service
    if sequence.group_left > 1:
        return slack_s(sequence, now_s, iteration_s)
    return inf if service.tpot_s is None else service.token_group * service.tpot_s


def order_s(sequence: Sequence) -> float:
    """When its group is due, for the order of prompts: these have groups of one token."""
    return sequence.due_s if sequence.due_s < inf else sequence.implied_due_s


def residual_s(sequence: Sequence, now_s: float, iteration_s: float) -> float:
    """As `slack_s`, for the order of decodes: also where nothing is promised."""
    if sequence.due_s < inf:
        return slack_s(sequence, now_s, iteration_s)
    return sequence.token_s + UNTARGETED_S - now_s
