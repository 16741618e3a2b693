"""Figures and verdict of `recovery`, and the reports of its watch and streams."""

from dataclasses import replace
from pathlib import Path

from benchmarks.scenarios.recovery import (
    GAPS_MIN,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    EndlessStreams,
    Turn,
    judge,
    late_iterations,
)
from benchmarks.systems.system import Deployment
from tideserve.load.event_stream import StreamedAnswer

DEPLOYMENT = Deployment(Path("model"), "tiny", Path("cache"), 4, 1 << 28, paced="A100-14B:4")
TURN = Turn(
    9000,
    16,
    True,
    20.0,
    12.0,
    18.0,
    {"p50": 0.1},
    {"p50": 0.11},
    kv_share=0.45,
    decode_over_paced=1.01,
)


def test_a_run_with_timely_splits_has_no_problem() -> None:
    turns = {"drop": [TURN] * 3, "recompute": [replace(TURN, tpot_s={"p50": 0.09})] * 3}
    verdict = judge(turns, DEPLOYMENT)
    assert list(verdict.problems) == []
    assert verdict.figures["split_after_s"] == 12.0
    assert 1.1 < verdict.figures["tpot_ratio"] < 1.12
    assert ("split after the burst", "12.0 s, 12.0 s, 12.0 s") in list(verdict.rows)


def test_every_missed_bar_is_a_problem() -> None:
    stuck = replace(TURN, split_after_s=None)
    late = replace(TURN, split_after_s=20.5)
    plain = [TURN] * 3
    for ours, text in (
        ([TURN, TURN, stuck], "1 of 3 rounds had no split"),
        ([TURN, late, late], "must be at most 20 s"),
        ([TURN, TURN, replace(TURN, merged=False)], "the burst did not merge all workers"),
        ([replace(TURN, tpot_s={"p50": 0.13})] * 3, "over 1.25 × that of single workers"),
        ([TURN, TURN, replace(TURN, failures=["HTTP 500"])], "1 requests failed, the first: HTTP"),
    ):
        verdict = judge({"drop": ours, "recompute": plain}, DEPLOYMENT)
        assert len(verdict.problems) == 1 and text in verdict.problems[0]


def test_tpot_counts_gaps_within_the_window_of_streams_with_enough_of_them() -> None:
    streams = EndlessStreams("http://127.0.0.1:1", "m", 4, 0)
    for gap_s, count in ((0.1, 100), (0.2, 100), (0.3, GAPS_MIN)):
        answer = StreamedAnswer()
        answer.token_times_s = [gap_s * n for n in range(count)]
        streams.answers.append(answer)
    assert [round(value, 6) for value in streams.tpot_s(0.0, 9.0)] == [0.1, 0.2]
    assert [round(value, 6) for value in streams.tpot_s(0.0, 3.9)] == [0.1]


def test_the_first_requests_of_the_clients_are_at_all_stages() -> None:
    streams = EndlessStreams("http://127.0.0.1:1", "m", 16, 3)
    requests = [request for request, _ in zip(streams.drawn(16, 3), range(48), strict=False)]
    sizes = [len(request.prompt_ids) + request.output_tokens for request in requests]
    assert max(sizes) <= PROMPT_TOKENS[1] + OUTPUT_TOKENS[1]
    assert min(sizes) >= PROMPT_TOKENS[0] + OUTPUT_TOKENS[0]
    outputs = [request.output_tokens for request in requests]
    assert outputs[0] < 25 and outputs[15] >= OUTPUT_TOKENS[0]
    assert min(outputs[16:]) >= OUTPUT_TOKENS[0]


def test_the_last_count_of_each_worker_log_is_used(tmp_path: Path) -> None:
    line = "PACED too late: paced_late_total={} of 9 iterations took longer\n"
    (tmp_path / "worker-0.log").write_text(line.format(1) + line.format(2) + "more\n")
    (tmp_path / "worker-1.log").write_text("nothing\n")
    (tmp_path / "worker-2.log").write_text(line.format(4))
    assert late_iterations(tmp_path) == 6
