"""KV demand as the client knows it: running and queued requests against the capacity. Pure.

A request that was sent and has no token yet waits: it needs its prompt and one block more. One
with tokens needs its prompt and those tokens, whether it runs or was preempted.
"""

from collections.abc import Sequence

from tideserve.load.record import RequestOutcome, SentRequest

BLOCK_TOKENS = 16
Timeline = list[tuple[float, int]]


def timeline(records: Sequence[SentRequest], block_tokens: int = BLOCK_TOKENS) -> Timeline:
    """(time in seconds, tokens wanted from then on), one entry for every change."""
    changes: list[tuple[float, int]] = []
    for record in records:
        changes += _changes(record, block_tokens)
    changes.sort()
    demand, points = 0, Timeline()
    for time_s, change in changes:
        demand += change
        if points and points[-1][0] == time_s:
            points[-1] = (time_s, demand)
        else:
            points.append((time_s, demand))
    return points


def peak_ratio(records: Sequence[SentRequest], capacity_tokens: int) -> float:
    """The largest demand as a multiple of the capacity."""
    peak = max((demand for _, demand in timeline(records)), default=0)
    return peak / capacity_tokens


def _changes(record: SentRequest, block_tokens: int) -> Timeline:
    if record.outcome is RequestOutcome.REJECTED:
        return []
    held = _blocks(record.prompt_tokens, block_tokens) + block_tokens
    changes = [(record.sent_s, held)]
    for index, time_s in enumerate(record.token_times_s, start=1):
        wanted = _blocks(record.prompt_tokens + index, block_tokens)
        if wanted != held:
            changes.append((time_s, wanted - held))
            held = wanted
    changes.append((record.end_s, -held))
    return changes


def _blocks(tokens: int, block_tokens: int) -> int:
    """Tokens that the blocks of `tokens` tokens could hold."""
    return -(-tokens // block_tokens) * block_tokens
