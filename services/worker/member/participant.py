"""The engine side of a change of groups; the member's servicer calls it."""

from dataclasses import dataclass
from typing import Protocol

from services.core.groups.vocabulary import Group


class PrepareRefused(Exception):
    """This worker cannot take its place in the target; one sentence says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A member of the groups that change, before the change; perhaps this worker itself.

    `draining`: it is about to stop. Its nonces are secrets of the attempt: whoever connects to one
    of its lanes must hold that.
    """

    worker_id: str
    incarnation: str
    address: str
    activation_address: str
    bulk_address: str
    activation_nonce: bytes
    bulk_nonce: bytes
    first_layer: int
    end_layer: int
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Preparation:
    """A change that may be committed: to `target` with its epoch, from `group_id` at `epoch`.

    `others` are the groups that the same change makes beside it; `peers` are all their members.
    """

    attempt: str
    group_id: str
    epoch: int
    target: Group
    peers: tuple[Peer, ...]
    others: tuple[Group, ...] = ()


class Participant(Protocol):
    """Called one at a time, except that a running `prepare` may be cancelled.

    After a cancelled or refused `prepare` comes `abort` or `commit`.
    """

    async def prepare(self, preparation: Preparation) -> None:
        """Reserve, fetch and verify what the target needs, while serving goes on as before.

        Nothing is freed or changed for good. Returning means: whenever the target is committed,
        this worker can serve it. Raises PrepareRefused.
        """

    async def abort(self, attempt: str) -> None:
        """Abort the preparation for the attempt, which will never be committed."""

    async def commit(self, group: Group, attempt: str, superseded: str) -> None:
        """Serve the committed configuration `group`, of which this worker is a member.

        `attempt` has prepared it ("": nobody has, as for a group of one). `superseded` was prepared
        for another configuration: keep of what it fetched what `group` wants, free the rest. In a
        DEGRADED group nothing is served, and the layers that the worker holds are kept.
        """
