"""Notes in the event log what an engine holds and which configuration it runs, for audits."""

from collections.abc import Callable
from typing import Any

from services.common.event_log import EventLog
from services.core.audit.facts import (
    AttemptAnswered,
    AttemptUndone,
    EngineStarted,
    EngineSwitched,
    MemoryHeld,
)
from services.core.audit.record import FACT
from services.core.planner.state import IterationState
from services.worker.engine.memory.slab_names import layer_name
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.pipeline.configuration import Configuration
from services.worker.engine.transfer.lane import Identity
from services.worker.ipc import Prepared


class FactLog:
    """Without a log nothing is noted, and nothing looked at."""

    def __init__(
        self,
        log: EventLog | None,
        state: IterationState,
        memory: StageMemory,
        now_s: Callable[[], float],
    ) -> None:
        self._log = log
        self._state = state
        self._memory = memory
        self._now_s = now_s
        self._noted: tuple[object, ...] = ()

    def start(self, identity: Identity, budget_bytes: int) -> None:
        """The model is loaded."""
        if self._log is None:
            return
        self._note(
            EngineStarted(
                self._now_s(),
                identity.worker_id,
                identity.incarnation,
                self._memory.parameters_digest.hex(),
                self._memory.num_layers,
                budget_bytes,
            )
        )
        self.look(0, settled=True)

    def switch(self, configuration: Configuration) -> None:
        """Another configuration is run from now on."""
        group_id, epoch = configuration.group_id, configuration.epoch
        self._note(EngineSwitched(self._now_s(), group_id, epoch, configuration.stages))
        self.look(epoch, settled=False)

    def answer(self, answer: Prepared) -> None:
        """A preparation has ended; what it has fetched is here."""
        self._note(AttemptAnswered(self._now_s(), answer.attempt, answer.error))

    def undo(self, attempt: str) -> None:
        """A preparation was aborted."""
        self._note(AttemptUndone(self._now_s(), attempt))

    def look(self, epoch: int, settled: bool) -> None:
        """Note the use of memory if somebody began or ceased to use it; call it in each turn."""
        if self._log is None:
            return
        memory, pool = self._memory, self._state.pool
        sequences, owners = len(self._state.sequences), len(self._state.table)
        resident = tuple(
            layer for layer in range(memory.num_layers) if memory.slabs[layer_name(layer)].resident
        )
        seen = (epoch, settled, bool(sequences), bool(owners), resident)
        if seen == self._noted:
            return
        self._noted = seen
        chunks = sum(kv_range.mapped_chunks for kv_range in memory.kv_ranges)
        self._note(
            MemoryHeld(
                self._now_s(),
                epoch,
                memory.layers.start,
                memory.layers.stop,
                resident,
                memory.parameter_bytes,
                chunks * memory.arena.chunk_bytes,
                memory.plan.staging_bytes,
                pool.num_blocks,
                pool.taken_count,
                owners,
                sequences,
                settled,
            )
        )

    def _note(self, fact: Any) -> None:
        if self._log is not None:
            self._log.append(FACT, [fact])
