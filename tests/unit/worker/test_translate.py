import pytest

from services.worker.translate import InvalidRequest, to_request
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


def test_the_models_stop_tokens_come_on_top_of_the_clients() -> None:
    limits = pb.Limits(max_tokens=2, stop_token_ids=range(256 + 64))
    request = to_request(make_start(limits=limits), vocab_size=400, max_model_len=10, now_s=0.0)
    assert len(request.limits.stop_token_ids) == 256 + 64


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "words"),
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
    ],
)
def test_every_field_outside_its_range_is_named(changes: dict, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        to_request(make_start(**changes), vocab_size=10, max_model_len=10, now_s=0.0)
