"""The overload policy `static-pipeline`: which single workers merge into pipelines of two.

The baseline of KunServe's evaluation: half of the parameters is dropped from the start, whatever
the demand. Each worker is merged once. After a loss, a split by hand or a failed merge of others,
it is not merged again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from services.core.overload.events import GroupUse, ReportStatus

MEMBERS = 2
"""Workers of a pipeline."""
RETRY_S = 60.0
"""Time after which a merge that did not happen is decided again."""


@dataclass(slots=True)
class StaticPipelines:
    """Decides the merges of a model's workers."""

    _merged: frozenset[str] = frozenset()  # workers that are or were members of a pipeline
    _single: frozenset[str] = frozenset()  # groups of one worker that was never merged
    _asked: frozenset[str] = frozenset()  # groups of the last decision
    _retry_s: float = 0.0  # no equal decision before

    def note(self, groups: Sequence[GroupUse]) -> None:
        """Record all groups of the model."""
        workers = {name for group in groups for name in group.worker_ids}
        merged = {n for g in groups if len(g.worker_ids) > 1 for n in g.worker_ids}
        self._merged = self._merged & workers | merged
        # Decide only while all groups report: a change in progress alters the groups.
        current = all(group.report_status is ReportStatus.CURRENT for group in groups)
        self._single = frozenset(
            group.group_id
            for group in groups
            if current and not group.draining and self._merged.isdisjoint(group.worker_ids)
        )

    def due(self, now_s: float) -> tuple[str, ...]:
        """The groups to merge in pairs now; call it once the groups have settled."""
        single = self._single
        if len(single) < MEMBERS or (single == self._asked and now_s < self._retry_s):
            return ()
        self._asked, self._retry_s = single, now_s + RETRY_S
        return tuple(sorted(single))
