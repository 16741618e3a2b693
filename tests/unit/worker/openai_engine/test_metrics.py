"""The load in the metrics of servers of different kinds."""

import pytest

from services.worker.openai_engine.metrics import UpstreamLoad, read_metrics

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
vllm:num_preemptions_total{engine="0",model_name="m"} 5.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1200.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 800.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100",sliding_window="None"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="90",sliding_window="None"} 1.0
vllm:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 7.0
"""


def test_metrics_of_vllm_engines_are_summed() -> None:
    assert read_metrics(VLLM) == UpstreamLoad(7, 2, 0.375, 16, 99 + 89, 5, 1200, 800)


def test_sglang_load_is_counted_in_tokens() -> None:
    text = (
        "sglang:num_running_reqs 3.0\nsglang:num_queue_reqs 1.0\nsglang:token_usage 0.28\n"
        "sglang:max_total_num_tokens 4096.0\n"
    )
    assert read_metrics(text) == UpstreamLoad(3, 1, 0.28, 1, 4096)


def test_llama_cpp_has_no_kv_cache_in_its_metrics() -> None:
    text = "llamacpp:requests_processing 2\nllamacpp:requests_deferred 1\n"
    assert read_metrics(text) == UpstreamLoad(running=2, waiting=1)


def test_a_server_with_other_metrics_exports_no_load() -> None:
    assert read_metrics("python_info 1.0\n# nothing else\n") == UpstreamLoad()
    assert read_metrics('vllm:cache_config_info{num_gpu_blocks="None"} 1.0\n') == UpstreamLoad()


def test_malformed_lines_are_refused() -> None:
    for line in (
        'vllm:num_requests_running{engine="0" many',
        'vllm:num_requests_running{engine="0",\t="a"} 1.0',
        "vllm:num_requests_running +Inf",
    ):
        with pytest.raises(ValueError):
            read_metrics(f"{line}\n")


def test_values_are_clamped_to_report_ranges() -> None:
    load = read_metrics(
        "vllm:num_requests_waiting 1e300\nvllm:num_preemptions_total 1e300\n"
        "vllm:prefix_cache_hits_total -5\n"
        f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="1{"0" * 30}"}} 1.0\n'
    )
    assert (load.waiting, load.kv_blocks) == (2**31 - 1, 2**31 - 1)
    assert (load.preemptions_total, load.prefix_hits_total) == (2**63 - 1, 0)
    assert read_metrics("sglang:max_total_num_tokens -5\n") == UpstreamLoad()


def test_blocks_without_a_size_are_no_cache() -> None:
    text = 'vllm:cache_config_info{block_size="0",num_gpu_blocks="9"} 1.0\n'
    assert read_metrics(text) == UpstreamLoad()


@pytest.mark.parametrize(
    ("given", "wanted"), [("NaN", None), ("-3", 0.0), ("33", 1.0), ("0.4", 0.4)]
)
def test_kv_usage_is_a_fraction(given: str, wanted: float | None) -> None:
    assert read_metrics(f"vllm:kv_cache_usage_perc {given}\n").kv_usage == wanted
