"""Bodies and events of /v1/completions with token ids."""

from typing import Any

import pytest

from services.core.request import Limits, LogprobOptions, Request, Sampling
from services.core.service import Service, ServiceClass
from services.worker.openai_engine.completions import (
    Completions,
    priority_fields,
    prompt_rows,
)
from services.worker.openai_engine.errors import UpstreamFailed, UpstreamLost, UpstreamRefused
from services.worker.openai_engine.output import StreamedLogprob, StreamPiece
from services.worker.vllm_engine.arguments import RANK_MAX, class_of, priority_of
from services.worker.vllm_engine.parameters import parameters_of


def body_of(**fields: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"sampling": Sampling(), "limits": Limits(8)}
    request = Request("r", (1, 2), arrival_s=0.0, **(given | fields))
    return Completions("m").body(request.prompt_ids, parameters_of(request), request.cache_salt)


def test_every_parameter_overrides_server_defaults() -> None:
    body = body_of(limits=Limits(8, 2, frozenset({9, 4})))
    wanted = {
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "seed", "max_tokens", "min_tokens", "stop_token_ids"),
        *("ignore_eos", "model", "prompt", "stream", "stream_options", "return_token_ids"),
    }
    assert body.keys() == wanted
    assert (body["prompt"], body["stop_token_ids"]) == ([1, 2], [4, 9])


def test_optional_fields_are_sent_if_set() -> None:
    body = body_of(
        sampling=Sampling(logit_bias=((5, 1.5),), allowed_token_ids=(5, 6)),
        logprobs=LogprobOptions(2, 3),
        cache_salt="of a",
    )
    assert body["logit_bias"] == {"5": 1.5} and body["allowed_token_ids"] == [5, 6]
    assert (body["logprobs"], body["prompt_logprobs"], body["cache_salt"]) == (2, 3, "of a")
    assert body["return_tokens_as_token_ids"] is True


@pytest.mark.parametrize(
    ("event", "piece"),
    [
        ({"choices": []}, StreamPiece()),
        ({"choices": [{"text": "", "token_ids": None}]}, StreamPiece()),
        ({"choices": [{"text": "a", "token_ids": [3, 4]}]}, StreamPiece((3, 4))),
        (
            {"choices": [{"token_ids": [3], "finish_reason": "stop", "stop_reason": 3}]},
            StreamPiece((3,), "stop", 3),
        ),
        (
            {"choices": [{"token_ids": [3], "finish_reason": "stop", "stop_reason": "word"}]},
            StreamPiece((3,), "stop"),
        ),
    ],
)
def test_stream_events_are_parsed(event: dict[str, Any], piece: StreamPiece) -> None:
    assert Completions("m").reader()(event) == piece


@pytest.mark.parametrize(
    ("event", "error", "message"),
    [
        ({"error": {"message": "bad", "code": 400}}, UpstreamRefused, "refused .*: bad"),
        (
            {"error": {"message": "bad", "code": "x", "type": "invalid_request_error"}},
            *(UpstreamRefused, "bad"),
        ),
        ({"error": {"message": "died", "code": 500}}, UpstreamLost, "error in a stream$"),
        ({"error": {"message": "full", "code": 429}}, UpstreamLost, "error in a stream$"),
        ({"error": "died"}, UpstreamLost, "error in a stream$"),
        ({"choices": [{"text": "a"}]}, UpstreamFailed, "without token ids"),
    ],
)
def test_invalid_stream_events_are_errors(
    event: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Completions("m").reader()(event)


def test_log_probabilities_name_token_ids() -> None:
    rows = {
        "tokens": ["token_id:3", "token_id:8"],
        "token_logprobs": [-2.0, -0.1],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:6": -1.0}, {"token_id:8": -0.1}],
    }
    piece = Completions("m").reader()({"choices": [{"token_ids": [3, 8], "logprobs": rows}]})
    assert piece.logprobs == (
        {5: StreamedLogprob(-0.5), 6: StreamedLogprob(-1.0), 3: StreamedLogprob(-2.0, 3)},
        {8: StreamedLogprob(-0.1, 1)},
    )
    rows["tokens"][0] = "Paris"
    with pytest.raises(UpstreamFailed, match="log probabilities without token ids"):
        Completions("m").reader()({"choices": [{"token_ids": [3, 8], "logprobs": rows}]})


def test_prompt_log_probabilities_are_parsed() -> None:
    row = {"4": {"logprob": -1.0, "rank": 2}, "5": {"logprob": -0.5, "rank": 1}}
    answer = {"choices": [{"prompt_logprobs": [None, row]}]}
    assert prompt_rows(answer) == [
        None,
        {4: StreamedLogprob(-1.0, 2), 5: StreamedLogprob(-0.5, 1)},
    ]
    with pytest.raises(UpstreamFailed, match="no log probabilities of the prompt"):
        prompt_rows({"choices": [{}]})


def test_service_class_is_sent_in_the_server_dialect() -> None:
    for service_class in ServiceClass:
        for rank in (-2 * RANK_MAX, -1, 0, 5, 2 * RANK_MAX):
            priority = priority_of(Service(service_class, rank=rank))
            assert class_of(priority) is service_class
    batch = priority_of(Service(ServiceClass.BATCH))
    assert priority_fields("vllm", batch) == {"priority": batch}
    assert priority_fields("tideserve", batch) == {"service_tier": "flex"}
    assert priority_fields("openai", batch) == {}
