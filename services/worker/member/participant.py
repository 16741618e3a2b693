"""What the member's servicer asks of the engine side in a change-over."""

from dataclasses import dataclass
from typing import Protocol

from services.core.groups.vocabulary import Group


class PrepareRefused(Exception):
    """This worker cannot become a member of the target; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class SourceMember:
    """A member of the sources of a change-over; this worker is one of them.

    `draining`: the worker is leaving. The nonces are secrets of the attempt: a peer that
    connects to one of the lanes must prove that it holds the lane's nonce.
    """

    worker_id: str
    incarnation: str
    address: str
    activation_address: str
    bulk_address: str
    activation_nonce: bytes
    bulk_nonce: bytes
    draining: bool = False


@dataclass(frozen=True, slots=True)
class ProposedChange:
    """A change-over that may be committed, from `group_id` at `epoch` to `target` with its epoch.

    `others` are the other targets of the change-over; `peers` are the members of all sources.
    """

    attempt: str
    group_id: str
    epoch: int
    target: Group
    peers: tuple[SourceMember, ...]
    others: tuple[Group, ...] = ()


class Participant(Protocol):
    """Methods are called one after the other, except that a running `prepare` may be cancelled.

    `abort` or `commit` follows a `prepare` that was cancelled or refused.
    """

    async def prepare(self, preparation: ProposedChange) -> None:
        """Reserve, fetch and verify what the target needs, while the worker keeps serving.

        Every step can be taken back. After the return, this worker can serve the target whenever it
        is committed. Raises PrepareRefused.
        """

    async def abort(self, attempt: str) -> None:
        """Abort the preparation for the attempt, which will never be committed."""

    async def commit(self, group: Group, attempt: str | None, superseded: str | None) -> None:
        """Serve the committed configuration `group`, of which this worker is a member.

        `attempt` has prepared it; None if no attempt has, as for a group of one. `superseded` is an
        attempt that prepared another configuration, "" for none: keep the layers that it fetched
        and `group` needs, free the others. A DEGRADED group serves nothing, and the worker keeps
        its layers.
        """
