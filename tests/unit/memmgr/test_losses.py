"""The last loss of each group: when, which epoch, and why."""

from dataclasses import replace

import pytest

from services.core.groups.vocabulary import GroupStuck
from services.memmgr import losses as module
from services.memmgr.losses import GroupLoss, Losses
from services.memmgr.translate import to_get_cluster
from tests.unit.core.groups.test_state import MERGE, Store, transaction, worker


def merged() -> Store:
    store = Store(*(worker(name) for name in ("w0", "w1", "w2")))
    store.settle()
    store.merge()
    return store


def stuck(store: Store, worker_id: str, reason: str = "no way to w1") -> GroupStuck:
    group_id = store.assignments[worker_id].assignment.group_id
    incarnation = store.workers[worker_id].incarnation
    return GroupStuck(0.0, worker_id, incarnation, store.group(group_id).epoch, reason)


def settle(store: Store, losses: Losses, unix_s: int) -> None:
    """Run all commands of the coordinator, as the driver does."""
    commands = store.read()
    while commands:
        command = transaction(commands.pop(0))
        losses.note_transaction(store.state.records, command, unix_s)
        store.commit(command)


def test_a_dead_member_is_named_with_the_time_at_which_the_others_noticed() -> None:
    store, losses = merged(), Losses()
    epoch = store.group("group-w0").epoch
    losses.note_trouble(store.state.records, stuck(store, "w0"), 100)
    assert list(losses) == [GroupLoss("group-w0", epoch, 100, "w0 reports: no way to w1")]
    del store.workers["w1"]
    settle(store, losses, 110)
    assert list(losses) == [GroupLoss("group-w0", epoch, 100, "w1 is gone")]


def test_a_restarted_worker_counts_as_lost() -> None:
    store, losses = merged(), Losses()
    store.workers["w2"] = worker("w2", "b")
    settle(store, losses, 7)
    (loss,) = losses
    assert (loss.group_id, loss.reason) == ("group-w2", "w2 is gone")


def test_a_change_of_groups_is_no_loss() -> None:
    store, losses = Store(worker("w0"), worker("w1")), Losses()
    settle(store, losses, 1)
    attempt = store.prepare(MERGE).attempt
    store.answer("w0", attempt)
    (commit,) = store.answer("w1", attempt)
    losses.note_transaction(store.state.records, transaction(commit), 2)
    assert list(losses) == []


def test_reports_of_another_process_epoch_or_single_worker_are_not_losses() -> None:
    store, losses = merged(), Losses()
    report = stuck(store, "w0")
    for event in (
        replace(report, incarnation="another"),
        replace(report, epoch=report.epoch - 1),
        replace(report, worker_id="unknown"),
        stuck(store, "w2"),
    ):
        losses.note_trouble(store.state.records, event, 1)
    assert list(losses) == []


def test_the_newest_loss_of_a_group_counts_and_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    store, losses = merged(), Losses()
    losses.note_trouble(store.state.records, stuck(store, "w0"), 1)
    del store.workers["w2"]
    settle(store, losses, 2)
    assert [loss.group_id for loss in losses] == ["group-w0", "group-w2"]
    losses.note_trouble(store.state.records, stuck(store, "w1", "stands still"), 3)
    assert [(loss.group_id, loss.unix_s) for loss in losses] == [("group-w2", 2), ("group-w0", 1)]
    monkeypatch.setattr(module, "LOSSES_MAX", 1)
    losses.note_trouble(store.state.records, stuck(store, "w1"), 4)
    store.workers["w1"] = worker("w1", "b")
    settle(store, losses, 5)
    assert [loss.reason for loss in losses] == ["w1 is gone"]


def test_losses_round_trip() -> None:
    (shown,) = to_get_cluster([], [], losses=[GroupLoss("g", 3, 99, "w1 is gone")]).losses
    fields = (shown.group_id, shown.epoch, shown.lost_unix_s, shown.reason)
    assert fields == ("g", 3, 99, "w1 is gone")
