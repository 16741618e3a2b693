"""Times of the phases of a request."""

import random

from services.worker.engine.pipeline.serving import PREEMPTION_TIMES_MAX, PRUNE_MARGIN, RequestClock


def test_wait_prefill_and_decode_times_are_measured() -> None:
    clock = RequestClock()
    clock.begin("r", 10.0)
    clock.note_launched(lambda: ["other", "r"], 10.5)
    clock.note_launched(lambda: ["r"], 11.0)
    clock.note_emitted("r", 12.0)
    clock.note_emitted("r", 12.5)
    times = clock.end("r", 14.0)
    assert times is not None
    assert (times.wait_s, times.prefill_s, times.decode_s) == (0.5, 1.5, 2.0)
    assert times.preempted_s == [] and clock.end("r", 15.0) is None


def test_a_preempted_request_waits_and_decodes_again() -> None:
    clock = RequestClock()
    clock.begin("r", 0.0)
    clock.note_launched(lambda: ["r"], 1.0)
    clock.note_emitted("r", 2.0)
    clock.note_preempted(["r", "unknown"], 3.0)
    clock.note_preempted(["r"], 3.5)
    clock.note_launched(lambda: ["r"], 5.0)
    clock.note_emitted("r", 6.0)
    times = clock.end("r", 7.0)
    assert times is not None
    assert (times.wait_s, times.prefill_s, times.decode_s) == (3.0, 1.0, 3.0)
    assert times.preempted_s == [3.0]


def test_a_request_from_elsewhere_has_no_prefill_here() -> None:
    clock = RequestClock()
    clock.begin("r", 0.0, decodes=True)
    clock.note_launched(lambda: ["r"], 0.25)
    times = clock.end("r", 1.0)
    assert times is not None
    assert (times.wait_s, times.prefill_s, times.decode_s) == (0.25, 0.0, 0.75)


def test_microbatches_are_skipped_without_waiting_requests() -> None:
    clock, looked = RequestClock(), []
    clock.begin("r", 0.0)
    clock.note_launched(lambda: ["r"], 0.0)
    clock.note_launched(lambda: looked.append(1) or [], 1.0)
    assert looked == []


def test_phases_sum_to_the_total_and_state_is_released() -> None:
    rng, clock = random.Random(1), RequestClock()
    now_s, known = 0.0, dict[str, float]()
    for number in range(3000):
        now_s += rng.random()
        name = rng.choice([*known, "new"]) if known else "new"
        match rng.randrange(6):
            case 0 | 1 if name == "new":
                known[f"r{number}"] = now_s
                clock.begin(f"r{number}", now_s, decodes=rng.random() < 0.3)
            case 2:
                clock.note_launched(lambda: list(known), now_s)
            case 3:
                clock.note_emitted(name, now_s)
            case 4:
                clock.note_preempted([name], now_s)
            case _ if name in known:
                times = clock.end(name, now_s)
                assert times is not None
                whole_s = now_s - known.pop(name)
                assert abs(times.wait_s + times.prefill_s + times.decode_s - whole_s) < 1e-6
                assert len(times.preempted_s) <= PREEMPTION_TIMES_MAX
        clock.check_invariants(known)
    for number in range(PRUNE_MARGIN + 10):
        clock.begin(f"lost{number}", now_s)
    clock.prune({}, 0)
    clock.check_invariants({})
    assert all(clock.end(f"lost{number}", now_s) is None for number in range(PRUNE_MARGIN + 10))
