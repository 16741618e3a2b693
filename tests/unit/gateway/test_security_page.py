"""The page on security lists the bounds of a request."""

from pathlib import Path

from services.common.open_files import OPEN_FILES_WANTED
from services.core.request import PROMPT_LOGPROBS_MAX
from services.gateway.admin.port import CONNECTIONS
from services.gateway.api.conversation import MESSAGES_MAX
from services.gateway.api.generation import CHOICE_IDS_MAX, CHOICES_MAX, OUTPUT_TOKENS_MAX
from services.gateway.api.tokens import TEXT_TOKENS_MAX
from services.gateway.bounds.body_budget import BODY_BYTES_MAX, SMALL_BYTES
from services.gateway.bounds.connections import (
    FIRST_REQUEST_S,
    OWN_MIN,
    OWN_PART,
    RESTRICTED_MAX,
    RESTRICTED_PART,
)
from services.gateway.bounds.listener import HANDSHAKE_TIMEOUT_S
from services.gateway.cluster import outbox
from services.gateway.grpc.frame_budget import READ_STEPS, STEPS_PER_S
from services.gateway.grpc.header_blocks import BLOCK_BYTES_MAX, BLOCK_STEPS, FRAME_STEPS
from services.gateway.grpc.relay import (
    BLOCK_TIMEOUT_S,
    DESCRIPTORS,
    PREFACE_TIMEOUT_S,
    READ_BYTES,
)
from services.gateway.http.protocol import (
    HEADER_TIMEOUT_S,
    INCOMPLETE_BYTES_MAX,
    PIPELINED_BYTES_MAX,
    PIPELINED_MAX,
)
from services.gateway.http.request_middleware import HEADER_BYTES_MAX, HEADERS_MAX
from services.gateway.model import render_process, trial
from services.gateway.model.renderer import RENDER_TIMEOUT_S
from services.gateway.serving.canceller import FORWARDS_MAX
from services.gateway.serving.output import OUTPUT_LOGPROBS_MAX

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "security.md").read_text()


def rows_of(title: str) -> dict[str, str]:
    """The limits in the table below a title, by the start of their names."""
    return {
        line.split(" | ")[0].removeprefix("| ").split(",")[0].split(":")[0]: line.split(" | ")[1]
        for line in PAGE.partition(f"### {title}\n")[2].partition("\n#")[0].splitlines()
        if line.startswith("| ")
    }


def test_bounds_match_the_code() -> None:
    rows = rows_of("Bounds of a request")
    assert rows["body"] == f"{BODY_BYTES_MAX >> 20} MiB"
    assert rows["messages of a chat"] == f"{MESSAGES_MAX:,}"
    assert rows["rendering of a chat"] == (
        f"{render_process.LONG.cpu_s:g} s; {render_process.MEMORY_MAX_BYTES >> 20} MiB;"
        f" {render_process.LONG.wall_s:g} s"
    )
    assert f"than {render_process.SHORT.cpu_s * 1000:g} ms of processor time" in PAGE
    assert rows["waiting and rendering"] == f"{RENDER_TIMEOUT_S:g} s"
    limits = f"within {trial.CPU_MAX_S} s of processor time and {trial.MEMORY_MAX_BYTES >> 30} GiB"
    assert limits in PAGE
    assert rows["choices"] == str(CHOICES_MAX)
    assert rows["output tokens of several choices"] == f"{OUTPUT_TOKENS_MAX:,}"
    assert rows["token ids over all choices"] == f"{CHOICE_IDS_MAX:,}"
    assert rows["prompt log probabilities"] == f"{PROMPT_LOGPROBS_MAX:,}"
    assert rows["output log probabilities"] == f"{OUTPUT_LOGPROBS_MAX:,}"
    assert f"after {OUTPUT_LOGPROBS_MAX // 21:,} tokens" in PAGE
    assert rows["HTTP headers"].startswith(f"{HEADER_BYTES_MAX >> 10} KiB, {HEADERS_MAX} lines")
    assert f"{INCOMPLETE_BYTES_MAX >> 10} KiB before they are complete" in PAGE
    assert rows["time to complete headers"] == f"{HEADER_TIMEOUT_S:g} s"
    assert rows["pipelined requests"] == str(PIPELINED_MAX)
    assert rows["bodies of pipelined requests"] == f"{PIPELINED_BYTES_MAX >> 10} KiB"
    assert rows["cancels forwarded to other gateways"] == str(FORWARDS_MAX)
    assert rows["tokens of `/detokenize`"] == f"{TEXT_TOKENS_MAX:,}"
    assert f"beyond {SMALL_BYTES >> 10} KiB of each" in PAGE
    assert rows["requests waiting to be written to one worker"] == (
        f"{outbox.BYTES_MAX >> 20} MiB for {outbox.ROOM_TIMEOUT_S:g} s"
    )


def test_connection_bounds_match_the_code() -> None:
    rows = rows_of("Bounds of connections")
    all_row = rows["connections of the HTTP and gRPC ports"]
    assert f"less 1/{OWN_PART}, at least {OWN_MIN} less" in all_row
    assert f"a gRPC connection has {DESCRIPTORS}" in PAGE
    part = RESTRICTED_PART.as_integer_ratio()
    assert rows["connections that only may probe"] == (
        f"{part[0]}/{part[1]} of the other descriptors, at most {RESTRICTED_MAX}"
    )
    assert (
        rows["a new connection before its first request"] == f"not idle for {FIRST_REQUEST_S:g} s"
    )
    assert rows["connections of the admin port"] == str(CONNECTIONS.all_max)
    assert HANDSHAKE_TIMEOUT_S == PREFACE_TIMEOUT_S
    assert rows["TLS handshake; preface of HTTP/2"] == f"{HANDSHAKE_TIMEOUT_S:g} s each"
    assert rows["header block of a gRPC call"] == (
        f"{BLOCK_BYTES_MAX >> 10} KiB, {BLOCK_TIMEOUT_S:g} s"
    )
    assert rows["frames of gRPC clients"] == (
        f"{READ_STEPS} of each {READ_BYTES >> 10} KiB read, and {STEPS_PER_S:,.0f}/s (a header"
        f" block counts as {FRAME_STEPS + BLOCK_STEPS})"
    )
    assert f"to {OPEN_FILES_WANTED:,} if" in PAGE
