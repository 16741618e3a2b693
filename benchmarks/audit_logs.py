"""Replay and audit the event logs that the processes of a cluster wrote to one folder."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.event_log import EventLogError, read_config, read_entries
from services.core.audit.audit import Audit
from services.core.audit.escalation_order import EscalationOrder
from services.core.audit.record import Findings
from services.core.audit.refusals import Refusals
from services.core.audit.settled_changes import SettledChange, settled_changes
from services.core.changeover.state import Changeover, MemberConfig
from services.core.groups.coordinator import CoordinatorConfig, CoordinatorState
from services.core.scheduler.state_config import StateConfig
from tideserve.cli.errors import SystemUnavailable
from tideserve.sim.replay import (
    GATEWAY_TYPES,
    MEMMGR_TYPES,
    SCHEDULER_TYPES,
    WORKER_TYPES,
    Replayed,
    replay,
)

INVARIANTS = tuple(f"I{number}" for number in range(1, 12))
OPTIONAL = ("I15", "I16", "I17")
"""Invariants that only restarted requests and refusals for lateness check."""


@dataclass(frozen=True, slots=True)
class Audited:
    """Outcome of an audit: the replay of each log, the invariants, the changes of groups."""

    replayed: dict[str, Replayed]
    findings: Findings
    changes: Sequence[SettledChange] = ()

    @property
    def differing(self) -> list[str]:
        """A sentence per log whose replay diverges."""
        return [
            f"{name} diverges when replayed: {replay.difference}"
            for name, replay in self.replayed.items()
            if replay.difference
        ]

    @property
    def unchecked(self) -> list[str]:
        """A sentence per invariant that no log entry checks."""
        unchecked = [invariant for invariant in INVARIANTS if not self.findings.checks[invariant]]
        return [f"no log entry checks {invariant}" for invariant in unchecked]

    @property
    def problems(self) -> list[str]:
        """A sentence per problem; violations are capped."""
        return [*self.differing, *self.findings.violations, *self.unchecked]

    @property
    def violations(self) -> int:
        """Number of broken invariants, diverging replays and unchecked invariants."""
        return self.findings.broken + len(self.differing) + len(self.unchecked)

    @property
    def checks(self) -> dict[str, int]:
        """Number of checks per invariant."""
        checked = [name for name in OPTIONAL if self.findings.checks[name]]
        return {name: self.findings.checks[name] for name in (*INVARIANTS, *checked)}

    @property
    def figures(self) -> dict[str, Any]:
        """The figures as JSON."""
        return {"invariants_checked": self.checks, "violations": self.findings.broken}

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The figures as table rows."""
        checked = ", ".join(f"{name} {count:,}×" for name, count in self.checks.items())
        return [("invariants checked", checked), ("violations", str(self.findings.broken))]


def audit_logs(
    folder: Path, killed: Collection[int] = (), stopped_until_s: Mapping[str, float] | None = None
) -> Audited:
    """Audit the logs of an idle cluster. Call it before the cluster stops, which dissolves its
    groups.

    `killed`: process ids of gateways; `stopped_until_s` as in `Audit`.

    Raises:
        SystemUnavailable: if a log is missing or unreadable.
    """
    engines = _logs(folder, "worker-*")
    memory_managers = _logs(folder, "memmgr-*")
    gateways: dict[bool, list[Path]] = {False: [], True: []}
    for path in _logs(folder, "gateway-*"):
        # Requests in the log of a killed gateway need not have ended.
        gateways[int(path.stem.rpartition("-")[2]) in killed].append(path)
    audit = Audit(stopped_until_s=stopped_until_s or {})
    try:
        replayed = {path.name: _replay_engine(path, audit.findings) for path in engines}
        replayed |= {path.name: _replay_groups(path) for path in memory_managers}
        schedulers = _logs(folder, "scheduler-*")
        replayed |= {path.name: _replay_dispatch(path, audit.findings) for path in schedulers}
        findings = audit.run(
            [read_entries(path, WORKER_TYPES) for path in engines],
            [read_entries(path, MEMMGR_TYPES) for path in memory_managers],
            [read_entries(path, GATEWAY_TYPES) for path in gateways[False]],
            [read_entries(path, GATEWAY_TYPES) for path in gateways[True]],
        )
    except EventLogError as error:
        raise SystemUnavailable(str(error)) from error
    return Audited(replayed, findings, settled_changes(audit))


def _logs(folder: Path, pattern: str) -> Sequence[Path]:
    logs = sorted(folder.glob(f"{pattern}.jsonl"))
    if not logs:
        raise SystemUnavailable(f"no event log {pattern} in {folder}")
    return logs


def _replay_engine(path: Path, findings: Findings) -> Replayed:
    config = read_config(path, MemberConfig)
    escalations = EscalationOrder(findings, config.worker_id)
    return replay(Changeover.of(config), read_entries(path, WORKER_TYPES), escalations)


def _replay_dispatch(path: Path, findings: Findings) -> Replayed:
    state = read_config(path, StateConfig).state()
    refusals = Refusals(findings, path.stem)
    return replay(state, read_entries(path, SCHEDULER_TYPES), refusals=refusals)


def _replay_groups(path: Path) -> Replayed:
    state = CoordinatorState(read_config(path, CoordinatorConfig))
    return replay(state, read_entries(path, MEMMGR_TYPES))
