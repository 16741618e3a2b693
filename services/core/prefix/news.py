"""What a leader tells its stages of the cache of prefixes."""

from dataclasses import dataclass, field
from typing import NamedTuple


class NamedBlock(NamedTuple):
    """Block `place` of a request's table holds the KV that `block_hash` stands for."""

    request_id: str
    place: int
    block_hash: bytes


class SharedPrefix(NamedTuple):
    """The request's table begins with the blocks that have these names."""

    request_id: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class PrefixNews:
    """What changes at every stage with a microbatch, before it runs, in the order of the fields.

    `forget`: all names so far. What the microbatch releases is released after blocks are `named`.
    """

    forget: bool = False
    named: tuple[NamedBlock, ...] = ()
    evicted: tuple[bytes, ...] = ()
    shared: tuple[SharedPrefix, ...] = ()


NO_PREFIX_UPDATE = PrefixNews()


@dataclass(slots=True)
class PendingPrefixUpdate:
    """What has changed since the last microbatch."""

    forget: bool = False
    named: list[NamedBlock] = field(default_factory=list)
    evicted: set[bytes] = field(default_factory=set)
    shared: list[SharedPrefix] = field(default_factory=list)

    def take(self) -> PrefixNews | None:
        """All of it, which is forgotten here; None if nothing has changed."""
        if not (self.forget or self.named or self.evicted or self.shared):
            return None
        evicted = tuple(sorted(self.evicted))
        news = PrefixNews(self.forget, tuple(self.named), evicted, tuple(self.shared))
        self.forget = False
        self.named.clear()
        self.evicted.clear()
        self.shared.clear()
        return news
