"""Bounds of buckets."""

from services.common import vllm_names


def test_token_buckets_grow_by_1_2_5() -> None:
    assert vllm_names.token_count_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert vllm_names.token_count_buckets(99)[-1] == 50
    assert vllm_names.token_count_buckets(1) == (1,)


def test_bucket_bounds_increase() -> None:
    for bounds in (
        vllm_names.TTFT_BUCKETS_S,
        vllm_names.TOKEN_BUCKETS_S,
        vllm_names.REQUEST_BUCKETS_S,
        vllm_names.CHOICE_BUCKETS,
    ):
        assert list(bounds) == sorted(set(bounds))
