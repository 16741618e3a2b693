"""Write the pages that are made from the code, or check that they are up to date.

docs/configuration.md    every option of every service and of `tideserve up`
docs/metrics.md          every metric of every service
docs/fields.md           every field of a chat and a completion request
docs/grpc.md             its table of errors; the rest is written by hand
docs/states.md           a diagram of every machine of core that has a table
deploy/observability/grafana/dashboards/*.json    the boards in boards.py
"""

import argparse
import dataclasses
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from boards import BOARDS, FOLDER, board_json  # noqa: E402
from fields_reference import ENDPOINTS, fields_of  # noqa: E402
from metrics_reference import reference  # noqa: E402
from state_diagrams import page as states  # noqa: E402

from services.common.reference import Row, default_text, rows, values_text  # noqa: E402
from services.common.service_config import ServiceConfig  # noqa: E402
from services.gateway.api.parameters import NAMES_TOLD  # noqa: E402
from services.gateway.grpc import errors as grpc_errors  # noqa: E402
from services.gateway.serving.output import LOGPROB_MIN  # noqa: E402
from services.gateway.serving.service_policy import (  # noqa: E402
    OBJECTIVE_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
)
from tideserve.cli.cluster_options import CONFIGS, SECTIONS, ClusterOptions  # noqa: E402
from tideserve.client.errors import kind_of  # noqa: E402

SERVICES = {
    "gateway": "Gateway",
    "scheduler": "Scheduler",
    "memmgr": "Memory manager",
    "worker": "Worker",
}
INTRODUCTION = """\
# Configuration

This page is made from the code by `make gen`; `make check` compares the two.

## Where a value comes from

A service (`tideserve-gateway`, `tideserve-scheduler`, `tideserve-memmgr`, `tideserve-worker`, or
`python -m services.<service>`) takes each key from the first of these places that has it:

1. the environment, as `TIDESERVE__<KEY>` with two underscores. One would not do: beside a Service
   of the name `tideserve` Kubernetes sets `TIDESERVE_PORT=tcp://…` in every pod.
2. the YAML file given with `--config`, if any.
3. the default.

A key that nobody knows, in the file or behind `TIDESERVE__`, is an error, and so is a value out of
range. The error names the key and the place, and the service ends with exit code 2.

* Sizes in bytes may have a unit in both places: `TIDESERVE__MEMORY_BYTES=4GiB`.
* In the environment, truths are `true` and `false` (also yes, no, on, off, 1, 0), lists have
  commas, and an empty text means none where none is allowed.
* A **secret** is masked where the configuration is printed, and left out of errors about it. It
  may also be given as a file: `api_key_file` in the YAML file or `TIDESERVE__API_KEY_FILE` in the
  environment names a file that holds the key; one line end after it is left out. Both forms in one
  place are an error, and so is an empty secret.

`--print-config` prints the configuration that a service would start with and where each value
comes from, secrets masked, and starts nothing. `--help` lists the keys.

`tideserve up` starts all services on one machine and writes the files of its services itself. Its
own options are [below](#tideserve-up). It does not read `TIDESERVE__<KEY>`, and says so when it
finds some.
"""
UP = """\
## tideserve up

Each option is a flag and a key of the file given with `--config`; flags win. More keys of a
service go into the section of its name in that file (`gateway`, `scheduler`, `memmgr`, `worker`),
except those that follow from the cluster itself; keys for all of them go into `services`.
The API key may also be in the environment as `TIDESERVE_API_KEY`.

Models, profiles, etcd and the folders of clusters are in the *cache folder*: `TIDESERVE_CACHE` if
that is set, else `tideserve` in `XDG_CACHE_HOME`, else `~/.cache/tideserve`. A gated or private
model of the hub needs your token in the environment as `HF_TOKEN`.
"""


METRICS = """\
# Metrics

This page is made from the code by `make gen`; `make check` compares the two.

Every process serves its own metrics at `http://host:port/metrics`, where `port` is its
`metrics_port` (9090 in containers and in Kubernetes). No process tells what another one does, so a
sum over all processes is right, however many gateways, schedulers and memory managers there are.
What is of the whole cluster, such as the queue, comes from the instance that leads; a standby
leaves it out.

* A gateway's metrics are at its HTTP port as well, behind the API key if there is one, unless
  `public_metrics` is false.
* `tideserve up` gives each process a free port and writes them to `prometheus_targets.json` in the
  folder of the cluster: Prometheus reads it with `file_sd_configs`. `tideserve status` shows the
  workers' memory and groups without any of this.
* `deploy/observability/` has Prometheus' configuration, alert rules and Grafana boards.

Names that begin with `vllm:` are those of vLLM, with its labels and buckets, so that dashboards and
autoscalers that read them work. What is different here:

* `engine` is a worker's id. `vllm:num_requests_waiting{engine="queue"}` is the scheduler's queue,
  where requests wait for room; the sum over all engines is what an autoscaler wants.
* Histograms of requests, `vllm:request_success_total` and `vllm:admission_rejections_total` come
  from the gateways, which alone see a request from its beginning to its end while it moves between
  workers. They have no label `engine`. Each choice counts as a request.
* A request that ends at a stop string has no prefill and decode times: its worker is told to end it
  before it has said them.
* There is no prefix cache and no LoRA, so there are no metrics of them.
"""

FIELDS = f"""\
# From `vllm serve`, field by field

This page is made from the code by `make gen`; `make check` compares the two. `/openapi.json` of a
running gateway says the same as a schema.

These are the fields of chats and completions. Responses and Messages take many of the chat's:
[api.md](api.md) names them; `/openapi.json` has every route. Clients that were written for OpenAI's
API or for `vllm serve` work without changes unless they use a refused field. What becomes of each
field that they send:

* **works**: as there, within the range that is told. A value outside is a 400 that names the field.
* **carried**: checked and passed on to scheduler and workers; it changes nothing yet. A `warning`
  header says so where `slo`, `slo_class`, `priority` or `service_tier`, or one of the headers
  below, asks for more or less than the standard class.
* **ignored**: any value, because nothing here depends on it.
* **refused**: a 400 with the code `unsupported_parameter`, unless the value asks for nothing.

A field that is `null` is as if it were left out. Fields that nobody knows are ignored, and a
`warning` header names up to {NAMES_TOLD} of them, each with the known field that its name is close
to; with `unknown_fields: refuse` they are a 400 with the code `unknown_parameter`. So is the limit
of another API where the request has none of this one, such as `max_output_tokens` in a chat. A text
part of a message may have further keys, such as `cache_control`.

What to know besides:

* `usage` counts each prompt once, however many choices it has.
  `usage.prompt_tokens_details.cached_tokens` is 0: there is no cache of prompts yet.
* Log probabilities are those of the raw logits, before penalties, bias and temperature, as vLLM's
  by default; minus infinity is told as {LOGPROB_MIN:g}. There is one for each token that `usage`
  counts, also for the one that ended the output, which has no text.
* Special tokens are left out of the text unless `skip_special_tokens` is false; `stop_reason` is
  the stop string or the token id of the request that ended the output, else `null`.
* Defaults that clients leave out come from the model's generation_config.json
  (`generation_config: none` switches that off), as vLLM has it.
* The headers `{TTFT_HEADER}`, `{TPOT_HEADER}` and `{OBJECTIVE_HEADER}` say the same as
  `slo` and `slo_class`.
* `model_aliases` are further names of the model, as several `--served-model-name`.
* `/tokenize`, `/detokenize`, `/version` and `/v1/models` are as vLLM's.
"""


def configuration() -> str:
    """The page of all options."""
    shared = {row.key for row in rows(ServiceConfig)}
    parts = [INTRODUCTION, "## All services\n", _key_table(rows(ServiceConfig))]
    for name, title in SERVICES.items():
        own = [row for row in rows(CONFIGS[name]) if row.key not in shared]
        parts += [f"## {title}\n", _key_table(own)]
    parts += [UP, _up_table()]
    return "\n".join(parts)


def metrics() -> str:
    """The page of all metrics."""
    parts = [METRICS]
    for name, entries in reference().items():
        parts.append(f"## {SERVICES.get(name, 'All services')}\n")
        lines = [
            (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.help)
            for one in entries
        ]
        parts.append(table(("metric", "type", "labels", "what it is"), lines))
    return "\n".join(parts)


def fields() -> str:
    """The page of all fields of requests."""
    parts = [FIELDS]
    for endpoint in ENDPOINTS:
        rows = [(f"`{row.name}`", row.effect, row.values, row.note) for row in fields_of(endpoint)]
        parts.append(f"## {endpoint}\n")
        parts.append(table(("field", "effect", "values", "what to know"), rows))
    return "\n".join(parts)


ERRORS_BEGIN = "<!-- from here on made by `make gen` -->\n"
ERRORS_END = "<!-- up to here -->\n"


def grpc() -> str:
    """The page on gRPC, with its table of errors made anew."""
    text = (ROOT / "docs" / "grpc.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(ERRORS_BEGIN)
    _, _, after = rest.partition(ERRORS_END)
    lines = {
        (kind_of(code, reason).__name__, f"`{code.name}`", f"`{reason}`", str(one.status))
        for one, code in grpc_errors.TABLE.items()
        for reason in (grpc_errors.reason_of(one("an error")),)
    }
    rows = [(f"`{name}`", *others) for name, *others in sorted(lines)]
    made = table(("Python", "gRPC", "reason", "HTTP"), rows)
    return f"{before}{ERRORS_BEGIN}{made}{ERRORS_END}{after}"


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/configuration.md": configuration,
    "docs/metrics.md": metrics,
    "docs/fields.md": fields,
    "docs/grpc.md": grpc,
    "docs/states.md": states,
    **{f"{FOLDER}/{board.name}.json": partial(board_json, board) for board in BOARDS},
}


def _key_table(keys: Sequence[Row]) -> str:
    return table(
        ("key", "environment", "values", "default", "what it is"),
        [
            (
                f"`{row.key}`",
                f"`{row.variable}`",
                row.values,
                row.default,
                f"**Secret.** {row.help}" if row.secret else row.help,
            )
            for row in keys
        ],
    )


def _up_table() -> str:
    hints = typing.get_type_hints(ClusterOptions)
    fields = [one for one in dataclasses.fields(ClusterOptions) if one.name not in SECTIONS]
    return table(
        ("flag", "key", "values", "default", "what it is", "passed on as"),
        [
            (
                f"`--{one.name.replace('_', '-')}`",
                f"`{one.name}`",
                values_text(hints[one.name], one.metadata),
                default_text(one),
                one.metadata["help"],
                _passed_on(one),
            )
            for one in fields
        ],
    )


def _passed_on(one: dataclasses.Field[Any]) -> str:
    cls, key = one.metadata.get("passed_to", (None, ""))
    services = [name for name, config in CONFIGS.items() if cls and issubclass(config, cls)]
    who = "all" if len(services) == len(CONFIGS) else ", ".join(services)
    return f"`{key}` ({who})" if services else ""


def table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    marks = ["---"] * len(columns)
    cells = [columns, marks, *([cell.replace("|", r"\|") for cell in line] for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def outdated(root: Path) -> list[str]:
    """Pages below `root` that are missing or not what the code gives."""
    return [
        name
        for name, make in PAGES.items()
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != make()
    ]


def write(root: Path) -> None:
    """Write all pages below `root`."""
    for name, make in PAGES.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(make(), encoding="utf-8")


def main() -> int:
    """Write the pages, or with `--check` compare them; 1 when they differ."""
    parser = argparse.ArgumentParser(description="Make the pages of docs/ that follow from code.")
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    check_only = parser.parse_args().check
    found = outdated(ROOT)
    if not check_only:
        write(ROOT)
        print(f"{len(found)} of {len(PAGES)} pages changed")
        return 0
    for name in found:
        print(f"{name} is not what the code gives: run `make gen` and commit it.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
