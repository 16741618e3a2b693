"""Chooses where a member restores each missing slab from (KunServe §4.4).

A slab comes from the member's own copy in host memory if there is one, else from a worker that
holds it, else from the model folder. A source that fails is followed by the next one, so no source
is needed for a change; the digest of the slab is verified whatever its source.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

FAILURES_MAX = 3  # failed slabs per holder and attempt, after which it is not asked again


@dataclass(frozen=True, slots=True)
class SlabSource:
    """The worker `holder`, or else the copy in host memory (`from_copy`) or the model folder."""

    holder: str = ""
    from_copy: bool = False


FOLDER = SlabSource()
COPY = SlabSource(from_copy=True)


@dataclass(slots=True)
class SlabSources:
    """The missing slabs of an attempt and their sources, in the order of preference.

    `holders` are the slabs that each worker holds. At most `at_once` slabs are in progress, of
    which at most one from the copy and one from the folder: the engine's thread reads both.
    """

    missing: list[str] = field(default_factory=list)  # not in progress, in order
    copied: frozenset[str] = frozenset()  # slabs with a copy in host memory
    holders: Mapping[str, frozenset[str]] = field(default_factory=dict)  # in order of preference
    at_once: int = 1
    _running: dict[str, SlabSource] = field(default_factory=dict)  # slabs in progress
    _failed: set[tuple[str, SlabSource]] = field(default_factory=set)
    _failures: Counter[str] = field(default_factory=Counter)  # failed slabs, by holder

    @property
    def all_restored(self) -> bool:
        """Whether no slab is missing any more."""
        return not (self.missing or self._running)

    def start(self) -> Iterable[tuple[str, SlabSource]]:
        """The slabs to restore now in addition to those in progress, with their sources."""
        for slab in tuple(self.missing):
            if len(self._running) >= self.at_once:
                return
            source = self._source_of(slab)
            if source is not None:
                self.missing.remove(slab)
                self._running[slab] = source
                yield slab, source

    def end(self, slab: str, intact: bool) -> bool:
        """Record the end of a slab; returns False if the slab is not in progress."""
        source = self._running.pop(slab, None)
        if source is None:
            return False
        if not intact:
            self.missing.insert(0, slab)
            self._failed.add((slab, source))
            self._failures[source.holder] += 1
        return True

    def _source_of(self, slab: str) -> SlabSource | None:
        """The best source of the slab; None if all that are left are busy."""
        used = Counter(self._running.values())
        if slab in self.copied and (slab, COPY) not in self._failed:
            return None if used[COPY] else COPY
        usable = [
            SlabSource(holder)
            for holder, slabs in self.holders.items()
            if slab in slabs
            and (slab, SlabSource(holder)) not in self._failed
            and self._failures[holder] < FAILURES_MAX
        ]
        if not usable:
            return None if used[FOLDER] else FOLDER
        return min(usable, key=used.__getitem__)
