"""Writes the event log of an engine, which replays and audits read.

The log holds the events and commands of the member's state machine, and facts: observations of the
engine (its start, stage switches, memory in use) that audits compare with the events. A member has
settled when all requests and KV of the last group change have reached their new members.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from services.common.event_log import EventLog
from services.core.audit.facts import (
    EngineStarted,
    EngineSwitched,
    HostCopied,
    HostHeld,
    MemoryHeld,
)
from services.core.audit.record import FACT
from services.core.changeover.configuration import Configuration
from services.core.changeover.vocabulary import log_name
from services.core.groups.slab_names import layer_name
from services.core.planner.state import PlannerState
from services.worker.engine.memory.stage_memory import StageMemory
from services.worker.engine.transfer.lane import Identity


@dataclass(slots=True)
class FactLog:
    """Writes to `log`; without a log (None) the methods have no effect."""

    log: EventLog | None
    state: PlannerState
    memory: StageMemory
    now_s: Callable[[], float]
    _noted: tuple[object, ...] = ()  # the use of memory that the last `MemoryHeld` reported

    def start(self, identity: Identity, budget_bytes: int, exact: bool) -> None:
        """Log the start; `exact`: tokens do not depend on the other sequences in a batch."""
        if self.log is None:
            return
        self._note(
            EngineStarted(
                self.now_s(),
                identity.worker_id,
                identity.incarnation,
                self.memory.parameters_digest.hex(),
                self.memory.num_layers,
                budget_bytes,
                exact,
            )
        )
        self.note_memory(0, settled=True)

    def switch(self, configuration: Configuration) -> None:
        """Log the switch to a configuration."""
        group_id, epoch = configuration.own.group_id, configuration.epoch
        self._note(EngineSwitched(self.now_s(), group_id, epoch, configuration.stages))
        self.note_memory(epoch, settled=False)

    def record(self, kind: str, value: Any) -> None:
        """Log an event, a command or a plan of the member's state machine."""
        if self.log is not None:
            self.log.append(kind, [value], log_name)

    def note_memory(self, epoch: int, settled: bool) -> None:
        """Log the use of memory if its kinds of users have changed; call it in each iteration."""
        if self.log is None:
            return
        memory, pool = self.memory, self.state.pool
        sequences, owners = len(self.state.sequences), len(self.state.table)
        resident = tuple(
            layer for layer in range(memory.num_layers) if memory.slabs[layer_name(layer)].resident
        )
        seen = (epoch, settled, bool(sequences), bool(owners), resident)
        if seen == self._noted:
            return  # block counts change in each iteration: only the kinds of users matter
        self._noted = seen
        chunks = sum(kv_range.mapped_chunks for kv_range in memory.kv_ranges)
        self._note(
            MemoryHeld(
                self.now_s(),
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

        self._note_host(sequences)

    def _note_host(self, sequences: int) -> None:
        if self.state.host is not None:
            cache = self.state.host.cache
            counts = cache.slots, cache.held, cache.filling, cache.empty, cache.owed
            self._note(HostHeld(self.now_s(), *counts, sequences))

    def note_copied(self, facts: Iterable[HostCopied]) -> None:
        """Log the checksums of blocks that were copied to or from host memory."""
        for fact in facts:
            self._note(fact)

    def _note(self, fact: Any) -> None:
        if self.log is not None:
            self.log.append(FACT, [fact])
