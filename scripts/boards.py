"""Grafana's boards, from a table of panels; `gen_docs.py` writes them as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FOLDER = "deploy/observability/grafana/dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, PER_ROW = 8, 7, 3
MODEL = 'model_name=~"$model_name"'
M = f"{{{MODEL}}}"
EACH = "[$__rate_interval]"
SERVICE = "on (job, instance) group_left (service) tideserve_build_info"
WORKER = "{{worker}}"


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: PromQL by the names of its series; `unit` by Grafana's names.

    `stacked` adds the series up.
    """

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    help: str = ""
    stacked: bool = False


@dataclass(frozen=True, slots=True)
class Board:
    """A page of panels under row titles."""

    name: str
    title: str
    rows: Mapping[str, tuple[Panel, ...]]

    @property
    def panels(self) -> list[Panel]:
        """All of them, in order."""
        return [panel for panels in self.rows.values() for panel in panels]


def rate(counter: str, by: str = "", window: str = EACH) -> str:
    """The sum of a counter's rates, by labels if some are given."""
    return f"sum{f' by ({by}) ' if by else ''}(rate({counter}{window}))"


def percentile(part: float, histogram: str, by: str = "le", window: str = EACH) -> str:
    """A share of a histogram, such as 0.95, of the model or of all; by labels beside its bounds."""
    labels = M if histogram.startswith("vllm:") else ""
    return f"histogram_quantile({part}, {rate(f'{histogram}_bucket{labels}', by, window)})"


ONLINE = 'class!="batch"'
SHARES = (0.5, 0.95, 0.99)


def quantiles_by_class(title: str, metric: str) -> Panel:
    """The same for each class of requests: one sum would hide what people notice."""
    queries = {
        f"{{{{class}}}} p{round(one * 100)}": percentile(one, metric, "le, class") for one in SHARES
    }
    return Panel(title, queries, "s")


def quantiles(title: str, metric: str) -> Panel:
    """The median, 95 % and 99 % of a histogram of seconds."""
    return Panel(title, {f"p{round(one * 100)}": percentile(one, metric) for one in SHARES}, "s")


OVERVIEW = Board(
    "overview",
    "tideserve: overview",
    {
        "Requests": (
            Panel(
                "Requests that ended",
                {"{{finished_reason}}": rate(f"vllm:request_success_total{M}", "finished_reason")},
                "reqps",
                "stop and length finished, abort: the client went, error: failed.",
            ),
            Panel(
                "Where requests are",
                {
                    "running": f"sum(vllm:num_requests_running{M})",
                    "at workers": f'sum(vllm:num_requests_waiting{{{MODEL},engine!="queue"}})',
                    "in the queue": f'sum(vllm:num_requests_waiting{{{MODEL},engine="queue"}})',
                },
                help="Requests wait in the scheduler's queue until a group has room.",
                stacked=True,
            ),
            Panel(
                "Tokens",
                {
                    "prompt": rate(f"vllm:prompt_tokens_total{M}"),
                    "generated": rate(f"vllm:generation_tokens_total{M}"),
                },
                "tokens/s",
            ),
            quantiles_by_class("Time to first token", "vllm:time_to_first_token_seconds"),
            quantiles_by_class("Time between tokens", "vllm:inter_token_latency_seconds"),
            quantiles("Time of a request", "vllm:e2e_request_latency_seconds"),
            Panel(
                "HTTP answers",
                {"{{status}}": rate("tideserve_gateway_requests_total", "status")},
                "reqps",
                "499 is a client that hung up.",
            ),
            Panel(
                "Refused for want of room",
                {
                    "{{class}}: {{reason}}": rate(
                        f"vllm:admission_rejections_total{M}", "class, reason"
                    )
                },
                "reqps",
                "Refused batch requests are normal; of class unknown before their body was read.",
            ),
            Panel(
                "Tokens of an iteration",
                {"{{engine}} p95": percentile(0.95, "vllm:iteration_tokens_total", "le, engine")},
            ),
        ),
        "Owners of keys": (
            Panel(
                "Use of their limits",
                {
                    "{{owner}}: {{limit}} a minute": (
                        rate("tideserve_gateway_quota_used_total", "owner, limit")
                        + " * 60 / max by (owner, limit) (tideserve_gateway_quota_limit)"
                    ),
                    "{{owner}}: at once": (
                        "sum by (owner) (tideserve_gateway_quota_running)"
                        ' / max by (owner) (tideserve_gateway_quota_limit{limit="concurrent"})'
                    ),
                },
                "percentunit",
                "At all gateways; nothing of owners without limits. Told when requests end.",
            ),
            Panel(
                "Refused with 429",
                {
                    "{{owner}}: {{limit}}": rate(
                        "tideserve_gateway_quota_refusals_total", "owner, limit"
                    )
                },
                "reqps",
            ),
            Panel(
                "Trouble with keys",
                {
                    "file refused": "sum(tideserve_gateway_keys_file_refused)",
                    "versions of the keys beyond one": (
                        'count(count_values("digest", tideserve_gateway_keys_digest)) - 1'
                    ),
                    "quotas not shared": "sum(tideserve_gateway_quota_sharing == bool 0)",
                },
                help="Gateways that refuse the file of keys, versions of it beyond one, and"
                " gateways that cannot tell others of quotas.",
            ),
        ),
        "Services": (
            Panel(
                "Processes",
                {"{{service}}": "count by (service) (tideserve_build_info)"},
                help="Those that Prometheus reaches.",
            ),
            Panel(
                "Leaders",
                {
                    "scheduler": "sum(tideserve_scheduler_leader)",
                    "memory manager": "sum(tideserve_memmgr_leader)",
                    "all gateways ready": "min(tideserve_gateway_ready)",
                },
                help="Each should be 1.",
            ),
            Panel(
                "Processor",
                {
                    "{{service}}": "sum by (service)"
                    f" (rate(process_cpu_seconds_total{EACH}) * {SERVICE})"
                },
                help="Cores of the servicer processes; engines are processes of their own.",
            ),
            Panel(
                "Memory",
                {"{{service}}": f"sum by (service) (process_resident_memory_bytes * {SERVICE})"},
                "bytes",
            ),
            Panel(
                "Calls to etcd",
                {"p99": percentile(0.99, "tideserve_etcd_call_duration_seconds")},
                "s",
            ),
            Panel(
                "Trouble",
                {
                    "etcd failures/s": rate("tideserve_etcd_call_failures_total"),
                    "silent engines": "sum(tideserve_worker_engine_responsive == bool 0)",
                    "certificates that expire within 14 days": (
                        "count(tideserve_tls_certificate_expiry_seconds - time() < 14 * 86400)"
                        " or vector(0)"
                    ),
                    "gRPC calls that take nothing": (
                        'sum(tideserve_gateway_grpc_calls{state="parked"})'
                    ),
                },
            ),
        ),
    },
)


def _measured(phase: str) -> Panel:
    """Times of a phase of iterations beside what the cost model predicts."""
    took, predicted = (
        f"rate(tideserve_worker_{phase}_{kind}seconds_total{M}{EACH})"
        for kind in ("", "predicted_")
    )
    help = "1 is as the profile of the device says; nothing without a profile."
    return Panel(f"Measured over predicted: {phase}", {WORKER: f"{took} / {predicted}"}, help=help)


_USED = "(1 - tideserve_worker_kv_blocks_free / tideserve_worker_kv_blocks_total)"
_BUBBLE, _BUSY = (
    f"rate(tideserve_worker_pipeline_{kind}_seconds_total{M}{EACH})" for kind in ("bubble", "busy")
)

MEMORY = Board(
    "memory",
    "tideserve: memory",
    {
        "Parameters ebb when the KV cache floods": (
            Panel(
                "Memory of all workers",
                {
                    "parameters": f"sum(tideserve_worker_parameter_bytes{M})",
                    "KV in use": f"sum(tideserve_worker_kv_bytes{M} * {_USED})",
                    "KV free": f"sum(tideserve_worker_kv_bytes{M} * (1 - {_USED}))",
                    "staging": f"sum(tideserve_worker_staging_bytes{M})",
                },
                "bytes",
                "Layers that several workers hold are dropped at all but one of them.",
                stacked=True,
            ),
            Panel("Parameters", {WORKER: f"tideserve_worker_parameter_bytes{M}"}, "bytes"),
            Panel("KV in use", {"{{engine}}": f"vllm:kv_cache_usage_perc{M}"}, "percentunit"),
            Panel(
                "KV blocks that requests can fill",
                {"{{model_name}}": f"sum by (model_name) (tideserve_memmgr_usable_kv_blocks{M})"},
            ),
            Panel(
                "KV blocks wanted and free",
                {
                    "wanted": f"sum(tideserve_worker_kv_blocks_wanted{M})",
                    "free": f"sum(tideserve_worker_kv_blocks_free{M})",
                },
            ),
            Panel(
                "Preemptions",
                {"{{engine}}": rate(f"vllm:num_preemptions_total{M}", "engine")},
                "ops",
            ),
        ),
        "Groups": (
            Panel(
                "Groups",
                {
                    "{{phase}}": "sum by (phase) (tideserve_memmgr_groups)",
                    "merged": "sum(tideserve_memmgr_merged_groups)",
                },
            ),
            Panel(
                "Decisions",
                {"{{action}}": "sum by (action) (increase(tideserve_memmgr_decisions_total[5m]))"},
                help="Within 5 minutes.",
            ),
            Panel(
                "Changes",
                {"{{result}}": "sum by (result) (increase(tideserve_memmgr_changes_total[5m]))"},
                help="Within 5 minutes; after one that failed, groups are as before.",
            ),
            Panel(
                "Time of a change",
                {
                    "p95": percentile(
                        0.95, "tideserve_memmgr_change_duration_seconds", window="[5m]"
                    )
                },
                "s",
            ),
            Panel(
                "Merges exhausted",
                {"{{model_name}}": f"max by (model_name) (tideserve_memmgr_relief_exhausted{M})"},
                help="1 while no merge can gain more: add workers.",
            ),
            Panel(
                "Streams that moved",
                {"moves": rate("tideserve_gateway_moved_streams_total")},
                "ops",
            ),
        ),
        "Pipelines and iterations": (
            Panel(
                "Share of bubbles",
                {WORKER: f"{_BUBBLE} / ({_BUBBLE} + {_BUSY})"},
                "percentunit",
                "Idle while a microbatch is anywhere in the pipeline; nothing while there is none.",
            ),
            _measured("decode"),
            _measured("prefill"),
        ),
    },
)


def _good(window: str) -> str:
    finished, all_of_them = (
        rate(f"vllm:request_success_total{{{MODEL},finished_reason{which}}}", window=window)
        for which in ('=~"stop|length"', '!="abort"')
    )
    return f"{finished} / {all_of_them}"


def _within(title: str, metric: str, bounds: Sequence[str]) -> Panel:
    """The share of a histogram that is below each of some bounds, in seconds; not of batch."""
    shares = {
        f"{{{{class}}}}: {bound} s": rate(
            f'{metric}_bucket{{{MODEL},{ONLINE},le="{bound}"}}', "class"
        )
        + f" / {rate(f'{metric}_count{{{MODEL},{ONLINE}}}', 'class')}"
        for bound in bounds
    }
    return Panel(title, shares, "percentunit")


def _kept() -> Panel:
    """The share of targets that were kept."""
    kept, missed = (
        rate(f"tideserve_gateway_slo_{which}_total", "class, metric")
        for which in ("attained", "missed")
    )
    return Panel(
        "Targets that were kept",
        {"{{class}}: {{metric}}": f"{kept} / ({kept} + {missed})"},
        "percentunit",
        "ttft counts once a choice, tpot once a group of tokens, as they were promised.",
    )


_ENDED = rate(f"vllm:request_success_total{M}")

SLO = Board(
    "slo",
    "tideserve: service levels",
    {
        "Levels": (
            Panel(
                "Requests that were answered",
                {"now": _good(EACH), "1 h": _good("[1h]"), "6 h": _good("[6h]")},
                "percentunit",
                "Requests whose client hung up are not counted.",
            ),
            _within(
                "First token within", "vllm:time_to_first_token_seconds", ("0.5", "1.0", "5.0")
            ),
            _within(
                "Next token within", "vllm:inter_token_latency_seconds", ("0.05", "0.1", "0.5")
            ),
            _kept(),
            quantiles("Wait", "vllm:request_queue_time_seconds"),
            quantiles("Prefill", "vllm:request_prefill_time_seconds"),
            quantiles("Decode", "vllm:request_decode_time_seconds"),
        ),
        "What threatens them": (
            Panel(
                "Oldest wait, of the queue's deadline",
                {
                    "share": "max(max without (class)"
                    f" (tideserve_scheduler_class_oldest_wait_seconds{{{ONLINE}}})"
                    " / tideserve_scheduler_queue_deadline_seconds)"
                },
                "percentunit",
                "Not of batch requests, which have a deadline of their own.",
            ),
            Panel(
                "Streams that break",
                {
                    "share": "("
                    + rate('tideserve_gateway_stream_errors_total{code!="client_gone"}')
                    + f" or vector(0)) / {_ENDED}"
                },
                "percentunit",
                "After they had begun.",
            ),
            Panel(
                "Refused, of what arrives",
                {
                    "share": rate(f"vllm:admission_rejections_total{{{MODEL},{ONLINE}}}")
                    + f" / {_ENDED}"
                },
                "percentunit",
                "Not of batch requests, of which refusals are normal.",
            ),
            Panel(
                "Tokens of a request",
                {
                    f"{which} p95": percentile(0.95, f"vllm:request_{which}_tokens")
                    for which in ("prompt", "generation")
                },
                help="Larger requests take longer.",
            ),
        ),
    },
)

BOARDS = (OVERVIEW, MEMORY, SLO)


def board_json(board: Board) -> str:
    """The board as Grafana imports it."""
    return json.dumps(_dashboard(board), indent=1, ensure_ascii=False) + "\n"


def _dashboard(board: Board) -> dict[str, Any]:
    return {
        "uid": f"tideserve-{board.name}",
        "title": board.title,
        "tags": ["tideserve"],
        "editable": True,
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_placed(board.rows)),
    }


def _variables() -> Sequence[dict[str, Any]]:
    return (
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
        },
        {
            "name": "model_name",
            "label": "Model",
            "type": "query",
            "datasource": SOURCE,
            "query": "label_values(vllm:kv_cache_usage_perc, model_name)",
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        },
    )


def _placed(rows: Mapping[str, Sequence[Panel]]) -> Iterator[dict[str, Any]]:
    top = number = 0
    for title, panels in rows.items():
        number += 1
        place = {"x": 0, "y": top, "w": WIDTH * PER_ROW, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        top += 1
        for index, panel in enumerate(panels):
            number += 1
            line, column = divmod(index, PER_ROW)
            yield {"id": number, **_panel(panel)} | {
                "gridPos": {
                    "x": column * WIDTH,
                    "y": top + line * HEIGHT,
                    "w": WIDTH,
                    "h": HEIGHT,
                }
            }
        top += -(-len(panels) // PER_ROW) * HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none"}
    custom = {"stacking": stacking, "fillOpacity": 40 if panel.stacked else 8, "lineWidth": 1}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": SOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }
