"""The page on gRPC says what the code does."""

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


def test_the_table_of_errors_is_what_the_client_raises() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)` \| (\d+) \|$", PAGE, re.MULTILINE)
    written = {(name, code, reason, int(status)) for name, code, reason, status in rows}
    raised = set()
    for kind in TABLE:
        error = kind("an error")
        status = status_of(error, "r1")
        code = rpc_status.to_status(status).code
        trailer = grpc.aio.Metadata(*trailer_of(status, error))
        call = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, status.message)
        found = error_of(call)
        raised.add((type(found).__name__, code.name, found.reason, error.status))
    assert written == raised
    for name, *_ in written:
        assert name in tideserve.client.__all__
        assert issubclass(getattr(tideserve.client, name), tideserve.client.TideserveError)


def test_the_examples_use_what_there_is() -> None:
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
    """The names of fields in a cell of a table, without what is in them."""
    return {name.partition(".")[0] for name in re.findall(r"`([\w.]+)`", cell)}


def table_after(text: str) -> list[list[str]]:
    """The cells of the first table after `text`."""
    _, _, rest = PAGE.partition(text)
    lines = rest[rest.index("\n| ") + 1 :].partition("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_every_field_of_http_has_a_keyword_or_stands_in_a_table() -> None:
    renamed = table_after("### Not over gRPC")
    absent = table_after("The contract has no fields for these")
    keywords = ChatFields.__optional_keys__ | CompletionFields.__optional_keys__
    told = keywords | {"model", "messages"}
    for http, _, python in renamed:
        told |= names_in(http)
        known = keywords | {name for name in vars(Client) if name.startswith("stream_")}
        assert names_in(python) <= known
    missing = set().union(*(names_in(http) for http, _ in absent))
    fields = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert missing <= fields
    assert fields - told == missing


def test_fields_of_the_contract_that_are_named_exist() -> None:
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


def test_numbers_are_those_of_the_code() -> None:
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


def test_the_methods_that_are_named_exist() -> None:
    for service, method in re.findall(r"tideserve\.gateway\.v1\.(\w+)/(\w+)", PAGE):
        found = pb.DESCRIPTOR.services_by_name[service].methods_by_name
        assert method in found
