"""Responses of etcd that reveal lost writes."""

from collections.abc import AsyncIterator

import pytest

from services.common.etcd import Entry, Listing, Store, StoreSnapshot
from services.common.etcd_calls import EtcdCalls
from services.common.etcd_history import EtcdHistory

CLUSTER = 7


@pytest.fixture
def calls() -> EtcdCalls:
    return EtcdCalls()


@pytest.fixture
def history(calls: EtcdCalls) -> EtcdHistory:
    return EtcdHistory("http://etcd:2379", calls)


def note(history: EtcdHistory, revision: int, cluster_id: int = CLUSTER) -> int:
    """A call that starts after all others have completed."""
    return history.note_response(history.position, cluster_id, revision)


def test_revisions_that_stay_or_grow_are_the_same_history(
    history: EtcdHistory, calls: EtcdCalls
) -> None:
    assert [note(history, revision) for revision in (5, 5, 9)] == [0, 0, 0]
    assert calls.rollbacks == 0


def test_each_lower_revision_is_a_rollback(history: EtcdHistory, calls: EtcdCalls) -> None:
    assert [note(history, revision) for revision in (9, 4, 5, 1, 1)] == [0, 1, 1, 2, 2]
    assert calls.rollbacks == 2


def test_another_cluster_is_a_rollback_at_any_revision(history: EtcdHistory) -> None:
    assert note(history, 9) == 0
    assert note(history, 90, cluster_id=8) == 1
    assert note(history, 91, cluster_id=8) == 1


def test_concurrent_calls_may_complete_in_any_order(history: EtcdHistory) -> None:
    note(history, 5)
    both = history.position
    assert history.note_response(both, CLUSTER, 9) == 0
    assert history.note_response(both, CLUSTER, 8) == 0
    assert note(history, 8) == 1, "this call began after revision 9 was known"


def test_concurrent_calls_detect_a_rollback_once(history: EtcdHistory, calls: EtcdCalls) -> None:
    note(history, 5)
    all_three = history.position
    assert history.note_response(all_three, CLUSTER, 2) == 1
    assert history.note_response(all_three, CLUSTER, 3) == 1
    # Answered by etcd before it lost its writes.
    assert history.note_response(all_three, CLUSTER, 6) == 0
    assert calls.rollbacks == 1
    assert note(history, 3) == 1


class OvertakingStore(Store):
    """Returns these listings; its revision never goes back."""

    def __init__(self, *listings: Listing) -> None:
        super().__init__("127.0.0.1:1")
        self._listings = list(listings)
        self._revision = 100

    async def snapshot(self, prefix: str) -> StoreSnapshot:
        self._revision += 1
        listing = self._listings.pop(0) if len(self._listings) > 1 else self._listings[0]
        return StoreSnapshot(listing, self._revision, self._history.position.rollbacks)

    async def _wait_for_change(self, prefix: str, revision: int) -> None:
        return


async def collect_snapshots(store: Store, count: int) -> list[StoreSnapshot]:
    snapshots: AsyncIterator[StoreSnapshot] = store.follow_prefix("")
    return [await anext(snapshots) for _ in range(count)]


@pytest.mark.parametrize("after", [Entry(b"1", 3, 4), Entry(b"2", 3, 5)])
async def test_a_record_with_an_older_revision_is_a_rollback(after: Entry) -> None:
    """The revisions of a restored etcd soon exceed those that it has lost."""
    store = OvertakingStore({"a": Entry(b"1", 3, 5)}, {"a": after})
    first, second, third = await collect_snapshots(store, 3)
    assert (first.rollbacks, second.rollbacks, third.rollbacks) == (0, 1, 1)
    assert second.entries == {"a": after}
    assert store.calls.rollbacks == 1


async def test_changed_and_recreated_records_are_no_rollback() -> None:
    before, later = Entry(b"1", 3, 5), Entry(b"1", 8, 8)
    store = OvertakingStore({"a": before}, {"a": before}, {}, {"a": later})
    assert [snapshot.rollbacks for snapshot in await collect_snapshots(store, 4)] == [0, 0, 0, 0]
