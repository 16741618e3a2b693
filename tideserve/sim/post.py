"""How the parts of simulated members talk to one another."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

from services.core.groups.layer_map import Stage

if TYPE_CHECKING:
    from tideserve.sim.capacity import Capacity
    from tideserve.sim.kv_exchange import LeaderExchange, MemberExchange


class Peer(Protocol):
    """A member, as others address it."""

    exchange: "LeaderExchange"
    kv: "MemberExchange"
    capacity: "Capacity"


Choose = Callable[[Peer], Callable[..., None]]
"""Which method of a member takes a message."""


class Post(Protocol):
    """The sender's side; what is sent is handled between iterations, at the sender's epoch."""

    name: str

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Of the present group; the first leads."""
        ...

    def send(self, worker_id: str, choose: Choose, *arguments: Any) -> None:
        """A message to a member, perhaps this one itself."""
        ...

    def send_along(self, choose: Choose, *arguments: Any) -> None:
        """To each stage after this one, behind all microbatches so far."""
        ...

    def send_bulk(self, worker_id: str, size_bytes: int, choose: Choose, *arguments: Any) -> None:
        """With that many bytes of KV or parameters."""
        ...

    def release(self, released: Iterable[str]) -> None:
        """Give up blocks of sequences that ended or were preempted at the leader."""
        ...
