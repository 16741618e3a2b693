"""The streams that a fault hits: every token is kept, and how each stream ends."""

from dataclasses import replace

from benchmarks.faults.streams import STALL_S, Streams, stream_requests
from tests.support.fake_openai import fake_openai
from tideserve.load.workload import PlannedRequest


def test_requests_are_sampled_and_made_of_their_seed() -> None:
    requests = stream_requests(40, 3)
    assert requests == stream_requests(40, 3)
    assert requests != stream_requests(40, 4)
    assert len({one.seed for one in requests}) == 40
    assert {one.temperature for one in requests} == {0.8}
    assert len({one.output_tokens for one in requests}) > 10


def test_each_stream_ends_as_its_client_sees_it() -> None:
    """Prompt 7: a stream without its end; 8: an error event; 9: refused."""
    requests = [PlannedRequest(0.0, (first,), 3, first, temperature=0.8) for first in (6, 7, 8, 9)]
    with fake_openai() as server:
        server.behaviour = {7: "cut", 8: "error", 9: 503}
        streams = Streams(server.url, "fake", requests, "salt", STALL_S)
        streams.start()
        good, broken, failed, refused = streams.wait()
        sent = server.received
    assert not streams.running
    assert {body["cache_salt"] for body in sent} == {"salt"}
    assert {body["temperature"] for body in sent} == {0.8}
    assert all(body["return_token_ids"] for body in sent)
    assert good.finished
    assert (good.failure, good.told_tokens, len(good.times_s)) == ("", 3, 3)
    assert good.ended_s >= good.times_s[-1]
    assert (broken.failure, broken.finished, broken.told_tokens) == ("", False, 0)
    assert failed.failure
    assert refused.failure.startswith("HTTP 503")
    assert not any(one.stuck for one in (good, broken, failed, refused))


def test_only_so_many_run_at_a_time() -> None:
    requests = [PlannedRequest(0.0, (first,), 3, first) for first in range(6, 12)]
    with fake_openai() as server:
        streams = Streams(server.url, "fake", requests, "salt", STALL_S, at_once=2)
        streams.start()
        outcomes = streams.wait()
    assert streams.ended == len([one for one in outcomes if one.finished]) == 6
    for number, one in enumerate(outcomes[2:], 2):
        ended = [other for other in outcomes[:number] if other.ended_s <= one.times_s[0]]
        assert len(ended) >= number - 1, "two others were still running"


def test_batch_work_begins_before_the_others() -> None:
    planned = stream_requests(5, 1, (3, 3), batch=2)
    assert [one.slo_class for one in planned] == ["batch"] * 2 + ["standard"] * 3
    assert [replace(one, slo_class="standard") for one in planned] == stream_requests(5, 1, (3, 3))
    requests = [replace(one, prompt_ids=(6 + number,)) for number, one in enumerate(planned)]
    with fake_openai() as server:
        streams = Streams(server.url, "fake", requests, "salt", STALL_S)
        streams.start()
        outcomes = streams.wait()
        assert [body.get("slo_class") for body in server.received][:2] == ["batch"] * 2
    firsts = [one.times_s[0] for one in outcomes]
    assert all(one.finished for one in outcomes) and max(firsts[:2]) <= min(firsts[2:])


def test_the_lengths_of_outputs_may_be_chosen() -> None:
    lengths = {one.output_tokens for one in stream_requests(60, 1, (5, 9))}
    assert lengths == {5, 6, 7, 8, 9}


def test_a_stream_without_tokens_for_long_is_given_up() -> None:
    request = PlannedRequest(0.0, (6,), 3, 6)
    with fake_openai() as server:
        server.behaviour = {6: "silent"}
        streams = Streams(server.url, "fake", [request], "salt", stall_s=1.0)
        streams.start()
        (outcome,) = streams.wait()
    assert outcome.stuck
    assert outcome.failure == "nothing came for 1 s"
