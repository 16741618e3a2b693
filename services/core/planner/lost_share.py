"""Which requests a leader gives back after a loss has divided its group.

The KV of all of them is lost with a part of the layers, and the leader has their tokens. It could
compute everything again by itself, while its former members, who have lost nothing but their
leader, have nothing to do. So it keeps its share, the oldest requests, and gives the others back.
Their gateways have their tokens, too, and go on with them wherever there is room.

Requests stay whose gateway would not go on with them (`resumable`), and batch work that makes way:
it is computed when no online request waits.
"""

from collections.abc import Iterable

from services.core.planner.sequence import Sequence


def beyond_share(
    sequences: Iterable[Sequence], members: int, *, batch_yields: bool
) -> list[Sequence]:
    """The youngest sequences without KV, beyond 1/`members` of all tokens to be computed again.

    `members` live, with the leader. The sequence that completes the share is kept, and so is at
    least one.
    """
    lost = [one for one in sequences if not one.blocks and (one.online or not batch_yields)]
    tokens = sum(len(one.token_ids) for one in lost)
    kept = sum(len(one.token_ids) for one in lost if not one.request.resumable)
    found = []
    for sequence in sorted(lost, key=lambda one: one.age):
        if not sequence.request.resumable:
            continue
        if kept * members >= tokens:
            found.append(sequence)
        else:
            kept += len(sequence.token_ids)
    return found
