"""Checks of a cluster in containers, which raise on failure. `CHECKS` defines the order."""

import asyncio
import json
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from container_cluster import CommandFailed, Containers, eventually, run, say
from container_load import (
    Answer,
    check_equal,
    running_streams,
    stream,
    stream_all,
    stream_until,
    tokens_by_request,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tideserve.cli.cache import cache_root
from tideserve.cli.certificates import write_certificates
from tideserve.cli.model_store import prepare_default_model
from tideserve.cli.status import decision_lines, trouble_lines
from tideserve.client import AsyncClient
from tideserve.client.request import ChatFields

Check = Callable[[Containers], Coroutine[Any, Any, None]]

USER = 65532
QUESTION = "What is the capital of France?"
STREAMS = 3
LONG, SHORT = 160, 4
LEADS, LEADS_NOT = "leads with token", "does not lead"
FLOOD, FLOOD_TOKENS, AT_REST = 40, 96, 8
CHANGE_TIMEOUT_S = 240.0
DECISION_LINES = 16
STANDSTILL_S = 15.0
"""Longer than the timeout of a silent connection, and than a lease."""


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The JSON answer of an endpoint. Raises OSError."""
    request = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def chat_at(url: str) -> str:
    """The answer to a short chat. Raises OSError."""
    messages = [{"role": "user", "content": QUESTION}]
    body = {"model": "SmolLM2-135M-Instruct", "messages": messages, "max_tokens": 12}
    answer = post(url, "/v1/chat/completions", body | {"temperature": 0})
    return str(answer["choices"][0]["message"]["content"])


async def chat(cluster: Containers) -> None:
    """A chat is answered."""
    answer = await asyncio.to_thread(chat_at, cluster.url)
    assert "Paris" in answer, answer
    say(f"    {answer}")


async def chat_grpc(cluster: Containers) -> None:
    """gRPC returns the same answer as HTTP, unary and streamed, and reports healthy."""
    expected = await asyncio.to_thread(chat_at, cluster.url)
    target = f"127.0.0.1:{cluster.grpc_port}"
    options: ChatFields = {"temperature": 0.0, "max_tokens": 12}
    async with AsyncClient(target, timeout_s=60) as client:
        (model,) = await client.models()
        whole = await client.chat(QUESTION, model=model.id, **options)
        async with client.stream_chat(QUESTION, model=model.id, **options) as pieces:
            streamed = "".join([piece.text async for piece in pieces])
    assert [choice.message.text for choice in whole.choices] == [expected] == [streamed], whole
    async with grpc.aio.insecure_channel(target) as channel:
        request = health_pb2.HealthCheckRequest(service="tideserve.gateway.v1.GatewayService")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=60)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING, answer


def disturbs(how: str, service: str) -> Check:
    """A check that disturbing a service breaks no running stream, and that the cluster recovers."""

    async def check(cluster: Containers) -> None:
        (name,) = cluster.names(service)
        async with running_streams(cluster.url, STREAMS, LONG):
            await asyncio.to_thread(getattr(cluster, how), name)
        await recovered(cluster)

    return check


async def recovered(cluster: Containers) -> None:
    """Wait until every container is healthy and a new request is answered."""
    names = [row["Name"] for row in cluster.rows() if row["State"] == "running"]
    await asyncio.to_thread(eventually, lambda: all(map(cluster.is_healthy, names)), 240)
    await asyncio.to_thread(eventually, lambda: chat_at(cluster.url), 120)


def configurations(cluster: Containers) -> list[list[int]]:
    """Number of stages of each configuration that a worker adopted, per worker."""
    return [
        [len(value["stages"]) for _, _, value in lines]
        for lines in cluster.events("worker", "EngineSwitched").values()
    ]


async def configured(cluster: Containers, stages: int) -> None:
    """Wait until both workers serve in groups of `stages`. Raises AssertionError with the cause."""

    def adopted() -> bool:
        sizes = configurations(cluster)
        return len(sizes) == 2 and all(counts and counts[-1] == stages for counts in sizes)

    try:
        await asyncio.to_thread(eventually, adopted, CHANGE_TIMEOUT_S)
    except AssertionError as error:
        cause = await asyncio.to_thread(explanation, cluster)
        raise AssertionError(f"{error}: no groups of {stages}\n{cause}") from error


def explanation(cluster: Containers) -> str:
    """Groups, use of the workers, and the memory manager's last decisions with their outcomes."""
    status = cluster.status()
    lines = []
    for group in status["groups"]:
        degraded = " (degraded)" if group["degraded"] else ""
        lines.append(f"group {group['id']}: {', '.join(group['members'])}{degraded}")
    for row in status["workers"]:
        total = row["kv_blocks_total"]
        lines.append(
            f"worker {row['id']}: {total - row['kv_blocks_free']} of {total} KV blocks in use,"
            f" {row['running']} requests running, {row['waiting']} waiting"
        )
    lines += decision_lines(status)[-DECISION_LINES:] or ["no decisions: the KV cache suffices"]
    return "\n".join([*lines, *trouble_lines(status)])


async def undisturbed(cluster: Containers) -> dict[int, list[int]]:
    """The outputs of the flood's requests, run at low concurrency."""
    if not cluster.undisturbed:
        rest = await stream_all(cluster.url, range(FLOOD), FLOOD_TOKENS, AT_REST)
        merged = any(2 in sizes for sizes in configurations(cluster))
        assert not merged, "the undisturbed run merged"
        cluster.undisturbed = outputs_of(cluster, rest)
    return cluster.undisturbed


def outputs_of(cluster: Containers, answers: dict[int, Answer]) -> dict[int, list[int]]:
    """The tokens of answers, from the gateway's event log."""
    (lines,) = cluster.events("gateway", "TokensForwarded").values()
    outputs = tokens_by_request(lines)
    return {number: outputs[answer.request_id] for number, answer in answers.items()}


async def compare(cluster: Containers, answers: dict[int, Answer]) -> None:
    """Check that answers of the flood's requests have the tokens of the undisturbed run."""
    outputs, after = await undisturbed(cluster), outputs_of(cluster, answers)
    before = {number: outputs[number] for number in answers}
    assert all(len(tokens) == FLOOD_TOKENS for tokens in (*before.values(), *after.values()))
    model_dir = prepare_default_model(cache_root(), say)
    excused = await asyncio.to_thread(check_equal, str(model_dir), before, after)
    say(f"    {len(after) * FLOOD_TOKENS} tokens equal but for {excused} near-ties")


@asynccontextmanager
async def merged_flood(cluster: Containers) -> AsyncIterator[None]:
    """A context with merged workers and the flood that merged them; compares its tokens on exit."""
    await undisturbed(cluster)
    # Workers that earlier checks have disturbed count as flapping, and would not be merged.
    await asyncio.to_thread(cluster.up, "--force-recreate", "--no-deps", "worker")
    await recovered(cluster)
    stopped = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        flood = tasks.create_task(stream_until(cluster.url, range(FLOOD), FLOOD_TOKENS, stopped))
        await configured(cluster, stages=2)
        stopped.set()
        yield
    await compare(cluster, flood.result())


async def merge_split(cluster: Containers) -> None:
    """A flood makes the workers merge and split again; no token differs."""
    async with merged_flood(cluster):
        pass
    await configured(cluster, stages=1)


def loses_member(how: str, *arguments: float) -> Check:
    """A check that disturbing a worker of a merged group under a flood changes no token."""

    async def check(cluster: Containers) -> None:
        async with merged_flood(cluster):
            name = cluster.names("worker")[0]
            await asyncio.to_thread(getattr(cluster, how), name, *arguments)
        await recovered(cluster)

    return check


async def roll_gateway(cluster: Containers) -> None:
    """A new gateway replaces the old gateway while streams are open."""
    (old,) = cluster.names("gateway")
    before = run(["docker", "inspect", "-f", "{{.Id}}", old])
    async with running_streams(cluster.url, STREAMS, LONG):
        await asyncio.to_thread(cluster.up, "--force-recreate", "--no-deps", "gateway")
    assert run(["docker", "inspect", "-f", "{{.Id}}", old]) != before
    await recovered(cluster)


async def roll_workers(cluster: Containers) -> None:
    """The workers restart one after the other under load; no stream breaks, no token differs."""
    await undisturbed(cluster)
    names, stopped = cluster.names("worker"), asyncio.Event()

    def all_serve() -> bool:
        groups = cluster.status()["groups"]
        members = [member for group in groups for member in group["members"]]
        return len(members) == len(names) and not any(group["degraded"] for group in groups)

    async with asyncio.TaskGroup() as tasks:
        load = tasks.create_task(stream_until(cluster.url, range(AT_REST), FLOOD_TOKENS, stopped))
        for name in names:
            await asyncio.to_thread(cluster.restart, name)
            await recovered(cluster)
            await asyncio.to_thread(eventually, all_serve, CHANGE_TIMEOUT_S)
        stopped.set()
    await compare(cluster, load.result())


async def two_gateways(cluster: Containers) -> None:
    """Both gateways answer; stopping a gateway breaks no stream of the other."""
    single = {name: cluster.settings[name] for name in ("PORT", "GRPC_PORT")}
    cluster.settings["PORT"] = f"{cluster.port}-{cluster.port + 1}"
    cluster.settings["GRPC_PORT"] = f"{cluster.grpc_port}-{cluster.grpc_port + 1}"
    await asyncio.to_thread(cluster.up, "--no-deps", "--scale", "gateway=2", "gateway")
    try:
        names = cluster.names("gateway")
        ports = [run(["docker", "port", name, "8000/tcp"]).split(":")[-1].strip() for name in names]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        assert len(set(urls)) == 2, urls
        async with running_streams(urls[0], STREAMS, LONG):
            await stream(urls[1], STREAMS, SHORT)
            await asyncio.to_thread(run, ["docker", "kill", names[1]])
    finally:
        cluster.settings |= single
        await asyncio.to_thread(cluster.up, "--no-deps", "--scale", "gateway=1", "gateway")
    await recovered(cluster)


async def two_memmgrs(cluster: Containers) -> None:
    """Of two memory managers one leads; the other takes over when it stops; streams continue."""
    await asyncio.to_thread(cluster.up, "--no-deps", "--scale", "memmgr=2", "memmgr")
    try:
        (first,) = await asyncio.to_thread(eventually, lambda: leaders(cluster))
        async with running_streams(cluster.url, STREAMS, LONG):
            await asyncio.to_thread(run, ["docker", "kill", first])
        (second,) = await asyncio.to_thread(eventually, lambda: leaders(cluster))
        assert second != first
    finally:
        await asyncio.to_thread(cluster.up, "--no-deps", "--scale", "memmgr=1", "memmgr")
    await recovered(cluster)


def leaders(cluster: Containers) -> list[str]:
    """The memory managers that report that they lead."""
    leading = []
    for name in cluster.names("memmgr"):
        done = subprocess.run(
            ["docker", "logs", name], capture_output=True, text=True, timeout=30, check=False
        )
        elections = [
            line for line in done.stderr.splitlines() if LEADS in line or LEADS_NOT in line
        ]
        if elections and LEADS in elections[-1]:
            leading.append(name)
    return leading


def issue(folder: Path) -> None:
    """Create certificates that the user of the containers can read."""
    write_certificates(folder, (), 1)
    for path in (folder, *folder.iterdir()):
        shutil.chown(path, USER, USER)


async def mtls(cluster: Containers) -> None:
    """The cluster serves with mutual TLS everywhere, and refuses a peer without a certificate."""
    folder = Path(tempfile.mkdtemp(prefix="tideserve-certs-"))
    plain = cluster.files
    try:
        issue(folder)
        cluster.settings["CERTS"] = str(folder)
        cluster.files = (plain[0], "compose.tls.yaml", *plain[1:])
        await asyncio.to_thread(cluster.up)
        await recovered(cluster)
        (name,) = cluster.names("scheduler")
        service = "grpc://127.0.0.1:50051/tideserve.scheduler.v1.SchedulerService"
        probe = [name, "python3", "-m", "services.common.probe", service]
        await asyncio.to_thread(run, ["docker", "exec", *probe])
        # Peers with TLS but without a client certificate, and without TLS.
        for left_out in (("TLS_CERT_FILE", "TLS_KEY_FILE"), ("TLS_CA_FILE",)):
            without = [word for key in left_out for word in ("--env", f"TIDESERVE__{key}=")]
            try:
                await asyncio.to_thread(run, ["docker", "exec", *without, *probe])
            except CommandFailed as error:
                assert "does not answer" in str(error), error
            else:
                raise AssertionError(f"a peer without {left_out} was answered")
    finally:
        cluster.files = plain
        await asyncio.to_thread(cluster.up)
        shutil.rmtree(folder)
    await recovered(cluster)


async def stop_zero(cluster: Containers) -> None:
    """Every container exits with 0 on `docker compose stop`."""
    await asyncio.to_thread(cluster.stop)
    codes = {row["Name"]: row["ExitCode"] for row in cluster.rows()}
    assert len(codes) >= 7 and not any(codes.values()), codes


async def cost_models(cluster: Containers) -> None:
    """Fresh workers without a profile have measured cost models."""

    def measured() -> bool:
        origins = [row["cost_model"] for row in cluster.status()["workers"]]
        return bool(origins) and all(name in ("start", "idle", "load") for name in origins)

    await asyncio.to_thread(eventually, measured)


CHECKS: dict[str, Check] = {
    "chat": chat,
    "cost_models": cost_models,
    "chat_grpc": chat_grpc,
    "merge_split": merge_split,
    **{
        f"{how}_{service}": disturbs(how, service)
        for how in ("kill", "pause", "disconnect")
        for service in ("scheduler", "memmgr", "etcd")
    },
    "kill_merged": loses_member("kill"),
    "pause_merged": loses_member("pause", STANDSTILL_S),
    "disconnect_merged": loses_member("disconnect", STANDSTILL_S),
    "roll_gateway": roll_gateway,
    "roll_workers": roll_workers,
    "two_gateways": two_gateways,
    "two_memmgrs": two_memmgrs,
    "mtls": mtls,
    "stop_zero": stop_zero,
}
QUICK = ("chat", "chat_grpc", "stop_zero")
