"""When a worker gives its requests up because nobody can mend its group: etcd does not answer.

A group that has lost a member goes on after a change of its record. While etcd is away there is
none, and requests would stand still here though other groups could run them. What the lost member
held of their KV is computed again in any case, so little is lost by starting them elsewhere.
"""

import asyncio
from collections.abc import Callable

from services.common.clock import monotonic_s
from services.common.errors import StoreError
from services.common.etcd import RETRY_S, Store
from services.common.membership import GROUPS
from services.core.report import EngineReport

SILENCE_MAX_S = 3.0
"""So long the records may be silent while the group is in trouble; a call to etcd takes as long."""


class Stranding:
    """Watches the records while the engine reports trouble.

    `stranded`: from when they have been silent for too long until the trouble is over, or another
    epoch has begun. `on_stranded` is called as it begins.
    """

    def __init__(self, store: Store, on_stranded: Callable[[], None]) -> None:
        self._store = store
        self._on_stranded = on_stranded
        self._epoch = 0
        self._in_trouble = asyncio.Event()
        self.stranded = False

    def note(self, report: EngineReport) -> None:
        """The engine has reported."""
        if not report.trouble or report.epoch != self._epoch:
            self._in_trouble.clear()
            self.stranded = False
        self._epoch = report.epoch
        if report.trouble:
            self._in_trouble.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await self._in_trouble.wait()
            epoch, heard_s = self._epoch, monotonic_s()
            while self._in_trouble.is_set() and epoch == self._epoch:
                if not self.stranded and await self._answers():
                    heard_s = monotonic_s()
                lasts = self._in_trouble.is_set() and epoch == self._epoch
                if lasts and not self.stranded and monotonic_s() - heard_s >= SILENCE_MAX_S:
                    self.stranded = True
                    self._on_stranded()
                await asyncio.sleep(RETRY_S)

    async def _answers(self) -> bool:
        """Whether the group records can be read."""
        try:
            await self._store.snapshot(GROUPS)
        except StoreError:
            return False
        return True
