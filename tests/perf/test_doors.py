"""Processor time of the gateway for a request and for a token, over HTTP and over gRPC.

One cluster of one worker serves the same requests over both interfaces in turn. Short and long
answers separate the cost of a request from that of a token. Processor time is the kernel's count
for the gateway's process, less that of an idle gateway; tokens are the gateway's count. Prompts are
token ids, so that no text is tokenised.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest

from tests.perf.measuring import CONCURRENCY, send_over_http, show, started, tiny_cluster
from tests.support.ports import free_port
from tideserve.client.aio import AsyncClient
from tideserve.load.workload import PlannedRequest, fixed

PAIRS, PROMPT_TOKENS, IDLE_S = 4, 32, 5.0
REQUESTS = {4: 400, 64: 100}
"""Requests of a round, by their output tokens."""
HTTP, GRPC = "http", "grpc"


async def send_over_grpc(target: str, model: str, requests: Sequence[PlannedRequest]) -> None:
    waiting = iter(requests)

    async def send_in_turn(client: AsyncClient) -> None:
        for request in waiting:
            tokens = request.output_tokens
            lengths = {"max_tokens": tokens, "min_tokens": tokens, "ignore_eos": True}
            async with client.stream_complete(
                request.prompt_ids, model=model, temperature=0, seed=request.seed % 2**31, **lengths
            ) as pieces:
                assert sum([len(piece.token_ids) async for piece in pieces]) == tokens

    async with AsyncClient(target) as client, asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENCY):
            tasks.create_task(send_in_turn(client))


@pytest.mark.timeout(1800)
def test_cost_of_a_request_and_of_a_token(tmp_path: Path) -> None:
    port = free_port()
    system, target = tiny_cluster(tmp_path / "model", grpc_port=port), f"127.0.0.1:{port}"
    cpu_s: dict[str, dict[int, list[float]]] = {
        door: {tokens: [] for tokens in REQUESTS} for door in (HTTP, GRPC)
    }

    def send(door: str, requests: Sequence[PlannedRequest]) -> None:
        if door == GRPC:
            asyncio.run(send_over_grpc(target, system.model, requests))
        else:
            send_over_http([system], requests)

    def measure(door: str, tokens: int, seed: int, idle_share: float) -> None:
        requests = fixed(REQUESTS[tokens], PROMPT_TOKENS, tokens, seed).requests
        before, began_s = system.gateway_cost(), time.monotonic()
        send(door, requests)
        cost, took_s = system.gateway_cost().since(before), time.monotonic() - began_s
        assert cost.tokens == len(requests) * tokens
        cpu_s[door][tokens].append((cost.cpu_s - idle_share * took_s) / len(requests))

    with started([system]):
        for door in cpu_s:  # modules that load at the first request do not count
            send(door, fixed(100, PROMPT_TOKENS, 4, -1).requests)
        before, began_s = system.gateway_cost(), time.monotonic()
        time.sleep(IDLE_S)
        idle_share = system.gateway_cost().since(before).cpu_s / (time.monotonic() - began_s)
        for pair in range(PAIRS):
            for tokens in REQUESTS:
                for door in sorted(cpu_s, reverse=bool(pair % 2)):
                    measure(door, tokens, pair, idle_share)
    (short, long), rows = REQUESTS, {}
    prices = {HTTP: [], GRPC: []}
    for door, by_tokens in cpu_s.items():
        for short_s, long_s in zip(by_tokens[short], by_tokens[long], strict=True):
            token_s = (long_s - short_s) / (long - short)
            prices[door].append((short_s - short * token_s, token_s))
        request_s, token_s = (median(each) for each in zip(*prices[door], strict=True))
        rows[door] = f"{1e3 * request_s:.2f} ms for a request, {1e6 * token_s:.0f} µs for a token"
    pairs = list(zip(prices[GRPC], prices[HTTP], strict=True))
    ratios = [median(grpc[part] / http[part] for grpc, http in pairs) for part in (0, 1)]
    rows["gRPC over HTTP"] = f"{ratios[0]:.2f} for a request, {ratios[1]:.2f} for a token"
    rows["idle gateway"] = f"{idle_share:.2%} of a processor"
    show("processor time of the gateway", rows)
