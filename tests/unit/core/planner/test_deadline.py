"""Order by deadline if not all decodes fit: token groups, long outputs, moved streams."""

from dataclasses import replace
from itertools import pairwise

from services.core.planner import configuration_events as changes
from services.core.planner.events import RequestArrived
from services.core.request import Limits, Request, Sampling
from services.core.service import DEFAULT_SERVICE, Service
from tests.unit.core.planner.test_slo import Clock, planner, promised


def _crowd(clock: Clock, count: int, service: Service) -> None:
    for number in range(count):
        clock.arrive(f"c{number}", service, output=3000)


def test_a_token_group_without_slack_is_not_left_out() -> None:
    """Its group is due after the others, but four of its tokens are still missing."""
    clock = Clock(planner(num_blocks=2500))
    _crowd(clock, 20, promised(tpot_s=0.1))
    clock.arrive("group", promised(tpot_s=0.028, group=4), output=3000)
    for _ in range(400):
        assert "group" in clock.run()
    ends = clock.tokens["group"][4::4]
    late = [b - a > 4 * 0.028 * (1 + 1e-9) for a, b in pairwise(ends)]
    assert len(late) > 90 and not any(late)
    for name in clock.tokens.keys() - {"group"}:
        assert max(b - a for a, b in pairwise(clock.tokens[name])) <= 0.1, name


def test_long_outputs_without_targets_take_no_turn_from_others() -> None:
    clock = Clock(planner(max_running=200, num_blocks=4000))
    _crowd(clock, 24, DEFAULT_SERVICE)
    clock.arrive("online", promised(ttft_s=0.5, tpot_s=0.025), output=3000)
    while clock.now_s < 14.0:
        clock.run()
    gaps = [b - a for a, b in pairwise(clock.tokens["online"])]
    assert sum(gap <= 0.025 for gap in gaps) > 0.98 * len(gaps)
    counts = [len(clock.tokens[f"c{number}"]) for number in range(24)]
    assert min(counts) > 0.4 * max(counts) > 100, "they take turns with each other"


def test_waiting_time_counts_from_the_arrival_at_the_gateway() -> None:
    clock = Clock(planner(max_running=1))
    clock.begin("runs", promised(), output=20)
    for name, ttft_s, waited_s in (("late", 5.0, 4.9), ("early", 2.0, 0.0)):
        service, prompt = promised(ttft_s=ttft_s), (1,) * 8
        request = Request(
            name, prompt, Sampling(), Limits(8), clock.now_s, service=service, waited_s=waited_s
        )
        clock.state.handle(RequestArrived(clock.now_s, request))
    assert [sequence.seq_id for sequence in clock.state.waiting] == ["late", "early"]


def test_a_stream_from_another_worker_precedes_new_prompts() -> None:
    clock = Clock(planner(max_batch_tokens=32, num_blocks=2000))
    request = Request(
        "resumed",
        (1,) * 200,
        Sampling(),
        Limits(200),
        0.0,
        service=promised(0.5, 0.1),
        waited_s=3.0,
        output_ids=(6,) * 20,
    )
    clock.state.handle(RequestArrived(0.0, request))
    iterations = 0
    while clock.state.sequences["resumed"].output_count == 20:
        clock.arrive(f"n{iterations}", promised(0.5), prompt=31, output=1)
        microbatch = clock.state.plan(clock.now_s)
        assert microbatch is not None
        chunks = {chunk.seq_id: chunk for chunk in microbatch.batch.chunks}
        assert len(chunks["resumed"].token_ids) >= min(31, 220 - chunks["resumed"].start)
        clock.finish(microbatch)
        iterations += 1
    assert iterations <= 8


def test_a_recomputed_stream_keeps_its_deadlines() -> None:
    clock = Clock(planner())
    clock.arrive("stream", promised(0.5, 0.1, 4), output=40)
    for _ in range(3):
        clock.run()
    before = replace(clock.state.sequences["stream"])
    clock.state.handle(changes.SequenceHeld("stream"))
    clock.state.handle(changes.SequenceReset("stream"))
    after = clock.state.sequences["stream"]
    assert after is not before and (after.due_s, after.group_left) == (
        before.due_s,
        before.group_left,
    )
    assert before.group_left < 4
