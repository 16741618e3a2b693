"""For how long a worker that cannot be reached is avoided."""

from services.gateway.cluster.worker_link import FIRST_S, LONGEST_S, Reach


def test_the_time_grows_with_each_failure_in_a_row_and_ends() -> None:
    reach, now_s, pauses = Reach(), 0.0, []
    for _ in range(8):
        reach.failed("a", now_s)
        avoided, pause_s = reach.avoided(now_s)
        assert avoided == ("a",)
        reach.failed("a", now_s + pause_s / 2)  # a connection that had begun before
        assert reach.avoided(now_s)[1] == pause_s
        pauses.append(pause_s)
        now_s += pause_s
        assert reach.avoided(now_s) == ((), 0.0)
    assert pauses == [min(FIRST_S * 2**count, LONGEST_S) for count in range(8)]


def test_an_answer_forgives() -> None:
    reach = Reach()
    reach.failed("a", 0.0)
    reach.failed("a", FIRST_S)
    reach.reached("a")
    assert reach.avoided(FIRST_S) == ((), 0.0)
    reach.failed("a", 9.0)
    assert reach.avoided(9.0) == (("a",), FIRST_S)


def test_the_shortest_time_holds_of_all() -> None:
    reach = Reach()
    reach.failed("a", 0.0)
    reach.failed("b", 0.5)
    assert reach.avoided(0.75) == (("a", "b"), FIRST_S - 0.75)
    reach.keep_only(frozenset({"b"}))
    assert reach.avoided(0.75) == (("b",), FIRST_S - 0.25)
