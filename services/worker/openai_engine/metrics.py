"""Reads the load and KV cache of an upstream server from its `/metrics`. Pure.

A server with several engines (data parallelism) has a series per engine: numbers are summed, and
the KV usage is averaged.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
KV_TOKENS = ("sglang:max_total_num_tokens",)
CACHE_CONFIG = "vllm:cache_config_info"
PREEMPTIONS = ("vllm:num_preemptions_total",)
PREFIX_QUERIES = ("vllm:prefix_cache_queries_total",)
PREFIX_HITS = ("vllm:prefix_cache_hits_total",)
NULL_BLOCKS = 1
"""Blocks of each vLLM engine that hold no KV."""
COUNT_MAX, TOTAL_MAX = 2**31 - 1, 2**63 - 1
"""Larger numbers are limited to these: workers report 32-bit integers, totals in 64 bits."""
_READ = frozenset(
    (
        *(*RUNNING, *WAITING, *KV_USAGE, *KV_TOKENS, CACHE_CONFIG),
        *(*PREEMPTIONS, *PREFIX_QUERIES, *PREFIX_HITS),
    )
)


@dataclass(frozen=True, slots=True)
class UpstreamLoad:
    """Numbers of `/metrics`; None or 0 for those that the server does not export.

    `kv_blocks` blocks of `block_size` tokens are the KV cache; `kv_usage` is in [0, 1].
    """

    running: int | None = None
    waiting: int = 0
    kv_usage: float | None = None
    block_size: int = 0
    kv_blocks: int = 0
    preemptions_total: int = 0
    prefix_queries_total: int = 0
    prefix_hits_total: int = 0


def read_metrics(text: str) -> UpstreamLoad:
    """The load in a text of Prometheus' format; raises ValueError if a line is malformed."""
    try:
        return _load(text)
    except OverflowError as error:
        raise ValueError("a number is infinite") from error
    except IndexError as error:  # the parser raises it for some malformed labels
        raise ValueError("a line is malformed") from error


def _load(text: str) -> UpstreamLoad:
    samples: dict[str, list[Sample]] = {}
    for sample in _samples(text):
        samples.setdefault(sample.name, []).append(sample)
    block_size, kv_blocks = _cache(samples.get(CACHE_CONFIG, ()))
    if not kv_blocks:
        # Servers that count tokens: a block holds a single token.
        block_size, kv_blocks = 1, _count(samples, KV_TOKENS)
    running, usage = _sum(samples, RUNNING), _named(samples, KV_USAGE)
    return UpstreamLoad(
        running=None if running is None else int(running),
        waiting=_count(samples, WAITING),
        kv_usage=_mean_fraction([entry.value for entry in usage]),
        block_size=block_size if kv_blocks else 0,
        kv_blocks=kv_blocks,
        preemptions_total=_count(samples, PREEMPTIONS, TOTAL_MAX),
        prefix_queries_total=_count(samples, PREFIX_QUERIES, TOTAL_MAX),
        prefix_hits_total=_count(samples, PREFIX_HITS, TOTAL_MAX),
    )


def _mean_fraction(values: Sequence[float]) -> float | None:
    """The mean, limited to [0, 1]; None without values or if it is not a number."""
    mean = sum(values) / len(values) if values else nan
    return None if isnan(mean) else min(1.0, max(0.0, mean))


def _samples(text: str) -> Iterator[Sample]:
    # Servers export hundreds of lines: parse only those that are read.
    kept = "\n".join(line for line in text.splitlines() if _name_of(line) in _READ)
    for family in text_string_to_metric_families(kept + "\n"):
        yield from family.samples


def _name_of(line: str) -> str:
    return line.partition("{")[0].partition(" ")[0]


def _named(samples: Mapping[str, list[Sample]], names: Iterable[str]) -> list[Sample]:
    """The series of the first of `names` that the server exports."""
    return next((samples[name] for name in names if name in samples), [])


def _sum(samples: Mapping[str, list[Sample]], names: Iterable[str]) -> float | None:
    series = _named(samples, names)
    return sum(entry.value for entry in series) if series else None


def _count(samples: Mapping[str, list[Sample]], names: Iterable[str], most: int = COUNT_MAX) -> int:
    return min(most, max(0, int(_sum(samples, names) or 0)))


def _cache(series: Iterable[Sample]) -> tuple[int, int]:
    """Block size and number of blocks in all engines together."""
    sizes, blocks = 0, 0
    for sample in series:
        size, count = sample.labels.get("block_size", ""), sample.labels.get("num_gpu_blocks", "")
        if size.isdecimal() and count.isdecimal() and int(size):
            sizes, blocks = int(size), blocks + max(0, int(count) - NULL_BLOCKS)
    return min(sizes, COUNT_MAX), min(blocks, COUNT_MAX)
