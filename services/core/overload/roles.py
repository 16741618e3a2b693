"""Assigns roles to workers: prefill workers compute prompts, decode workers the answers.

Roles are advice for dispatch (`scheduler/role_dispatch.py`), so a wrong or a late role costs time
only, and a change of a role needs no epoch. Only single workers have roles, of those the ones with
the same KV layout, which most of a model's workers have; all others are mixed.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.core.overload.events import GroupUse, ReportStatus
from services.core.role import Role

_FIXED = re.compile(r"prefill=([1-9]\d{0,5}),decode=([1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class RoleSetting:
    """The setting `roles`: numbers of workers of each model, or `auto`; else all are mixed."""

    auto: bool = False
    prefill: int = 0
    decode: int = 0

    @property
    def off(self) -> bool:
        """Whether every worker is mixed."""
        return not (self.auto or self.prefill)

    @staticmethod
    def parse(text: str) -> "RoleSetting":
        """The setting of `mixed`, `auto` or `prefill=N,decode=M`. Raises ValueError."""
        if text in ("mixed", "auto"):
            return RoleSetting(auto=text == "auto")
        fixed = _FIXED.fullmatch(text)
        if fixed is None:
            raise ValueError(f"'{text}' is not mixed, auto or prefill=N,decode=M, each at least 1")
        return RoleSetting(prefill=int(fixed[1]), decode=int(fixed[2]))


def able(uses: Iterable[GroupUse]) -> dict[str, list[str]]:
    """By model: ids of the workers that can hand requests over to each other, at least two."""
    layouts: defaultdict[str, defaultdict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for use in uses:
        if use.kv_layout and use.report_status is ReportStatus.CURRENT and not use.draining:
            layouts[use.model][use.kv_layout].append(use.members[0].worker_id)
    largest = {
        model: max(of_model.values(), key=lambda ids: (len(ids), sorted(ids)))
        for model, of_model in layouts.items()
    }
    return {model: sorted(ids) for model, ids in largest.items() if len(ids) > 1}


def chosen(
    ids: Sequence[str],
    prefill: int,
    decode: int,
    wishes: Mapping[str, Role],
    present: Mapping[str, Role],
) -> dict[str, Role]:
    """The roles of workers: up to so many of each, in proportion if there are too few workers.

    Workers get the role that they wish, then the role that they have.
    """
    if len(ids) < prefill + decode:
        prefill = min(max(1, round(len(ids) * prefill / (prefill + decode))), len(ids) - 1)
        decode = len(ids) - prefill
    roles: dict[str, Role] = {}
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL

        def rank(worker_id: str, role: Role = role, other: Role = other) -> tuple[object, ...]:
            wish, has = wishes.get(worker_id), present.get(worker_id)
            return (wish is not role, wish is other, has is not role, has is other, worker_id)

        free = sorted((worker_id for worker_id in ids if worker_id not in roles), key=rank)
        roles |= dict.fromkeys(free[:count], role)
    return roles
