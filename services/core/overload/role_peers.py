"""Chooses which workers must be connected so that prefill workers can hand requests over."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.core.groups.vocabulary import Group, Member
from services.core.overload.shipping_pair import targets_of
from services.core.overload.worker_facts import WorkerFacts
from services.core.role import Role

PEERS_MAX = 32
"""Maximum number of decode workers to which a prefill worker is connected."""


@dataclass(frozen=True, slots=True)
class WorkerPeers:
    """A worker, alone in its group, and those to which it is connected for hand-overs."""

    member: Member
    peers: tuple[Member, ...]


def role_peers(
    groups: Iterable[Group], facts: Mapping[str, WorkerFacts], roles: Mapping[str, Role]
) -> list[WorkerPeers]:
    """The peers of prefill and decode workers, ordered by worker id.

    `groups` are those that serve; `facts` and `roles` are by worker id, and workers without a role
    are mixed.
    """
    single = [group for group in groups if len(group.members) == 1 and not group.attempt]
    by_role = defaultdict[Role, list[Group]](list)
    for group in single:
        by_role[roles.get(group.members[0].worker_id, Role.MIXED)].append(group)
    members = {group.members[0].worker_id: group.members[0] for group in single}
    peers = defaultdict[str, list[Member]](list)
    for source in by_role[Role.PREFILL]:
        source_id = source.members[0].worker_id
        targets = list(targets_of(by_role[Role.DECODE], facts, source_id))[:PEERS_MAX]
        for target in targets:
            peers[source_id].append(target.members[0])
            peers[target.members[0].worker_id].append(members[source_id])
    return [WorkerPeers(members[name], tuple(peers[name])) for name in sorted(peers)]
