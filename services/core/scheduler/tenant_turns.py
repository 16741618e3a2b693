"""Tenants take turns: of those that wait, the one that has got the least KV so far is next.

A virtual token counter as in VTC §4, in the KV tokens that a request needs to start, since the
scheduler does not see outputs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace

from services.core.line_order import LineKey

Entry = tuple[LineKey, int, str]
"""The key of a request, a number by which equals keep their order, and its id."""


@dataclass(slots=True)
class _Tenant:
    """The requests of a tenant in one band, in order, and what it has got."""

    entries: list[Entry] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)  # of each request, to start
    served_tokens: int = 0


@dataclass(slots=True)
class _Band:
    """Tenants that wait, by name, and what those have got that `left` and got more than others."""

    waiting: dict[str, _Tenant] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)

    @property
    def least_tokens(self) -> int:
        """What the waiting tenant has got that has got least."""
        return min((one.served_tokens for one in self.waiting.values()), default=0)


@dataclass(slots=True)
class TenantTurns:
    """Bands, one after the other; within a band tenants take turns, by what they have got.

    A tenant that comes, or comes back, starts no lower than the lowest of those that wait: time
    without requests earns nothing. A band without requests forgets what its tenants have got.
    """

    _bands: dict[LineKey, _Band] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        """Ids of all requests in the order in which they would start if each fitted."""
        for key in sorted(self._bands):
            yield from _in_turns(self._bands[key])

    def add(self, band_key: LineKey, tenant: str, entry: Entry, tokens: int) -> None:
        """Add a request that needs `tokens` of KV to start."""
        band = self._bands.setdefault(band_key, _Band())
        found = band.waiting.get(tenant)
        if found is None:
            least = band.least_tokens
            served_tokens = max(least, band.left.pop(tenant, 0))
            band.left = {one: served for one, served in band.left.items() if served > least}
            found = band.waiting[tenant] = _Tenant(served_tokens=served_tokens)
        insort(found.entries, entry)
        found.tokens[entry[-1]] = tokens

    def charge(self, band_key: LineKey, tenant: str, tokens: int) -> None:
        """A tenant's request starts, which is still here."""
        self._bands[band_key].waiting[tenant].served_tokens += tokens

    def remove(self, band_key: LineKey, tenant: str, entry: Entry) -> None:
        """Take a request out."""
        band = self._bands[band_key]
        found = band.waiting[tenant]
        del found.entries[bisect_left(found.entries, entry)]
        del found.tokens[entry[-1]]
        if not found.entries:
            del band.waiting[tenant]
            band.left[tenant] = found.served_tokens
        if not band.waiting:
            del self._bands[band_key]

    def check_invariants(self) -> None:
        """Raise AssertionError if an entry is out of order, or a band or a tenant has none."""
        for band in self._bands.values():
            assert band.waiting and not band.waiting.keys() & band.left.keys()
            for tenant in band.waiting.values():
                assert tenant.entries and tenant.entries == sorted(tenant.entries)
                assert tenant.tokens.keys() == {entry[-1] for entry in tenant.entries}


def _in_turns(band: _Band) -> Iterator[str]:
    heap = [(one.served_tokens, one.entries[0], 0, name) for name, one in band.waiting.items()]
    heapify(heap)
    while heap:
        served_tokens, entry, place, name = heap[0]
        yield entry[-1]
        tenant = band.waiting[name]
        if place + 1 == len(tenant.entries):
            heappop(heap)
            continue
        next_tokens = served_tokens + tenant.tokens[entry[-1]]
        heapreplace(heap, (next_tokens, tenant.entries[place + 1], place + 1, name))
