"""Deadlines of the next token of a sequence, from the targets of its request.

The first token is due `ttft_s` after the request arrived. Later tokens are due in groups (BROS):
the last of `token_group` tokens is due `token_group` × `tpot_s` after the end of the previous
group. The *residual time* of a sequence is the time that the next iteration may take so that the
sequence meets its deadline.

Without a target, a sequence has an *implied* deadline, which only orders it among others: the first
token is due `UNTARGETED_S` after the request arrived, a later token `UNTARGETED_S` after the
previous one. So requests with targets cannot starve it.
"""

from math import inf

from services.core.planner.sequence import Sequence
from services.core.queue_order import UNTARGETED_S


def begin(sequence: Sequence, began_s: float) -> None:
    """Set the first deadline of a sequence that arrived or was adopted from another leader.

    `began_s` is the time of its arrival at the gateway, on the clock of this worker.
    """
    service, sequence.due_s, sequence.group_left = sequence.request.service, inf, 1
    sequence.implied_due_s = sequence.arrival_s + UNTARGETED_S
    sequence.token_s = sequence.arrival_s
    if not sequence.output_count:
        sequence.implied_due_s = began_s + UNTARGETED_S
        if service.ttft_s is not None:
            sequence.due_s = began_s + service.ttft_s
    elif service.tpot_s is not None:
        # A resumed sequence: the time of its previous token is unknown here, so its next token gets
        # no deadline. It is probably late, so sort it before requests that start now.
        sequence.implied_due_s = began_s


def note_token(sequence: Sequence, now_s: float) -> bool:
    """Advance the deadline after a token at `now_s`; returns whether its group missed it."""
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


def residual_s(sequence: Sequence, now_s: float, iteration_s: float) -> float:
    """Residual time (BROS §4.2): how long the next iteration may take; negative if late.

    It leaves `iteration_s` (the mean iteration time), but at most `tpot_s`, for each later token of
    the sequence's token group.
    """
    if sequence.group_left == 1:
        return sequence.due_s - now_s
    # Without the cap, long iterations would make residual times negative. Deadlines that cannot be
    # met do not bound iterations, so iterations would stay long.
    tpot_s = sequence.request.service.tpot_s
    later_s = iteration_s if tpot_s is None else min(iteration_s, tpot_s)
    return sequence.due_s - now_s - (sequence.group_left - 1) * later_s


def residual_in_flight_s(sequence: Sequence, now_s: float, iteration_s: float) -> float:
    """Residual time of the token after next, if the microbatch of the next token is in flight."""
    service = sequence.request.service
    if sequence.group_left > 1:
        return residual_s(sequence, now_s, iteration_s)
    return inf if service.tpot_s is None else service.token_group * service.tpot_s


def order_s(sequence: Sequence) -> float:
    """Deadline of the first token, explicit or implied, by which prefills are sorted."""
    return sequence.due_s if sequence.due_s < inf else sequence.implied_due_s


def residual_or_implied_s(sequence: Sequence, now_s: float, iteration_s: float) -> float:
    """As `residual_s`, but with the implied deadline of sequences without a target."""
    if sequence.due_s < inf:
        return residual_s(sequence, now_s, iteration_s)
    return sequence.token_s + UNTARGETED_S - now_s
