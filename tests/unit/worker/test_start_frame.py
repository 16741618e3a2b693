import pytest

from services.core.adapter import Adapter
from services.core.destination import Destination
from services.core.request import (
    NO_LOGPROBS,
    PROMPT_LOGPROBS_MAX,
    Grammar,
    GrammarKind,
    LogprobOptions,
    Sampling,
)
from services.core.service import DEFAULT_SERVICE, Service, ServiceClass
from services.worker.start_frame import InvalidStart, to_request
from tideserve.common.v1 import adapter_pb2, service_pb2
from tideserve.worker.v1 import worker_pb2 as pb


def make_start(**changes) -> pb.Start:
    fields = {
        "request_id": "r",
        "group_id": "g",
        "epoch": 1,
        "prompt_ids": [1, 2],
        "sampling": pb.Sampling(temperature=1, top_p=1, top_k=0, seed=2**63),
        "limits": pb.Limits(max_tokens=8, min_tokens=0, stop_token_ids=[9]),
    }
    return pb.Start(**{**fields, **changes})


def test_a_start_becomes_a_request() -> None:
    request = to_request(make_start(), vocab_size=10, max_model_len=10, now_s=3.0)
    assert request.prompt_ids == (1, 2)
    assert request.sampling.seed == 2**63
    assert request.limits.stop_token_ids == {9}
    assert request.arrival_s == 3.0


def test_stop_tokens_of_model_and_client_are_joined() -> None:
    limits = pb.Limits(max_tokens=2, stop_token_ids=range(256 + 64))
    request = to_request(make_start(limits=limits), vocab_size=400, max_model_len=10, now_s=0.0)
    assert len(request.limits.stop_token_ids) == 256 + 64


def test_a_start_of_the_previous_release_uses_defaults() -> None:
    request = to_request(make_start(), vocab_size=10, max_model_len=10, now_s=0.0)
    assert request.sampling == Sampling(1.0, 1.0, 0, 2**63)
    assert (request.logprobs, request.service) == (NO_LOGPROBS, DEFAULT_SERVICE)
    assert (request.waited_s, request.traceparent) == (0.0, "")
    assert (request.cache_salt, request.choice) == ("", 0)


def test_every_field_reaches_the_request() -> None:
    start = make_start(
        sampling=pb.Sampling(
            temperature=0.5,
            top_p=0.9,
            min_p=0.1,
            presence_penalty=-2,
            frequency_penalty=2,
            repetition_penalty=1.25,
            logit_bias=[pb.LogitBias(token_id=3, bias=-100), pb.LogitBias(token_id=4, bias=1.5)],
            bad_words=[pb.TokenSequence(token_ids=[1, 2]), pb.TokenSequence(token_ids=[9])],
            allowed_token_ids=[0, 9],
            grammar=pb.Grammar(regex="a+"),
        ),
        logprobs=pb.LogprobOptions(output_top=0, prompt_top=10),
        service=service_pb2.Service(
            service_class=service_pb2.SERVICE_CLASS_BATCH,
            ttft_s=0.5,
            token_group=4,
            rank=-1,
            tenant="t",
        ),
        waited_s=1.5,
        traceparent="00-1-2-01",
        cache_salt="s" * 128,
        choice=3,
        output_ids=[3, 3, 9],
        server_losses=2,
        hand_to=pb.GoTo(worker_id="w1", address="host:1", group_id="g", epoch=7),
    )
    request = to_request(start, vocab_size=10, max_model_len=10, now_s=0.0)
    assert request.sampling == Sampling(
        temperature=0.5,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.25,
        logit_bias=((3, -100.0), (4, 1.5)),
        bad_words=((1, 2), (9,)),
        allowed_token_ids=(0, 9),
        grammar=Grammar(GrammarKind.REGEX, "a+"),
    )
    assert request.logprobs == LogprobOptions(output=0, prompt=10)
    assert request.service == Service(ServiceClass.BATCH, 0.5, None, 4, -1, "t")
    assert (request.waited_s, request.traceparent) == (1.5, "00-1-2-01")
    assert (request.cache_salt, request.choice) == ("s" * 128, 3)
    assert (request.prompt_ids, request.output_ids) == ((1, 2), (3, 3, 9))
    assert request.server_losses == 2
    assert request.hand_to == Destination("w1", "host:1", "g", 7)


@pytest.mark.parametrize("kind", list(GrammarKind))
def test_a_grammar_keeps_its_form(kind: GrammarKind) -> None:
    sampling = pb.Sampling(top_p=1, grammar=pb.Grammar(**{kind.value: "{}"}))
    request = to_request(make_start(sampling=sampling), vocab_size=10, max_model_len=10, now_s=0.0)
    assert request.sampling.grammar == Grammar(kind, "{}")


def test_a_service_without_targets_has_no_deadlines() -> None:
    start = make_start(service=service_pb2.Service())
    request = to_request(start, vocab_size=10, max_model_len=10, now_s=0.0)
    assert request.service == DEFAULT_SERVICE


NAN, INFINITY = float("nan"), float("inf")


def sampled(**changes: object) -> dict[str, object]:
    return {"sampling": pb.Sampling(**{"temperature": 1, "top_p": 1, **changes})}


def bias(*pairs: tuple[int, float]) -> list[pb.LogitBias]:
    return [pb.LogitBias(token_id=token_id, bias=value) for token_id, value in pairs]


def words(*sequences: list[int]) -> list[pb.TokenSequence]:
    return [pb.TokenSequence(token_ids=ids) for ids in sequences]


def served(**changes: object) -> dict[str, object]:
    return {"service": service_pb2.Service(**changes)}


def test_a_class_of_a_later_version_is_read_as_standard() -> None:
    start = make_start(**served(service_class=7))
    request = to_request(start, vocab_size=10, max_model_len=10, now_s=0.0)
    assert request.service.service_class is ServiceClass.STANDARD


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"prompt_ids": []}, "prompt_ids"),
        ({"prompt_ids": [-1]}, "prompt_ids"),
        ({"prompt_ids": [10]}, "prompt_ids"),
        ({"limits": pb.Limits(max_tokens=0)}, "max_tokens"),
        ({"limits": pb.Limits(max_tokens=-1)}, "max_tokens"),
        ({"limits": pb.Limits(max_tokens=9)}, "10 tokens"),
        ({"limits": pb.Limits(max_tokens=2, min_tokens=3)}, "min_tokens"),
        ({"limits": pb.Limits(max_tokens=2, min_tokens=-1)}, "min_tokens"),
        ({"limits": pb.Limits(max_tokens=2, stop_token_ids=[10])}, "stop_token_ids"),
        ({"limits": pb.Limits(max_tokens=2, stop_token_ids=[1] * 321)}, "stop_token_ids"),
        ({"sampling": pb.Sampling(temperature=NAN, top_p=1)}, "temperature"),
        ({"sampling": pb.Sampling(temperature=INFINITY, top_p=1)}, "temperature"),
        ({"sampling": pb.Sampling(temperature=-0.1, top_p=1)}, "temperature"),
        ({"sampling": pb.Sampling(temperature=2.1, top_p=1)}, "temperature"),
        ({"sampling": pb.Sampling(temperature=1, top_p=0)}, "top_p"),
        ({"sampling": pb.Sampling(temperature=1, top_p=NAN)}, "top_p"),
        ({"sampling": pb.Sampling(temperature=1, top_p=1.01)}, "top_p"),
        ({"sampling": pb.Sampling(temperature=1, top_p=1, top_k=-1)}, "top_k"),
        ({"sampling": pb.Sampling(temperature=1, top_p=1, top_k=11)}, "top_k"),
        (sampled(min_p=-0.1), "min_p"),
        (sampled(min_p=1.01), "min_p"),
        (sampled(min_p=NAN), "min_p"),
        (sampled(presence_penalty=2.01), "presence_penalty"),
        (sampled(presence_penalty=NAN), "presence_penalty"),
        (sampled(frequency_penalty=-2.01), "frequency_penalty"),
        (sampled(repetition_penalty=0), "repetition_penalty"),
        (sampled(repetition_penalty=1e-45), "repetition_penalty must lie in 0.01 to 2"),
        (sampled(repetition_penalty=2.01), "repetition_penalty"),
        (sampled(repetition_penalty=NAN), "repetition_penalty"),
        (sampled(logit_bias=bias((10, 1.0))), "logit_bias"),
        (sampled(logit_bias=bias((-1, 1.0))), "logit_bias"),
        (sampled(logit_bias=bias((1, 100.5))), "logit_bias"),
        (sampled(logit_bias=bias((1, NAN))), "logit_bias"),
        (sampled(logit_bias=bias((1, -INFINITY))), "logit_bias"),
        (sampled(logit_bias=bias((1, 1.0), (1, 1.0))), "each once"),
        (sampled(logit_bias=bias(*((0, 1.0),) * 1025)), "1024"),
        (sampled(bad_words=words([])), "bad_words"),
        (sampled(bad_words=words([1, 10])), "bad_words"),
        (sampled(bad_words=words(*([1],) * 129)), "bad_words"),
        (sampled(bad_words=words([1] * 4097)), "bad_words"),
        (sampled(allowed_token_ids=[10]), "allowed_token_ids"),
        (sampled(allowed_token_ids=[1] * 11), "allowed_token_ids"),
        (sampled(grammar=pb.Grammar()), "form"),
        (sampled(grammar=pb.Grammar(regex="")), "grammar"),
        (sampled(grammar=pb.Grammar(regex="ä" * 2**15 + "a")), "grammar"),
        ({"logprobs": pb.LogprobOptions(output_top=21)}, "output_top"),
        ({"logprobs": pb.LogprobOptions(prompt_top=-1)}, "prompt_top"),
        ({"logprobs": pb.LogprobOptions(prompt_top=11)}, "0 to 10"),
        (served(ttft_s=-1), "ttft_s"),
        (served(tpot_s=NAN), "tpot_s"),
        (served(token_group=-1), "token_group"),
        (served(tenant="t" * 257), "tenant"),
        ({"waited_s": -1}, "waited_s"),
        ({"waited_s": INFINITY}, "waited_s"),
        ({"traceparent": "x" * 257}, "traceparent"),
        ({"cache_salt": "x" * 129}, "cache_salt"),
        ({"choice": -1}, "choice"),
        ({"server_losses": -1}, "server_losses"),
        ({"hand_to": pb.GoTo(worker_id="w1")}, "hand_to"),
        ({"hand_to": pb.GoTo(address="host:1")}, "hand_to"),
        ({"output_ids": [10]}, "output_ids"),
        ({"output_ids": [1] * 8}, "output_ids must be fewer"),
    ],
)
def test_every_field_outside_its_range_is_named(changes: dict, about: str) -> None:
    with pytest.raises(InvalidStart, match=about):
        to_request(make_start(**changes), vocab_size=10, max_model_len=10, now_s=0.0)


def test_log_probabilities_of_a_prompt_are_bounded() -> None:
    options = pb.LogprobOptions(prompt_top=20)
    most = PROMPT_LOGPROBS_MAX // 21
    start = make_start(prompt_ids=[1] * most, logprobs=options)
    to_request(start, vocab_size=100, max_model_len=10**6, now_s=0.0)
    start = make_start(prompt_ids=[1] * (most + 1), logprobs=options)
    with pytest.raises(InvalidStart, match=f"exceed {PROMPT_LOGPROBS_MAX} numbers"):
        to_request(start, vocab_size=100, max_model_len=10**6, now_s=0.0)


def make_adapter(**changes) -> adapter_pb2.Adapter:
    fields = {"name": "a", "digest": "0f" * 32, "source": "/adapters/a", "rank": 8}
    return adapter_pb2.Adapter(**{**fields, **changes})


def test_an_adapter_reaches_the_request() -> None:
    start = make_start(adapter=make_adapter())
    request = to_request(start, 10, 10, 0.0, adapter_rank_max=8)
    assert request.adapter == Adapter("a", "0f" * 32, "/adapters/a", 8)


@pytest.mark.parametrize(
    ("adapter", "rank_max", "message"),
    [
        (make_adapter(), 0, "loads no adapters"),
        (make_adapter(rank=16), 8, "rank 16, but this worker's `adapter_rank_max` is 8"),
        (make_adapter(rank=0), 8, "rank is 0"),
        (make_adapter(digest="0F" * 32), 8, "64 hexadecimal digits"),
        (make_adapter(name=""), 8, "name must have"),
        (make_adapter(source="x" * 5000), 8, "source must have"),
    ],
)
def test_an_adapter_that_would_be_ignored_or_is_invalid_is_refused(
    adapter: adapter_pb2.Adapter, rank_max: int, message: str
) -> None:
    with pytest.raises(InvalidStart, match=message):
        to_request(make_start(adapter=adapter), 10, 10, 0.0, adapter_rank_max=rank_max)
