"""Measures a profile (a fitted cost model) while the worker is idle, a batch at a time."""

import logging
from collections.abc import Callable
from pathlib import Path

from services.common.clock import monotonic_s
from services.common.device_profile import store_profile
from services.core.cost.model import CostModel
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig
from services.worker.engine.profile.host_link import measure_host_link
from services.worker.engine.profile.measurer import Measurer
from services.worker.engine.profile.session import ProfileSession, measured_profile

MIN_IDLE_S = 2.0
"""Minimum idle time before a batch is measured, so that gaps between requests do not count."""

log = logging.getLogger(__name__)


class IdleProfiler:
    """Measures a batch per call of `step`; adopts and stores the profile after the last batch."""

    def __init__(
        self,
        session: ProfileSession,
        measurer: Measurer,
        runner: ModelRunner,
        config: RunnerConfig,
        threads: int,
        path: Path,
        adopt: Callable[[CostModel], None],
    ) -> None:
        self._adopt = adopt
        self._session: ProfileSession | None = session
        self._measurer = measurer
        self._runner = runner
        self._config = config
        self._threads = threads
        self._path = path
        self._last_work_s = monotonic_s()
        log.info("no stored profile of this model and device: this worker profiles while idle")

    def note_work(self) -> None:
        """Restart the idle period, because the engine runs an iteration."""
        self._last_work_s = monotonic_s()

    def step(self, interrupted: Callable[[], bool]) -> bool:
        """Run the next batch if the engine has been idle for `MIN_IDLE_S`; returns whether it did.

        Call it only while no sequence exists, because it overwrites KV blocks. `interrupted` is
        called before each layer; if it returns True, the batch stops and is measured again later.
        """
        session = self._session
        if session is None or monotonic_s() - self._last_work_s < MIN_IDLE_S:
            return False
        duration_s = self._measurer.duration_s(session.next_batch(), interrupted)
        if duration_s is None:
            return True
        session.record(duration_s)
        if session.complete:
            self._session = None
            self._finish(session)
        return True

    def _finish(self, session: ProfileSession) -> None:
        outcome = session.outcome(self._measurer.cpu_share)
        # Other processes slowed the measurements down. A stored profile is never measured again, so
        # store none; the next start measures again, and the present cost model stays.
        if not outcome.quiet:
            log.warning(
                "profiled while idle, but other processes kept the machine busy: repeat-to-repeat"
                " noise %.0f %%; nothing is stored, the next start measures again",
                100 * outcome.accuracy.noise,
            )
            return
        self._adopt(outcome.model)
        # On a CPU this would stop the engine for half a second.
        on_gpu = self._runner.device.type == "cuda"
        link = measure_host_link(self._config.device) if on_gpu else None
        profile = measured_profile(self._runner, self._config, self._threads, outcome, link)
        try:
            store_profile(profile, self._path)
        except OSError as error:
            log.warning("the profile cannot be stored in %s: %s", self._path, error.strerror)
            return
        log.info(
            "profiled while idle: held-out error %.1f %%, repeat-to-repeat noise %.1f %%; stored"
            " in %s",
            100 * outcome.accuracy.error,
            100 * outcome.accuracy.noise,
            self._path,
        )
        if outcome.crowded:
            log.warning(
                "this worker had a processor for only %.0f %% of the measurements, so the profile"
                " is too slow; delete %s on an idle machine to measure again",
                100 * outcome.cpu_share,
                self._path,
            )
