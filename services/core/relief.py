"""The order in which memory is found for online requests: nothing dearer before what is cheaper.

One process cannot see what another one could still do, so the order holds within each. A worker
has the first three steps and `RECOMPUTE`, a memory manager `DROP`, a scheduler `HOLD_BACK` and
`REFUSE`. Memory managers count online demand alone, so batch work gives way before parameters
do. `core.audit` checks it as I11.
"""

from enum import IntEnum, auto


class ReliefStep(IntEnum):
    """A smaller one is cheaper, and comes first.

    Where `scheduling` is `fcfs`, no class is known: then there is no `HOLD_BACK` and no `YIELD`.
    """

    CACHED = auto()
    """Take empty blocks, then cached ones that nobody uses (`BlockPool.allocate`)."""
    HOLD_BACK = auto()
    """Start no batch request while an online one waits (`next_to_admit` of a worker, `harvest`)."""
    YIELD = auto()
    """Take the KV of batch sequences (`victims.batch_first`). Its full blocks stay cached, and are
    taken from the tail, block by block: what is left in the end does not run again."""
    DROP = auto()
    """Merge groups, and drop parameters (`OverloadMonitor`)."""
    RECOMPUTE = auto()
    """Take the KV of an online sequence that runs (`victims.newest`)."""
    REFUSE = auto()
    """503, with a time to come back (`SchedulerState`)."""
