"""Keeps prefill workers connected to decode workers, so that hand-overs need not wait for that."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from services.common.timeouts import timeout
from services.core.overload.role_peers import WorkerPeers, role_peers
from services.core.role import Role
from services.memmgr.driver import Driver

INTERVAL_S = 0.5
"""Interval at which new pairs are looked for."""
REPEAT_S = 15.0
"""Interval of introductions, which last for a minute; they also mend broken connections."""
CALL_S = 5.0
"""Time limit of the calls of a round."""

log = logging.getLogger(__name__)


class Introducer:
    """Introduces workers by their roles, while `run` runs and this memory manager leads."""

    def __init__(self, driver: Driver, roles: Callable[[], Mapping[str, Role]]) -> None:
        """`roles` returns the present roles by worker id; workers without one are mixed."""
        self._driver = driver
        self._roles = roles

    async def run(self) -> None:
        """Introduce workers with new peers at once, all of them now and then, until cancelled."""
        loop = asyncio.get_running_loop()
        known: list[WorkerPeers] = []
        due_s = loop.time()
        while True:
            driver = self._driver
            peers = role_peers(driver.stable_groups, driver.facts, self._roles())
            if driver.leads and peers and (peers != known or loop.time() >= due_s):
                if peers != known:
                    log.info("workers connect for hand-overs: %s", _names(peers))
                try:
                    async with timeout(CALL_S):
                        await driver.introduce(peers)
                except TimeoutError:
                    log.info("a worker does not answer introductions; the others are connected")
                known, due_s = peers, loop.time() + REPEAT_S
            elif not driver.leads:
                known = []
            await asyncio.sleep(INTERVAL_S)


def _names(peers: list[WorkerPeers]) -> str:
    return ", ".join(entry.member.worker_id for entry in peers)
