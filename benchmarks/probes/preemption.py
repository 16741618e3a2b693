"""How soon batch work gives way: `python -m benchmarks.probes.preemption`, one JSON object.

Two engine processes, and this one is the servicer of both. One interrupts batch work for online
requests, the other does not. Each gets one batch prompt at a time, which fills an iteration, and
single online requests at moments of chance while it runs. Then drops are prepared in such moments.
What an engine did when is read from its event log, on the same clock as what was sent.

Exit code 2 with a sentence on stderr if it cannot be measured.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.interruptions import Noticed, Part, noticed, read_parts
from services.common.clock import monotonic_s
from services.common.errors import ServiceError
from services.common.lifecycle import EXIT_UNUSABLE
from services.common.timeouts import timeout
from services.core.line_order import Scheduling
from services.core.planner.config import IterationConfig
from services.core.planner.preemption import Preempt
from services.core.request import Limits, Request, Sampling
from services.core.service import Service, ServiceClass
from services.worker.config import WorkerConfig
from services.worker.engine_client import EngineClient
from services.worker.ipc import (
    ApplyConfiguration,
    EngineReady,
    GroupPlan,
    Lane,
    MemberPlan,
    Prepare,
    Progress,
)
from tideserve.cli.errors import SystemUnavailable

GIB = 1 << 30
ANSWER_TIMEOUT_S = 60.0
BATCH_TOKENS = 2048
ONLINE_TOKENS = 32
PROMPTS = 4
"""Batch prompts, each of which comes again and again."""
BATCH, ONLINE = Service(ServiceClass.BATCH), Service(ServiceClass.INTERACTIVE, ttft_s=0.5)


@dataclass(frozen=True, slots=True)
class LoadExtent:
    """How much is measured; `tokens` of a batch prompt fill an iteration.

    `rounds` batch prompts are disturbed by `arrivals` online requests each, or one where nothing is
    interrupted. `drops` are prepared. `behind`: so many rounds have a second prompt waiting.
    """

    tokens: int = BATCH_TOKENS
    rounds: int = 12
    arrivals: int = 5
    drops: int = 6
    behind: int = 4


@dataclass(slots=True)
class SentPrompt:
    """One request: when it was sent, when its first token came, and its tokens."""

    sent_s: float
    first_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Servicer:
    """The servicer's end of one engine: sends requests, and notes when their tokens come."""

    def __init__(self, config: WorkerConfig) -> None:
        self.config = config
        self.client = EngineClient(config, f"{config.worker_id}-1")
        self.answers: dict[str, SentPrompt] = {}
        self.facts: EngineReady | None = None
        self._running: asyncio.Task[None] | None = None
        self._refused = ""

    async def start(self) -> None:
        """Start the engine. Raises ServiceError with its own sentence."""
        self.facts = await self.client.start()
        self._running = asyncio.create_task(self.client.run(self._note, lambda: None))

    async def stop(self) -> None:
        """End the engine."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
        await self.client.stop()

    async def ask(self, name: str, prompt: tuple[int, ...], service: Service) -> SentPrompt:
        """The answer to a request of one token. Raises SystemUnavailable without one."""
        request = Request(
            name, prompt, Sampling(temperature=0), Limits(1), monotonic_s(), service=service
        )
        answer = self.answers[name] = SentPrompt(monotonic_s())
        await self.client.start_request(request)
        try:
            async with timeout(ANSWER_TIMEOUT_S):
                await answer.over.wait()
        except TimeoutError as error:
            raise SystemUnavailable(f"{name} got no answer") from error
        if self._refused:
            raise SystemUnavailable(f"a request was refused: {self._refused}")
        return answer

    def stage(self, first_layer: int, end_layer: int, attempt: str) -> MemberPlan:
        """Its part in a group that `attempt` makes."""
        assert self.facts is not None
        name = self.config.worker_id
        return MemberPlan(
            name,
            f"{name}-1",
            first_layer,
            end_layer,
            Lane(self.facts.activation_address, f"activations-{name}-{attempt}"),
            Lane(self.facts.bulk_address, f"bulk-{name}-{attempt}"),
            "127.0.0.1:1",
        )

    def _note(self, progress: Progress) -> None:
        now_s = monotonic_s()
        for token in progress.tokens:
            answer = self.answers[token.request_id]
            answer.first_s = answer.first_s or now_s
            answer.tokens.append(token.token_id)
            if token.finish_reason is not None:
                answer.over.set()
        for refusal in progress.refusals:
            self._refused = refusal.message
            self.answers[refusal.request_id].over.set()


class Measurement:
    """Runs the load on both engines; the log of each is read once its engine has ended."""

    def __init__(self, always: Servicer, off: Servicer, extent: LoadExtent) -> None:
        self.servicers = {Preempt.ALWAYS: always, Preempt.OFF: off}
        self.extent = extent
        self.figures: dict[str, Any] = {}
        self._rng = random.Random(extent.tokens)
        self._numbers = iter(range(10**9))
        self._prompts: list[tuple[int, ...]] = []
        self._length_s = 0.0
        self._drops: list[tuple[float, float]] = []  # sent, prepared
        self._number_of: dict[str, int] = {}  # the prompt of each batch request

    async def run(self) -> None:
        """Everything that is measured. Raises SystemUnavailable."""
        always, off = self.servicers.values()
        await asyncio.gather(always.start(), off.start())
        assert always.facts is not None and always.facts.shape is not None
        layers, vocab = always.facts.shape.num_layers, always.facts.vocab_size
        for one in (always, off):
            alone = GroupPlan(f"group-{one.config.worker_id}", 1, [one.stage(0, layers, "first")])
            await one.client.apply(ApplyConfiguration([alone]))
        self._prompts = [self._prompt(self.extent.tokens, vocab) for _ in range(PROMPTS)]
        await self._undisturbed(always)
        online = self._prompt(ONLINE_TOKENS, vocab)
        for _ in range(self.extent.rounds):
            await self._disturbed(always, "single", online, self.extent.arrivals)
            await self._disturbed(off, "single", online, 1)
        for _ in range(self.extent.behind):
            await self._disturbed(always, "behind", online, 1, waiting=1)
            await self._disturbed(off, "behind", online, 1, waiting=1)
        for _ in range(self.extent.drops):
            await self._drop(always, off, layers)
        load = always.client.report.load
        self.figures |= {
            "layers": layers,
            "tokens": self.extent.tokens,
            "preempted_iterations": load.preempted_iterations_total,
            "resumed_iterations": load.resumed_iterations_total,
            "discarded_tokens": load.discarded_tokens_total,
            "recomputed_tokens": load.tokens.batch_recomputed_tokens_total,
        }

    def read(self) -> dict[str, Any]:
        """All figures, with those of the event logs. Raises SystemUnavailable."""
        ttft_s: dict[str, dict[str, list[float]]] = {"single": {}, "behind": {}}
        for preempt, servicer in self.servicers.items():
            folder = servicer.config.event_log
            assert folder is not None
            (path,) = folder.glob("*.jsonl")
            parts = read_parts(path)
            batch = frozenset(name for name in servicer.answers if name.startswith("batch"))
            seen: list[Noticed] = []
            for case, found in ttft_s.items():
                found[preempt] = []
                for name, answer in servicer.answers.items():
                    one = noticed(parts, answer.sent_s, batch)
                    if name.startswith(f"online-{case}") and one is not None:
                        seen.append(one)
                        found[preempt].append(answer.first_s - answer.sent_s)
            if preempt is Preempt.ALWAYS:
                different, compared = self._compared(servicer, parts)
                drops = [noticed(parts, sent_s, batch) for sent_s, _ in self._drops]
                self.figures |= {
                    "iteration_s": [
                        one.end_s - one.begin_s
                        for one in parts
                        if one.whole and any(name.startswith("batch-0") for name in one.request_ids)
                    ],
                    "different_tokens": different,
                    "compared_tokens": compared,
                    "noticed": seen,
                    "drop_noticed": [one for one in drops if one is not None],
                    "drop_prepared_s": [ended_s - sent_s for sent_s, ended_s in self._drops],
                }
        return self.figures | {"ttft_s": ttft_s}

    def _compared(self, servicer: Servicer, parts: Sequence[Part]) -> tuple[int, int]:
        """Tokens of batch prompts that differ from the undisturbed ones, and how many there are.

        A prompt that ran together with others has the rounding of a larger batch.
        """
        answers = servicer.answers
        together = {
            name for part in parts if len(part.request_ids) > 1 for name in part.request_ids
        }
        pairs = [
            (answers[name].tokens, answers[f"batch-0-{number}"].tokens)
            for name, number in self._number_of.items()
            if name in answers and name not in together
        ]
        return sum(tokens != wanted for tokens, wanted in pairs), len(pairs)

    async def _undisturbed(self, servicer: Servicer) -> None:
        """What each prompt takes and gets when nothing comes between."""
        lengths = []
        for number, prompt in enumerate(self._prompts):
            answer = await servicer.ask(f"batch-0-{number}", prompt, BATCH)
            lengths.append(answer.first_s - answer.sent_s)
        self._length_s = sorted(lengths)[len(lengths) // 2]

    async def _disturbed(
        self,
        servicer: Servicer,
        case: str,
        online: tuple[int, ...],
        arrivals: int,
        waiting: int = 0,
    ) -> None:
        """A batch prompt, perhaps with others behind it, and online requests one after another."""
        running = self._batch(servicer, 1 + waiting)
        for _ in range(arrivals):
            await asyncio.sleep(self._rng.uniform(0, 2 * self._length_s / (arrivals + 1)))
            if running.done():
                break
            await servicer.ask(f"online-{case}-{next(self._numbers)}", online, ONLINE)
        await running

    async def _drop(self, always: Servicer, off: Servicer, layers: int) -> None:
        """A merge of both is prepared while a batch prompt runs, and is given up again."""
        running = self._batch(always, 1)
        await asyncio.sleep(self._rng.uniform(0, self._length_s))
        attempt, half = f"drop-{next(self._numbers)}", layers // 2
        stages = [always.stage(0, half, attempt), off.stage(half, layers, attempt)]
        command = Prepare(attempt, [GroupPlan("merged", 2, stages)])
        sent_s = monotonic_s()
        try:
            answers = await asyncio.gather(
                *(one.client.prepare(command, ANSWER_TIMEOUT_S) for one in (always, off))
            )
        except TimeoutError as error:
            raise SystemUnavailable("an engine does not answer a Prepare") from error
        self._drops.append((sent_s, monotonic_s()))
        for one, answer in zip((always, off), answers, strict=True):
            if answer.error:
                raise SystemUnavailable(f"a drop could not be prepared: {answer.error}")
            await one.client.abort_preparation(attempt)
        await running

    def _batch(self, servicer: Servicer, count: int) -> asyncio.Task[None]:
        """So many batch prompts at once."""
        numbers = [self._rng.randrange(PROMPTS) for _ in range(count)]

        async def asked(number: int) -> None:
            name = f"batch-1-{next(self._numbers)}"
            self._number_of[name] = number
            answer = await servicer.ask(name, self._prompts[number], BATCH)
            if count == 1 and servicer is self.servicers[Preempt.OFF]:
                # Nothing interrupted it: the machine is as fast as this now.
                self._length_s = answer.first_s - answer.sent_s

        async def all_asked() -> None:
            await asyncio.gather(*map(asked, numbers))

        return asyncio.create_task(all_asked())

    def _prompt(self, tokens: int, vocab: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(vocab) for _ in range(tokens))


async def measure(
    model_dir: Path, dtype: str, memory_bytes: int, extent: LoadExtent
) -> dict[str, Any]:
    """Both engines under load. Raises ServiceError, SystemUnavailable."""
    with tempfile.TemporaryDirectory(prefix="tideserve-preempt-") as folder:

        def servicer(preempt: Preempt) -> Servicer:
            return Servicer(
                WorkerConfig(
                    worker_id=preempt.value,
                    etcd_url="",
                    model_name="m",
                    model_dir=model_dir,
                    run_dir=Path(folder) / preempt,
                    event_log=Path(folder) / f"{preempt}-events",
                    memory_bytes=memory_bytes,
                    dtype=dtype,
                    planner=IterationConfig(
                        max_batch_tokens=extent.tokens,
                        max_running=8,
                        prefix_caching=False,
                        scheduling=Scheduling.PRIORITY,
                        preempt=preempt,
                    ),
                    profile_when_idle=False,
                )
            )

        always, off = servicer(Preempt.ALWAYS), servicer(Preempt.OFF)
        measurement = Measurement(always, off, extent)
        try:
            await measurement.run()
        finally:
            await asyncio.gather(always.stop(), off.stop())
        return measurement.read()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="tideserve-profile-preemption")
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--memory-gib", type=float, default=1.0)
    for name, number in asdict(LoadExtent()).items():
        parser.add_argument(f"--{name}", type=int, default=number)
    given = vars(parser.parse_args())
    extent = LoadExtent(**{name: given[name] for name in asdict(LoadExtent())})
    memory_bytes = int(given["memory_gib"] * GIB)
    try:
        found = asyncio.run(measure(given["model_dir"], given["dtype"], memory_bytes, extent))
    except (ServiceError, SystemUnavailable) as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
