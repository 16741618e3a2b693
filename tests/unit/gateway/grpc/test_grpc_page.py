"""The page on gRPC matches the code."""

import ast
import re
from pathlib import Path

import grpc.aio
from grpc_status import rpc_status

import tideserve.client
from services.gateway.api.chat import ChatRequest
from services.gateway.api.completion import CompletionRequest
from services.gateway.bounds.body_budget import BODY_BYTES_MAX
from services.gateway.grpc import call_limits
from services.gateway.grpc.call import MESSAGE_TIMEOUT_S, STREAM_IDLE_S
from services.gateway.grpc.errors import TABLE, status_of, trailer_of
from services.gateway.grpc.port import CONNECTION_AGE_S, METADATA_BYTES_MAX, STREAMS_MAX
from services.gateway.serving.running import REMEMBER_S, REMEMBERED_MAX
from tideserve.client import connection
from tideserve.client.errors import error_of
from tideserve.client.request import ChatFields, CompletionFields
from tideserve.client.sync import Client
from tideserve.gateway.v1 import gateway_pb2 as pb

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "grpc.md").read_text()


BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_error_table_matches_the_client() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| (\d+) \|$", PAGE, re.MULTILINE)
    written = {(name, code, reason, int(status)) for name, code, reason, status in rows}
    raised = set()
    for kind in TABLE:
        error = kind("an error")
        status = status_of(error, "r1")
        code = rpc_status.to_status(status).code
        trailer = grpc.aio.Metadata(*trailer_of(status, error))
        call = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, status.message)
        translated = error_of(call)
        raised.add((type(translated).__name__, code.name, translated.reason, error.status))
    assert written == raised
    for name, *_ in written:
        assert name in tideserve.client.__all__
        assert issubclass(getattr(tideserve.client, name), tideserve.client.TideserveError)


def test_the_examples_use_existing_names() -> None:
    assert len(BLOCKS) == 4
    for code in BLOCKS:
        imported = [
            name.name
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.ImportFrom)
            for name in node.names
        ]
        assert imported and set(imported) <= set(tideserve.client.__all__)
        used = set(re.findall(r"client\.(\w+)\(", code))
        assert used and all(hasattr(Client, name) for name in used)


def names_in(cell: str) -> set[str]:
    """The names of fields in a table cell, without nested ones."""
    return {name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", cell)}


def table_after(text: str) -> list[list[str]]:
    """The cells of the first table after `text`."""
    _, _, rest = PAGE.partition(text)
    lines = rest[rest.index("\n| ") + 1 :].partition("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_every_http_field_has_a_keyword_or_a_table_row() -> None:
    renamed = table_after("### Not over gRPC")
    absent = table_after("The contract has no fields for these")
    keywords = ChatFields.__optional_keys__ | CompletionFields.__optional_keys__
    documented = keywords | {"model", "messages"}
    for http, _, python in renamed:
        documented |= names_in(http)
        known = keywords | {name for name in vars(Client) if name.startswith("stream_")}
        assert names_in(python) <= known
    missing = set().union(*(names_in(http) for http, _ in absent))
    fields = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert missing <= fields
    assert fields - documented == missing


def test_named_contract_fields_exist() -> None:
    parts = {
        "sampling": pb.Sampling,
        "structure": pb.Structure,
        "options": pb.Options,
        "reasoning": pb.Reasoning,
    }
    named = [re.findall(r"`(\w+)\.(\w+)`", grpc) for _, grpc, _ in table_after("### Not over gRPC")]
    pairs = [pair for row in named for pair in row]
    assert len(pairs) > 8
    for part, name in pairs:
        assert name in parts[part].DESCRIPTOR.fields_by_name


def test_numbers_match_the_code() -> None:
    assert f"({connection.TIMEOUT_S:g} s unless" in PAGE
    assert f"| {BODY_BYTES_MAX >> 20} MiB; {METADATA_BYTES_MAX >> 10} KiB |" in PAGE
    assert f"| {STREAMS_MAX:,}; more wait" in PAGE
    assert f"| {MESSAGE_TIMEOUT_S:g} s |" in PAGE and f"idle for {STREAM_IDLE_S:g} s |" in PAGE
    assert f"| {call_limits.WAITING_MAX:,}, of which {call_limits.READING_MAX} are read" in PAGE
    assert (
        f"| {call_limits.STREAMS_MAX}, with" in PAGE
        and f"| {call_limits.PARKED_MAX}; each 256" in PAGE
    )
    assert f"| {call_limits.ALL_MAX:,}; then" in PAGE
    assert f"| {CONNECTION_AGE_S // 60} minutes; open calls" in PAGE
    assert f"for {REMEMBER_S / 60:g} minutes" in PAGE and f"last {REMEMBERED_MAX:,}" in PAGE


def test_named_methods_exist() -> None:
    for service, method in re.findall(r"tideserve\.gateway\.v1\.(\w+)/(\w+)", PAGE):
        methods = pb.DESCRIPTOR.services_by_name[service].methods_by_name
        assert method in methods
