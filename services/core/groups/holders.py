"""Chooses the holders of a change of groups: other workers that send layers to its members.

The members of a change fetch the layers that they lack from one another. After the loss of a
worker, no member may hold them any more. A *holder* runs such layers in another group, which
continues to serve (KunServe §4.4: parameters are pulled from instances whenever possible).
"""

from collections.abc import Collection, Iterable, Iterator, Sequence

from services.core.groups.records import Records
from services.core.groups.vocabulary import Group, GroupPhase, Member, Worker

HOLDERS_MAX = 8
"""Maximum number of holders of a change; each one gets two connections from every member."""
HOLDERS_PER_LAYER = 2
"""The second holder of a layer is used if the first one fails."""


def holders_for(
    records: Records,
    sources: Sequence[Group],
    targets: Sequence[Group],
    busy: Collection[str] = (),
) -> tuple[Member, ...]:
    """The holders of layers of `targets` that no member of `sources` holds.

    `busy` are holders of other changes in progress, which are chosen last.
    """
    members = [member for group in sources for member in group.members]
    needed = {layer for group in targets for layer in _layers(group.members)}
    missing = needed - set(_layers(members))
    wanted = dict.fromkeys(missing, HOLDERS_PER_LAYER)
    candidates = list(_candidates(records, members)) if wanted else []
    chosen: list[Member] = []
    while candidates and len(chosen) < HOLDERS_MAX:
        best = max(candidates, key=lambda m: (_gain(m, wanted), m.worker_id not in busy))
        if not _gain(best, wanted):
            break
        candidates.remove(best)
        chosen.append(best)
        for layer in missing.intersection(_layers([best])):
            wanted[layer] -= 1
    return tuple(chosen)


def _candidates(records: Records, members: Sequence[Member]) -> Iterator[Member]:
    """The members of other groups with the same weights that keep their layers for now."""
    names = {member.worker_id for member in members}
    like = records.workers.get(members[0].worker_id)
    if like is None:
        return  # its lease has just ended: this change will be aborted
    for group_id, stored in sorted(records.groups.items()):
        if not _keeps_layers(stored.group) or not records.is_sound(group_id):
            continue
        for member in stored.group.members:
            worker = records.workers.get(member.worker_id)
            if worker is not None and member.worker_id not in names and _is_alike(worker, like):
                yield member


def _keeps_layers(group: Group) -> bool:
    """Whether the group serves and is in no change."""
    # A group with a mark may drop layers at any moment. A DEGRADED group may be that of a dead
    # worker whose lease has not ended, and waiting for it would delay the survivors.
    return group.phase is GroupPhase.STABLE and not group.attempt


def _is_alike(worker: Worker, like: Worker) -> bool:
    """Whether both run the same code with the same weights, and connect to other workers."""
    return worker.can_drop and all(
        getattr(worker, name) == getattr(like, name)
        for name in ("model", "num_layers", "model_digest", "build")
    )


def _layers(members: Iterable[Member]) -> Iterator[int]:
    for member in members:
        yield from range(member.first_layer, member.end_layer)


def _gain(member: Member, wanted: dict[int, int]) -> int:
    """The number of layers of the member that still lack a holder."""
    return sum(wanted.get(layer, 0) > 0 for layer in _layers([member]))
