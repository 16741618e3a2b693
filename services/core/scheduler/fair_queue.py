"""Orders waiting requests fairly among tenants (owners of API keys), within priority bands.

Each tenant has a virtual token counter (VTC §4): the KV tokens that its started requests needed to
start, because the scheduler does not see output tokens. The tenant with the lowest counter goes
next. A band holds the requests of equal priority, such as a service class.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import islice
from operator import itemgetter

from services.core.queue_order import QueueKey

Entry = tuple[QueueKey, int, str]
"""Sort key of a request, arrival number that orders equal keys, and request id."""


@dataclass(slots=True)
class _Tenant:
    """The waiting requests of a tenant in a band, and its virtual token counter."""

    entries: list[Entry] = field(default_factory=list)  # sorted
    tokens: list[int] = field(default_factory=list)  # KV tokens to start, of each entry
    waiting_tokens: int = 0  # their sum
    served_tokens: int = 0

    def tokens_before(self, key: QueueKey) -> int:
        """Tokens of the requests before a new request with this sort key."""
        if not self.entries or self.entries[-1][0] <= key:
            return self.waiting_tokens
        return sum(self.tokens[: bisect_right(self.entries, key, key=itemgetter(0))])

    def tokens_until(self, counter: int) -> int:
        """Tokens that it starts before its counter exceeds `counter`, on average."""
        if counter < self.served_tokens:
            return 0
        # The request that crosses the bound starts as a whole: add half a request.
        half = self.waiting_tokens // (2 * len(self.entries))
        return min(self.waiting_tokens, counter - self.served_tokens + half)


@dataclass(slots=True)
class _Band:
    """Tenants with waiting requests, and counters of other tenants above the minimum (`left`)."""

    waiting: dict[str, _Tenant] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    tokens: int = 0  # of all waiting requests

    @property
    def least_tokens(self) -> int:
        """The lowest counter of the waiting tenants."""
        return min((tenant.served_tokens for tenant in self.waiting.values()), default=0)


@dataclass(slots=True)
class FairQueue:
    """Requests in bands of descending priority; in a band, the lowest tenant counter goes first.

    A tenant without waiting requests rejoins with at least the lowest counter of the waiting
    tenants, so idle time earns no credit (VTC's counter lift). An empty band loses its counters.
    """

    _bands: dict[QueueKey, _Band] = field(default_factory=dict)

    def __iter__(self) -> Iterator[str]:
        """Ids of all requests in the order of their start, if each had room."""
        for key in sorted(self._bands):
            yield from _fair_order(self._bands[key])

    def add(self, band_key: QueueKey, tenant: str, entry: Entry, tokens: int) -> None:
        """Add a request of `tenant` that needs `tokens` of KV to start."""
        band = self._bands.setdefault(band_key, _Band())
        waiting = band.waiting.get(tenant)
        if waiting is None:
            # Counter lift: resume at the old counter, but not below the waiting tenants' minimum.
            least = band.least_tokens
            served_tokens = max(least, band.left.pop(tenant, 0))
            # Counters at or below the minimum would be lifted anyway: forget them.
            band.left = {name: served for name, served in band.left.items() if served > least}
            waiting = band.waiting[tenant] = _Tenant(served_tokens=served_tokens)
        position = bisect_left(waiting.entries, entry)
        waiting.entries.insert(position, entry)
        waiting.tokens.insert(position, tokens)
        waiting.waiting_tokens += tokens
        band.tokens += tokens

    def charge(self, band_key: QueueKey, tenant: str, tokens: int) -> None:
        """Add `tokens` to the counter of a tenant whose request starts; call before `remove`."""
        self._bands[band_key].waiting[tenant].served_tokens += tokens

    def remove(self, band_key: QueueKey, tenant: str, entry: Entry) -> None:
        """Remove the request of `entry`, which must be present."""
        band = self._bands[band_key]
        waiting = band.waiting[tenant]
        position = bisect_left(waiting.entries, entry)
        tokens = waiting.tokens.pop(position)
        del waiting.entries[position]
        waiting.waiting_tokens -= tokens
        band.tokens -= tokens
        if not waiting.entries:
            del band.waiting[tenant]
            band.left[tenant] = waiting.served_tokens
        if not band.waiting:
            del self._bands[band_key]

    def sort(self, key_of: Callable[[str], QueueKey]) -> None:
        """Order each tenant's requests by new sort keys, given the request id."""
        for band in self._bands.values():
            for tenant in band.waiting.values():
                entries = ((key_of(name), number, name) for _, number, name in tenant.entries)
                ordered = sorted(zip(entries, tenant.tokens, strict=True))
                tenant.entries = [entry for entry, _ in ordered]
                tenant.tokens = [tokens for _, tokens in ordered]

    def tokens_ahead(self, band_key: QueueKey, tenant: str, key: QueueKey) -> int:
        """Tokens that start before a new request of `tenant` with sort key `key`, on average.

        Requests that arrive later are not counted. O(tenants of the band); O(n) in the requests of
        `tenant` if `key` is not the last.
        """
        before = sum(band.tokens for other, band in self._bands.items() if other < band_key)
        band = self._bands.get(band_key)
        if band is None:
            return before
        own = band.waiting.get(tenant)
        if own is None:
            own = _Tenant(served_tokens=max(band.least_tokens, band.left.get(tenant, 0)))
        own_tokens = own.tokens_before(key)
        counter = own.served_tokens + own_tokens
        others = sum(
            waiting.tokens_until(counter) for waiting in band.waiting.values() if waiting is not own
        )
        return before + own_tokens + others

    def busiest(self, band_key: QueueKey) -> str:
        """The tenant with the most waiting tokens in a band; "" if none waits. O(tenants)."""
        band = self._bands.get(band_key)
        waiting = band.waiting if band is not None else {}
        return max(waiting, key=lambda name: waiting[name].waiting_tokens, default="")

    def check_invariants(self) -> None:
        """Raise AssertionError if entries are out of order, or a band or a tenant is empty."""
        for band in self._bands.values():
            assert band.waiting and not band.waiting.keys() & band.left.keys()
            for tenant in band.waiting.values():
                assert tenant.entries and tenant.entries == sorted(tenant.entries)
                assert len(tenant.tokens) == len(tenant.entries)
                assert tenant.waiting_tokens == sum(tenant.tokens)
            assert band.tokens == sum(t.waiting_tokens for t in band.waiting.values())


def _fair_order(band: _Band) -> Iterator[str]:
    """Merge the tenants' queues by counter, charging each yielded request as if it started."""
    heap = [
        (tenant.served_tokens, tenant.entries[0], 0, name) for name, tenant in band.waiting.items()
    ]
    heapify(heap)
    while heap:
        served_tokens, entry, number, name = heap[0]
        if len(heap) == 1:
            for entry in islice(band.waiting[name].entries, number, None):
                yield entry[-1]
            return
        yield entry[-1]
        tenant = band.waiting[name]
        if number + 1 == len(tenant.entries):
            heappop(heap)
            continue
        next_tokens = served_tokens + tenant.tokens[number]
        heapreplace(heap, (next_tokens, tenant.entries[number + 1], number + 1, name))
