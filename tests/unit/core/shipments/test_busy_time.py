"""The time during which at least one transfer is in progress."""

from services.core.shipments.busy_time import BusyTime


def test_transfers_at_the_same_time_count_once() -> None:
    busy = BusyTime()
    busy.begin("a", 1.0)
    busy.begin("b", 2.0)
    busy.end("a", 4.0)
    busy.end("b", 5.0)
    busy.begin("c", 10.0)
    busy.end("c", 11.0)
    assert busy.total_s == 5.0


def test_transfers_that_others_sent_do_not_count() -> None:
    busy = BusyTime()
    busy.end("incoming", 3.0)
    busy.begin("a", 4.0)
    busy.end("a", 4.5)
    busy.end("a", 9.0)
    assert busy.total_s == 0.5
