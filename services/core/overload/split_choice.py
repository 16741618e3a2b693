"""Chooses the splits of a model's merged groups that the KV in use allows, and explains the others.

A *partial split* divides a group into smaller groups, at least one of them merged; see
`partial_split.py`. Amounts are KV in tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.core.overload.events import GroupUse, PartialSplit


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """The possible splits of groups, and demand below which they happen.

    `singles`: groups whose KV fits single workers, with the number of their workers.
    `partial_splits`: whether groups may split partially.
    """

    singles: Mapping[str, int]
    partial: Mapping[str, PartialSplit]
    singles_tokens: int
    partial_tokens: int
    partial_splits: bool

    def decided(
        self, singles_due: bool, partial_due: bool
    ) -> tuple[tuple[str, ...], tuple[int, ...]]:
        """Groups to split, and the number of parts of each; no numbers if all become singles."""
        parts = {name: split.parts for name, split in self.partial.items() if partial_due}
        if singles_due:
            parts |= self.singles
        return tuple(parts), tuple(parts.values()) if parts != self.singles else ()

    def obstacle(self, group: GroupUse, expected_tokens: int) -> str:
        """Why a merged group is not split now, as a sentence; empty if nothing prevents it."""
        if group.group_id in self.singles and expected_tokens < self.singles_tokens:
            return ""
        if group.group_id in self.partial:
            if expected_tokens < self.partial_tokens:
                return ""
            return _high(expected_tokens, self.partial_tokens)
        off = bool(group.partial_splits) and not self.partial_splits
        reason = "partial_splits is false" if off else group.whole_reason
        text = f" (no partial split: {reason})" if reason else ""
        if group.group_id in self.singles:
            return _high(expected_tokens, self.singles_tokens) + text
        limits = [split.limit_tokens for split in group.partial_splits if self.partial_splits]
        limit = max([group.unmerged_tokens, *limits])
        return f"its KV in use, {group.used_tokens} tokens, must fall to {limit} tokens{text}"


def choose_splits(
    groups: Sequence[GroupUse], undropped_tokens: int, share: float, partial_splits: bool
) -> SplitChoice:
    """The possible splits of `groups`.

    Demand must be below `share` of the undropped capacity, or for a partial split, of the capacity
    after it. Groups with a leaving member do not split partially.
    """
    singles = {group.group_id: len(group.members) for group in groups if group.can_split}
    partial, after_tokens = dict[str, PartialSplit](), 0
    for group in groups:
        if group.draining:
            continue
        split = group.partial_split if partial_splits else None
        after_tokens += group.capacity_tokens if split is None else split.capacity_tokens
        if split is not None:
            partial[group.group_id] = split
    singles_tokens, partial_tokens = int(share * undropped_tokens), int(share * after_tokens)
    return SplitChoice(singles, partial, singles_tokens, partial_tokens, partial_splits)


def _high(expected_tokens: int, limit_tokens: int) -> str:
    return f"demand and forecast, {expected_tokens} tokens, must fall below {limit_tokens} tokens"
