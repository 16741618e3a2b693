"""Grafana's boards, from a table of panels; `gen_docs.py` writes them as JSON."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FOLDER = "deploy/observability/grafana/dashboards"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT, PER_ROW = 8, 7, 3
M = 'model_name=~"$model_name"'
EACH = "[$__rate_interval]"
SERVICE = "on (job, instance) group_left (service) tideserve_build_info"


@dataclass(frozen=True, slots=True)
class Query:
    """PromQL, and how its series are named."""

    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `unit` by Grafana's names, `stacked` adds the series up."""

    title: str
    queries: tuple[Query, ...]
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


def one(
    title: str, expression: str, legend: str = "", unit: str = "short", help: str = ""
) -> Panel:
    """A panel with one query."""
    return Panel(title, (Query(expression, legend),), unit, help)


def quantiles(title: str, metric: str, help: str = "") -> Panel:
    """The median, 95 % and 99 % of a histogram of seconds."""
    return Panel(
        title,
        tuple(
            Query(
                f"histogram_quantile({part}, sum by (le) (rate({metric}_bucket{{{M}}}{EACH})))",
                f"p{round(part * 100)}",
            )
            for part in (0.5, 0.95, 0.99)
        ),
        "s",
        help,
    )


def per_worker(expression: str) -> Query:
    """A query whose series are workers."""
    return Query(expression, "{{worker}}")


OVERVIEW = Board(
    "overview",
    "tideserve: overview",
    {
        "Requests": (
            Panel(
                "Requests that ended",
                (
                    Query(
                        f"sum by (finished_reason) (rate(vllm:request_success_total{{{M}}}{EACH}))",
                        "{{finished_reason}}",
                    ),
                ),
                "reqps",
                "stop and length finished, abort: the client went, error: failed.",
            ),
            Panel(
                "Where requests are",
                (
                    Query(f"sum(vllm:num_requests_running{{{M}}})", "running"),
                    Query(f'sum(vllm:num_requests_waiting{{{M},engine!="queue"}})', "at workers"),
                    Query(f'sum(vllm:num_requests_waiting{{{M},engine="queue"}})', "in the queue"),
                ),
                help="Requests wait in the scheduler's queue until a group has room.",
                stacked=True,
            ),
            Panel(
                "Tokens",
                (
                    Query(f"sum(rate(vllm:prompt_tokens_total{{{M}}}{EACH}))", "prompt"),
                    Query(f"sum(rate(vllm:generation_tokens_total{{{M}}}{EACH}))", "generated"),
                ),
                "tokens/s",
            ),
            quantiles("Time to first token", "vllm:time_to_first_token_seconds"),
            quantiles("Time between tokens", "vllm:inter_token_latency_seconds"),
            quantiles("Time of a request", "vllm:e2e_request_latency_seconds"),
            one(
                "HTTP answers",
                f"sum by (status) (rate(tideserve_gateway_requests_total{EACH}))",
                "{{status}}",
                "reqps",
                "499 is a client that hung up.",
            ),
            one(
                "Refused for want of room",
                f"sum by (reason) (rate(vllm:admission_rejections_total{{{M}}}{EACH}))",
                "{{reason}}",
                "reqps",
            ),
            one(
                "Tokens of an iteration",
                "histogram_quantile(0.95, sum by (le, engine) "
                f"(rate(vllm:iteration_tokens_total_bucket{{{M}}}{EACH})))",
                "{{engine}} p95",
            ),
        ),
        "Owners of keys": (
            Panel(
                "Use of their limits",
                (
                    Query(
                        "sum by (owner, limit)"
                        f" (rate(tideserve_gateway_quota_used_total{EACH})) * 60"
                        " / max by (owner, limit) (tideserve_gateway_quota_limit)",
                        "{{owner}}: {{limit}} a minute",
                    ),
                    Query(
                        "sum by (owner) (tideserve_gateway_quota_running)"
                        ' / max by (owner) (tideserve_gateway_quota_limit{limit="concurrent"})',
                        "{{owner}}: at once",
                    ),
                ),
                "percentunit",
                "At all gateways; nothing of owners without limits. Told when requests end.",
            ),
            one(
                "Refused with 429",
                f"sum by (owner, limit) (rate(tideserve_gateway_quota_refusals_total{EACH}))",
                "{{owner}}: {{limit}}",
                "reqps",
            ),
            Panel(
                "Trouble with keys",
                (
                    Query("sum(tideserve_gateway_keys_file_refused)", "file refused"),
                    Query(
                        'count(count_values("digest", tideserve_gateway_keys_digest)) - 1',
                        "versions of the keys beyond one",
                    ),
                    Query("sum(tideserve_gateway_quota_sharing == bool 0)", "quotas not shared"),
                ),
                help="Gateways that refuse the file of keys, versions of it beyond one, and"
                " gateways that cannot tell others of quotas.",
            ),
        ),
        "Services": (
            Panel(
                "Processes",
                (Query("count by (service) (tideserve_build_info)", "{{service}}"),),
                help="Those that Prometheus reaches.",
            ),
            Panel(
                "Leaders",
                (
                    Query("sum(tideserve_scheduler_leader)", "scheduler"),
                    Query("sum(tideserve_memmgr_leader)", "memory manager"),
                    Query("min(tideserve_gateway_ready)", "all gateways ready"),
                ),
                help="Each should be 1.",
            ),
            one(
                "Processor",
                f"sum by (service) (rate(process_cpu_seconds_total{EACH}) * {SERVICE})",
                "{{service}}",
                help="Cores of the servicer processes; engines are processes of their own.",
            ),
            one(
                "Memory",
                f"sum by (service) (process_resident_memory_bytes * {SERVICE})",
                "{{service}}",
                "bytes",
            ),
            Panel(
                "Calls to etcd",
                (
                    Query(
                        "histogram_quantile(0.99, sum by (le) "
                        f"(rate(tideserve_etcd_call_duration_seconds_bucket{EACH})))",
                        "p99",
                    ),
                ),
                "s",
            ),
            Panel(
                "Trouble",
                (
                    Query(
                        f"sum(rate(tideserve_etcd_call_failures_total{EACH}))", "etcd failures/s"
                    ),
                    Query("sum(tideserve_worker_engine_responsive == bool 0)", "silent engines"),
                    Query(
                        "count(tideserve_tls_certificate_expiry_seconds - time() < 14 * 86400)"
                        " or vector(0)",
                        "certificates that expire within 14 days",
                    ),
                    Query(
                        'sum(tideserve_gateway_grpc_calls{state="parked"})',
                        "gRPC calls that take nothing",
                    ),
                ),
            ),
        ),
    },
)

_USED = "(1 - tideserve_worker_kv_blocks_free / tideserve_worker_kv_blocks_total)"

MEMORY = Board(
    "memory",
    "tideserve: memory",
    {
        "Parameters ebb when the KV cache floods": (
            Panel(
                "Memory of all workers",
                (
                    Query(f"sum(tideserve_worker_parameter_bytes{{{M}}})", "parameters"),
                    Query(f"sum(tideserve_worker_kv_bytes{{{M}}} * {_USED})", "KV in use"),
                    Query(f"sum(tideserve_worker_kv_bytes{{{M}}} * (1 - {_USED}))", "KV free"),
                    Query(f"sum(tideserve_worker_staging_bytes{{{M}}})", "staging"),
                ),
                "bytes",
                "Layers that several workers hold are dropped at all but one of them.",
                stacked=True,
            ),
            Panel(
                "Parameters",
                (per_worker(f"tideserve_worker_parameter_bytes{{{M}}}"),),
                "bytes",
            ),
            Panel(
                "KV in use",
                (Query(f"vllm:kv_cache_usage_perc{{{M}}}", "{{engine}}"),),
                "percentunit",
            ),
            one(
                "KV blocks that requests can fill",
                f"sum by (model_name) (tideserve_memmgr_usable_kv_blocks{{{M}}})",
                "{{model_name}}",
            ),
            Panel(
                "KV blocks wanted and free",
                (
                    Query(f"sum(tideserve_worker_kv_blocks_wanted{{{M}}})", "wanted"),
                    Query(f"sum(tideserve_worker_kv_blocks_free{{{M}}})", "free"),
                ),
            ),
            one(
                "Preemptions",
                f"sum by (engine) (rate(vllm:num_preemptions_total{{{M}}}{EACH}))",
                "{{engine}}",
                "ops",
            ),
        ),
        "Groups": (
            Panel(
                "Groups",
                (
                    Query("sum by (phase) (tideserve_memmgr_groups)", "{{phase}}"),
                    Query("sum(tideserve_memmgr_merged_groups)", "merged"),
                ),
            ),
            one(
                "Decisions",
                "sum by (action) (increase(tideserve_memmgr_decisions_total[5m]))",
                "{{action}}",
                help="Within 5 minutes.",
            ),
            one(
                "Changes",
                "sum by (result) (increase(tideserve_memmgr_changes_total[5m]))",
                "{{result}}",
                help="Within 5 minutes; after one that failed, groups are as before.",
            ),
            one(
                "Time of a change",
                "histogram_quantile(0.95, sum by (le) "
                "(rate(tideserve_memmgr_change_duration_seconds_bucket[5m])))",
                "p95",
                "s",
            ),
            one(
                "Merges exhausted",
                f"max by (model_name) (tideserve_memmgr_relief_exhausted{{{M}}})",
                "{{model_name}}",
                help="1 while no merge can gain more: add workers.",
            ),
            one(
                "Streams that moved",
                f"sum(rate(tideserve_gateway_moved_streams_total{EACH}))",
                "moves",
                "ops",
            ),
        ),
        "Pipelines and iterations": (
            Panel(
                "Share of bubbles",
                (
                    per_worker(
                        f"rate(tideserve_worker_pipeline_bubble_seconds_total{{{M}}}{EACH})"
                        f" / (rate(tideserve_worker_pipeline_bubble_seconds_total{{{M}}}{EACH})"
                        f" + rate(tideserve_worker_pipeline_busy_seconds_total{{{M}}}{EACH}))"
                    ),
                ),
                "percentunit",
                "Idle while a microbatch is anywhere in the pipeline; nothing while there is none.",
            ),
            Panel(
                "Measured over predicted: decode",
                (
                    per_worker(
                        f"rate(tideserve_worker_decode_seconds_total{{{M}}}{EACH})"
                        f" / rate(tideserve_worker_decode_predicted_seconds_total{{{M}}}{EACH})"
                    ),
                ),
                help="1 is as the profile of the device says; nothing without a profile.",
            ),
            Panel(
                "Measured over predicted: prefill",
                (
                    per_worker(
                        f"rate(tideserve_worker_prefill_seconds_total{{{M}}}{EACH})"
                        f" / rate(tideserve_worker_prefill_predicted_seconds_total{{{M}}}{EACH})"
                    ),
                ),
                help="1 is as the profile of the device says; nothing without a profile.",
            ),
        ),
    },
)


def _good(window: str) -> str:
    finished = f'vllm:request_success_total{{{M},finished_reason=~"stop|length"}}'
    all_of_them = f'vllm:request_success_total{{{M},finished_reason!="abort"}}'
    return f"sum(rate({finished}[{window}])) / sum(rate({all_of_them}[{window}]))"


def _fast(metric: str, bound: str) -> str:
    bucket = f'{metric}_bucket{{{M},le="{bound}"}}'
    return f"sum(rate({bucket}{EACH})) / sum(rate({metric}_count{{{M}}}{EACH}))"


SLO = Board(
    "slo",
    "tideserve: service levels",
    {
        "Levels": (
            Panel(
                "Requests that were answered",
                (
                    Query(_good("$__rate_interval"), "now"),
                    Query(_good("1h"), "1 h"),
                    Query(_good("6h"), "6 h"),
                ),
                "percentunit",
                "Without those that their clients gave up.",
            ),
            Panel(
                "First token within",
                tuple(
                    Query(_fast("vllm:time_to_first_token_seconds", bound), f"{bound} s")
                    for bound in ("0.5", "1.0", "5.0")
                ),
                "percentunit",
            ),
            Panel(
                "Next token within",
                tuple(
                    Query(_fast("vllm:inter_token_latency_seconds", bound), f"{bound} s")
                    for bound in ("0.05", "0.1", "0.5")
                ),
                "percentunit",
            ),
            quantiles("Wait", "vllm:request_queue_time_seconds"),
            quantiles("Prefill", "vllm:request_prefill_time_seconds"),
            quantiles("Decode", "vllm:request_decode_time_seconds"),
        ),
        "What threatens them": (
            one(
                "Oldest wait, of the queue's deadline",
                "max(tideserve_scheduler_oldest_wait_seconds"
                " / tideserve_scheduler_queue_deadline_seconds)",
                "share",
                "percentunit",
            ),
            one(
                "Streams that break",
                "(sum(rate(tideserve_gateway_stream_errors_total"
                f'{{code!="client_gone"}}{EACH})) or vector(0))'
                f" / sum(rate(vllm:request_success_total{{{M}}}{EACH}))",
                "share",
                "percentunit",
                "After they had begun.",
            ),
            one(
                "Refused, of what arrives",
                f"sum(rate(vllm:admission_rejections_total{{{M}}}{EACH}))"
                f" / sum(rate(vllm:request_success_total{{{M}}}{EACH}))",
                "share",
                "percentunit",
            ),
            Panel(
                "Tokens of a request",
                tuple(
                    Query(
                        "histogram_quantile(0.95, sum by (le) "
                        f"(rate(vllm:request_{which}_tokens_bucket{{{M}}}{EACH})))",
                        f"{which} p95",
                    )
                    for which in ("prompt", "generation")
                ),
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
                "expr": query.expression,
                "legendFormat": query.legend or "__auto",
            }
            for index, query in enumerate(panel.queries)
        ],
    }
