"""Sampling options of a worker: its servicer over gRPC with a real engine."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import jsonschema
import pytest
import pytest_asyncio
import torch
import transformers
from tokenizers import Tokenizer

from services.core.request import TokenLogprobs
from services.worker.config import WorkerConfig
from services.worker.engine_client import EngineClient
from services.worker.group_view import Place
from services.worker.servicer import WorkerServicer
from services.worker.start_frame import to_request
from tests.support.tiny_models import EOS_TOKEN_ID, make_tiny_model
from tests.support.transformers_reference import Reference
from tideserve.common.v1 import load_pb2, service_pb2
from tideserve.worker.v1 import worker_pb2 as pb
from tideserve.worker.v1 import worker_pb2_grpc

# The engine is started once for all tests.
pytestmark = pytest.mark.asyncio(loop_scope="module")

VOCAB = 320
FUZZED = 400
WAIT_S = 120
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}


class Worker:
    """A worker without a group protocol; `answers` are its events by request."""

    def __init__(self, model_dir: Path, run_dir: Path) -> None:
        self.model_dir = model_dir
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        config = WorkerConfig(
            worker_id="w0",
            etcd_url="",
            model_name="m",
            model_dir=model_dir,
            run_dir=run_dir,
            memory_bytes=10 << 20,
            dtype="float64",
            max_model_len=512,
            profile_when_idle=False,
        )
        self.engine = EngineClient(config, "w0-1")
        self.answers: dict[str, list[pb.RequestEvent]] = {}
        self._heard = asyncio.Condition()

    async def start(self) -> None:
        self.facts = await self.engine.start()
        place = Place("g", 1, leads=True)
        servicer = WorkerServicer(
            self.engine,
            self.facts,
            lambda: place,
            lambda _: None,
            load_pb2.WorkerLoad,
            lambda *_: "",
        )
        self.server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.call = worker_pb2_grpc.WorkerServiceStub(self.channel).Generate()
        self.tasks = [
            asyncio.create_task(self.engine.run(servicer.deliver, lambda: None)),
            asyncio.create_task(self._read()),
        ]

    async def stop(self) -> None:
        self.call.cancel()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.channel.close()
        await self.server.stop(0)
        await self.engine.stop()

    async def _read(self) -> None:
        while True:
            frame = await self.call.read()
            async with self._heard:
                for event in frame.events:
                    self.answers.setdefault(event.request_id, []).append(event)
                self._heard.notify_all()

    async def send(self, name: str, **changes: Any) -> pb.Start:
        fields: dict[str, Any] = {
            "prompt_ids": self.tokenizer.encode("tide").ids,
            "sampling": pb.Sampling(top_p=1),
            "limits": pb.Limits(max_tokens=12),
            **changes,
        }
        start = pb.Start(request_id=name, group_id="g", epoch=1, **fields)
        await self.call.write(pb.GenerateRequest(start=start))
        return start

    async def abort(self, name: str) -> None:
        await self.call.write(pb.GenerateRequest(abort=pb.Abort(request_id=name)))

    async def end_of(self, name: str) -> pb.RequestEvent:
        """The last event of a request. Raises TimeoutError, or the error that ended the engine."""

        def over() -> bool:
            for task in self.tasks:
                if task.done():
                    task.result()
            events = self.answers.get(name)
            return bool(events) and events[-1].finish_reason != 0

        async with asyncio.timeout(WAIT_S), self._heard:
            await self._heard.wait_for(over)
        return self.answers[name][-1]

    def tokens(self, name: str) -> list[int]:
        """All output of a request, whose indices must be consecutive."""
        tokens: list[int] = []
        for event in self.answers[name]:
            assert not event.token_ids or event.first_index == len(tokens)
            tokens += event.token_ids
        return tokens

    async def until_idle(self) -> None:
        """Wait until all blocks are free."""
        async with asyncio.timeout(WAIT_S):
            while True:
                load = self.engine.report.load
                idle = (load.running, load.waiting) == (0, 0)
                if idle and load.kv_blocks_free == load.kv_blocks_total:
                    return
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    folder = tmp_path_factory.mktemp("worker")
    made = Worker(make_tiny_model(folder / "model", vocab=VOCAB), folder / "run")
    try:
        await made.start()
        yield made
    finally:
        await made.stop()


def rows(logprobs: list[pb.TokenLogprobs]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(
            token.logprob, token.rank, tuple(zip(token.top_ids, token.top_logprobs, strict=True))
        )
        for token in logprobs
    ]


async def test_rules_and_log_probabilities_of_a_start(worker: Worker) -> None:
    """They equal those of `transformers`; other fields have no effect."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(worker.model_dir, dtype=torch.float64)
    reference, starts = Reference(model), []
    for number in range(8):
        sampling = pb.Sampling(
            temperature=0.8 * (number % 2),
            top_p=1,
            seed=number,
            min_p=0.05,
            presence_penalty=0.5,
            frequency_penalty=-0.25,
            repetition_penalty=1.2,
            logit_bias=[pb.LogitBias(token_id=9, bias=2)],
            bad_words=[pb.TokenSequence(token_ids=[number, 9])],
            allowed_token_ids=range(number, VOCAB),
        )
        options = pb.LogprobOptions(output_top=number % 3, prompt_top=2)
        service = service_pb2.Service(tenant="t", rank=number)
        changes = {"waited_s": 0.5, "cache_salt": "s", "choice": number, "service": service}
        starts.append(
            await worker.send(f"all-{number}", sampling=sampling, logprobs=options, **changes)
        )
    for start in starts:
        end = await worker.end_of(start.request_id)
        assert end.finish_reason == pb.FINISH_REASON_LENGTH
        request = to_request(start, VOCAB, 512, 0.0)
        output = worker.tokens(start.request_id)
        assert output == reference.answer(request)
        events = worker.answers[start.request_id]
        first = next(event for event in events if event.token_ids)
        assert all(len(event.logprobs) == len(event.token_ids) for event in events)
        assert all(not event.prompt_logprobs for event in events if event is not first)
        output_rows = [token for event in events for token in event.logprobs]
        reference.check_logprobs(
            request, output, rows(list(first.prompt_logprobs)), rows(output_rows)
        )


async def test_log_probabilities_are_returned_only_if_requested(worker: Worker) -> None:
    await worker.send("plain")
    await worker.end_of("plain")
    assert all(not event.logprobs for event in worker.answers["plain"])
    assert all(not event.prompt_logprobs for event in worker.answers["plain"])


async def test_grammars_constrain_the_output(worker: Worker) -> None:
    text = json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}})
    for number in range(12):
        sampling = pb.Sampling(
            temperature=1.2 * (number % 2),
            top_p=0.9,
            seed=number,
            grammar=pb.Grammar(json_schema=text),
        )
        limits = pb.Limits(max_tokens=100, stop_token_ids=[EOS_TOKEN_ID])
        await worker.send(f"schema-{number}", sampling=sampling, limits=limits)
    for number in range(12):
        end = await worker.end_of(f"schema-{number}")
        assert end.finish_reason == pb.FINISH_REASON_STOP
        written = worker.tokenizer.decode(worker.tokens(f"schema-{number}")[:-1])
        jsonschema.validate(json.loads(written), SCHEMA)


async def test_an_invalid_grammar_ends_only_its_request(worker: Worker) -> None:
    await worker.send("fine", limits=pb.Limits(max_tokens=200))
    await worker.send("bad", sampling=pb.Sampling(top_p=1, grammar=pb.Grammar(regex="a(")))
    end = await worker.end_of("bad")
    assert end.finish_reason == pb.FINISH_REASON_INVALID and "unclosed group" in end.message
    assert (await worker.end_of("fine")).finish_reason == pb.FINISH_REASON_LENGTH


async def test_contradictory_options_end_only_their_request(worker: Worker) -> None:
    sampling = pb.Sampling(
        top_p=1, allowed_token_ids=[7], bad_words=[pb.TokenSequence(token_ids=[7, 7])]
    )
    await worker.send("fine-2", limits=pb.Limits(max_tokens=50))
    await worker.send("nothing", sampling=sampling)
    end = await worker.end_of("nothing")
    assert end.finish_reason == pb.FINISH_REASON_INVALID and "no token is left" in end.message
    assert worker.tokens("nothing") == [7]
    assert (await worker.end_of("fine-2")).finish_reason == pb.FINISH_REASON_LENGTH


async def test_a_worker_survives_any_request(worker: Worker) -> None:
    """Each request ends with a reason or is aborted, and leaves no state."""
    rng = random.Random(1)
    names = []
    for number in range(FUZZED):
        name = f"fuzz-{number}"
        names.append(name)
        await worker.send(
            name,
            prompt_ids=[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 40]))],
            sampling=fuzzed_sampling(rng),
            limits=fuzzed_limits(rng),
            logprobs=pb.LogprobOptions(
                output_top=rng.choice([-1, 0, 20, 21, 5]), prompt_top=rng.choice([0, 1, 20])
            ),
            choice=rng.choice([0, 0, 0, 5, -1]),
        )
        if rng.random() < 0.1:
            await worker.abort(name)
            names.remove(name)
    reasons = set()
    for name in names:
        reasons.add((await worker.end_of(name)).finish_reason)
    assert reasons >= {pb.FINISH_REASON_INVALID, pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_STOP}
    assert pb.FINISH_REASON_ERROR not in reasons
    await worker.until_idle()
    await worker.send("after")
    assert (await worker.end_of("after")).finish_reason == pb.FINISH_REASON_LENGTH


def fuzzed_limits(rng: random.Random) -> pb.Limits:
    return pb.Limits(
        max_tokens=rng.choice([1, 5, 20]),
        min_tokens=rng.choice([0, 0, 1]),
        stop_token_ids=rng.choice([[], [EOS_TOKEN_ID], range(0, VOCAB, 3), range(VOCAB)]),
    )


def fuzzed_sampling(rng: random.Random) -> pb.Sampling:
    """Mostly within the valid ranges, at their bounds, or just beyond."""
    nan, infinity = float("nan"), float("inf")
    token = rng.randrange(VOCAB)
    fields: dict[str, Any] = {"temperature": rng.choice([0, 1e-300, 1, 2]), "top_p": 1}
    choices: dict[str, tuple[Any, ...]] = {
        "temperature": (-0.1, 2.1, nan),
        "top_p": (5e-324, 0.5, 0),
        "top_k": (1, VOCAB, VOCAB + 1),
        "seed": (2**64 - 1,),
        "min_p": (5e-324, 1, 1.01),
        "presence_penalty": (-2, 2, -infinity),
        "frequency_penalty": (-2, 2, nan),
        "repetition_penalty": (5e-324, 0.01, 2, 0, infinity),
        "logit_bias": (
            [pb.LogitBias(token_id=token, bias=100)],
            [pb.LogitBias(token_id=VOCAB, bias=1)],
            [pb.LogitBias(token_id=i, bias=-100) for i in range(VOCAB)],
        ),
        "bad_words": (
            [pb.TokenSequence(token_ids=[token])],
            [pb.TokenSequence(token_ids=[i]) for i in range(128)],
            [pb.TokenSequence()],
        ),
        "allowed_token_ids": ([token], [EOS_TOKEN_ID], [VOCAB], range(VOCAB)),
        "grammar": (
            pb.Grammar(),
            pb.Grammar(regex="[a-z]{2,5}"),
            pb.Grammar(regex="("),
            pb.Grammar(lark="start: start start | /[a-c]/"),
            pb.Grammar(json_schema='{"type": "integer", "maximum": 99}'),
            pb.Grammar(json_schema='{"type": 7}'),
        ),
    }
    for name in rng.sample(sorted(choices), rng.randint(0, 4)):
        fields[name] = rng.choice(choices[name])
    return pb.Sampling(**fields)
