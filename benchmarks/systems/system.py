"""The interface of a measured system."""

import json
import os
import re
import urllib.error
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Literal, Protocol

from services.common.safetensors_header import DAMAGED, read_header
from tideserve.cli.errors import SystemUnavailable
from tideserve.cli.local_cluster import fetch

AMPLE = "ample"
"""Suffix of a system with memory for the whole demand."""
_CLASS = re.compile(r'[{,]class="(\w+)"')
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?\s+(\S+)", re.MULTILINE)
OUTPUT_METRIC = "vllm:generation_tokens_total"
RUNNING_MAX = 128
CPU = "cpu"
DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Deployment:
    """The same model, device, cores and memory for every system. Sizes in bytes.

    `memory_bytes` is the memory per worker for parameters, KV cache and staging. `kv_bytes` is its
    KV cache, once a tideserve worker has reported it. `ample_memory_bytes` holds the whole demand
    of a scenario. With `event_log`, our processes of that option section write event logs.
    `options` are overriding options of `tideserve up`.
    """

    model_dir: Path
    model_name: str
    cache: Path
    workers: int
    memory_bytes: int
    dtype: str = "bfloat16"
    device: str = CPU
    max_running: int = RUNNING_MAX
    ample_memory_bytes: int = 2 << 30
    paced: str | None = None
    kv_bytes: int | None = None
    event_log: Literal["", "worker", "services"] = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    cores: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(os.sched_getaffinity(0))))

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of a token in all layers. Raises SystemUnavailable without a usable config."""
        try:
            config = json.loads((self.model_dir / "config.json").read_text(encoding="utf-8"))
            heads = config["num_attention_heads"]
            head_dim = config.get("head_dim") or config["hidden_size"] // heads
            kv_heads = config.get("num_key_value_heads") or heads
            layers = config["num_hidden_layers"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemUnavailable(
                f"{self.model_dir}/config.json does not determine the size of the KV cache"
            ) from error
        return int(2 * layers * kv_heads * head_dim * DTYPE_BYTES[self.dtype])

    @property
    def parameter_bytes(self) -> int:
        """Size of the weights in the serving dtype; 0 without weights."""
        count = sum(map(_parameters_in, self.model_dir.glob("*.safetensors")))
        return count * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters over all servers of a system at a point in time; None is unknown.

    `capacity_tokens` is the initial KV capacity, `capacity_now_tokens` includes merges. `busy_s`
    and `bubble_s` are totals over the stages of pipelines, the next four fields the measured and
    predicted totals of iteration times. The last five are the fields of a `TokenSample`.
    """

    preemptions: int | None = None
    capacity_tokens: int | None = None
    capacity_now_tokens: int | None = None
    busy_s: float | None = None
    bubble_s: float | None = None
    prefill_s: float | None = None
    prefill_predicted_s: float | None = None
    decode_s: float | None = None
    decode_predicted_s: float | None = None
    processed: float | None = None
    output: float | None = None
    recomputed: float | None = None
    batch_processed: float | None = None
    batch_recomputed: float | None = None


class System(Protocol):
    """A system under measurement. `stop` may be called at any time and more than once."""

    name: str
    urls: Sequence[str]
    model: str
    api_key: str | None

    def start(self, say: Say) -> None:
        """Start and return once it serves. Raises SystemUnavailable."""

    def stop(self) -> None:
        """Stop everything that `start` started."""

    def rest(self) -> bool:
        """Suspend until `wake`, so that it uses no CPU; returns False if that is impossible."""

    def wake(self) -> None:
        """Resume serving after `rest`."""

    def counters(self) -> Counters:
        """The current counters of its servers; None where a server does not answer."""

    def describe(self) -> Mapping[str, Any]:
        """Description for the report."""


def _parameters_in(path: Path) -> int:
    """Number of parameters in a safetensors file, by its header. Raises SystemUnavailable."""
    try:
        return sum(prod(tensor["shape"]) for tensor in read_header(path).tensors.values())
    except DAMAGED as error:
        raise SystemUnavailable(f"{path} is not a safetensors file") from error


def read_metrics(url: str, api_key: str | None = None) -> dict[str, float]:
    """Prometheus metrics of a server, summed over labels; empty if there are none."""
    try:
        text = fetch(f"{url}/metrics", api_key).decode("utf-8", "replace")
    except (OSError, ValueError):
        return {}
    return parse_metrics(text)


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of a Prometheus text by name, summed over labels.

    Samples with a label `class` are also under `name{class}`, such as `tokens_total{batch}`.
    """
    samples: dict[str, float] = {}
    for name, labels, text_value in _SAMPLE.findall(text):
        try:
            value = float(text_value)
        except ValueError:
            continue
        samples[name] = samples.get(name, 0.0) + value
        if (label := _CLASS.search(labels)) is not None:
            of_class = f"{name}{{{label[1]}}}"
            samples[of_class] = samples.get(of_class, 0.0) + value
    return samples


def served_model(url: str, api_key: str | None) -> str:
    """The first model that a server lists. Raises SystemUnavailable."""
    try:
        return str(json.loads(fetch(f"{url}/v1/models", api_key))["data"][0]["id"])
    except urllib.error.HTTPError as error:
        raise SystemUnavailable(f"{url}/v1/models answers with HTTP {error.code}") from error
    except OSError as error:
        reason = getattr(error, "reason", error)
        raise SystemUnavailable(f"no server answers at {url}: {reason}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise SystemUnavailable(f"{url}/v1/models lists no model") from error
