"""Plans the microbatches of a pipeline: distributes decodes evenly, and prefills in rounds.

A *round* is the prefill work that is partitioned at once into microbatches of similar cost
(`lookahead.py`). Workers that merged into a group are the stages of the pipeline; the leader plans.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from services.core.cost.model import TOKEN_COSTS
from services.core.planner.config import PROMPT_TOKENS_MIN, BatchFormation, IterationConfig
from services.core.planner.lookahead import Piece, decodes_to_run, form_round, marginal
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.sequence_table import SequenceTable
from services.core.request import blocks_for

ROUND_BATCHES = 2
"""Tokens of a round, in full microbatches per stage. With several, microbatches can have similar
costs while most use their token budget."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """Limits for the microbatches of a round.

    `cost_max` bounds the cost of a microbatch, but prompts may always add `prompts_cost` to the
    decodes. `online_alone`: no requests of the class `batch` are admitted.
    """

    cost_max: float = inf
    prompts_cost: float = 0.0
    online_alone: bool = False


NO_ROUND_LIMITS = RoundLimits()


@dataclass(slots=True)
class PipelinePlanner:
    """Plans the microbatches of a group of `stages` > 1 stages.

    A decode runs in every `stages`-th microbatch. Running and waiting prefills are partitioned
    together into the microbatches of a round, which are then launched in order. A request that
    arrives meanwhile waits for the next round.
    """

    config: IterationConfig
    sequence_table: SequenceTable
    stages: int
    # Microbatches of the current round that are not launched yet.
    formed: deque[list[Piece[Sequence]]] = field(default_factory=deque)

    def schedule(self, plan: Plan, in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs beside `in_flight`, and allocate its blocks."""
        running = self.sequence_table.running
        ready = [seq for seq in running if len(seq.token_ids) - seq.computed == 1]
        chosen = self._share_decodes(ready, [other.decode_cost for other in in_flight])
        preempted = self._add_decodes(plan, chosen)
        if not self.formed:
            begun = [seq for seq in running if seq.remaining > 1]
            decodes = [seq for seq in running if seq.remaining <= 1]
            self._form(plan, begun, decodes, admit=not preempted)
        self._add_prefills(plan, self.config.max_batch_tokens - len(plan.decodes))
        plan.decode_cost = sum(self._decode_cost(seq) for seq in plan.decodes)
        plan.decode_cost += sum(
            self._decode_cost(prefill.sequence) for prefill in plan.prefills if prefill.samples
        )

    def _share_decodes(self, ready: list[Sequence], in_flight: list[float]) -> list[Sequence]:
        """The part of the `ready` decodes that the next microbatch runs, least recently run first.

        `in_flight` holds the cost of the next decodes of the sequences of each microbatch in
        flight.
        """
        ready.sort(key=lambda seq: (seq.last_microbatch, seq.age))
        costs = [self._decode_cost(seq) for seq in ready]
        count = decodes_to_run(costs, in_flight, self.stages)
        return ready[: min(count, self.config.max_batch_tokens)]

    def _add_decodes(self, plan: Plan, chosen: list[Sequence]) -> bool:
        """Add decodes and allocate their blocks; returns whether a sequence was preempted."""
        # Oldest first: the victim policy `newest` then never preempts a sequence added before.
        chosen.sort(key=lambda seq: seq.age)
        preempted = False
        block_size = self.config.block_size
        for sequence in chosen:
            if sequence.phase is not Phase.RUNNING:
                continue
            if sequence.lacks_block(block_size):
                preempted = self.sequence_table.grow(sequence) or preempted
                if sequence.phase is not Phase.RUNNING:
                    continue
            sequence.last_microbatch = plan.number
            plan.decodes.append(sequence)
        if preempted:  # other victim policies may preempt a sequence that was added
            plan.decodes = [decode for decode in plan.decodes if decode.phase is Phase.RUNNING]
        return preempted

    def _form(
        self,
        plan: Plan,
        begun: list[Sequence],
        decodes: list[Sequence],
        admit: bool,
        limits: RoundLimits = NO_ROUND_LIMITS,
    ) -> None:
        """Form the next round beside `decodes`; admit waiting sequences if `admit`."""
        config = self.config
        if not begun and not (admit and self.sequence_table.waiting):
            return
        ahead = config.batch_formation is BatchFormation.LOOKAHEAD
        if ahead:
            budget = ROUND_BATCHES * self.stages * config.max_batch_tokens - len(decodes)
        else:
            budget = config.max_batch_tokens - len(plan.decodes)
        if budget <= 0:
            return
        # Admission is lazy: waiting sequences start only while the token budget lasts.
        pieces: list[Piece[Sequence]] = []
        for sequence in self._to_prefill(begun, admit, limits.online_alone):
            tokens = min(sequence.remaining, budget)
            pieces.append(Piece(sequence, sequence.computed, tokens))
            budget -= tokens
            if not budget:
                break
        if not ahead:
            self.formed.append(pieces)
            return
        # Decodes join every microbatch of the round: add their mean cost to each part.
        model, base = config.cost_model or TOKEN_COSTS, 0.0
        if decodes:
            base = model.lam + sum(map(self._decode_cost, decodes)) / self.stages
        share, least = blocks_for(len(decodes), self.stages), config.microbatch_tokens_min
        self.formed.extend(
            form_round(
                pieces,
                self.stages,
                model,
                tokens_min=max(min(least, PROMPT_TOKENS_MIN), least - share),
                tokens_max=max(1, config.max_batch_tokens - share),
                base=base,
                cost_max=max(limits.cost_max, (base or model.lam) + limits.prompts_cost),
            )
        )

    def _to_prefill(
        self, begun: list[Sequence], admit: bool, online_alone: bool
    ) -> Iterator[Sequence]:
        """Yield running prefills, then waiting sequences, each admitted when it is yielded."""
        yield from begun
        config, sequence_table = self.config, self.sequence_table
        running_max = config.max_running * self.stages
        while admit and (first := sequence_table.next_to_admit(running_max, config.overtaken_max)):
            if online_alone and not first.online:
                return
            yield sequence_table.admit(first, running_max)

    def _add_prefills(self, plan: Plan, budget: int) -> None:
        """Add the prefills of the round's next microbatch, except those of preempted sequences.

        Tokens that do not fit beside the decodes run in the next round.
        """
        while self.formed and budget > 0 and not plan.prefills:
            for sequence, _, formed in self.formed.popleft():
                # A sequence whose last prompt token ran as a decode may decode by now, and need a
                # block, which only `_add_decodes` allocates: stay within its blocks.
                covered = sequence.blocks * self.config.block_size - sequence.computed
                tokens = min(formed, sequence.remaining, covered, budget)
                runs = sequence.phase is Phase.RUNNING and sequence.last_microbatch != plan.number
                if runs and tokens > 0:
                    sequence.last_microbatch = plan.number
                    plan.add(sequence, tokens)
                    budget -= tokens

    def _decode_cost(self, sequence: Sequence) -> float:
        """Cost that the next decode of a sequence adds to a microbatch; 1 without lookahead."""
        model = self.config.cost_model
        if model is None or self.config.batch_formation is not BatchFormation.LOOKAHEAD:
            return 1.0
        return marginal(model, len(sequence.token_ids), 1)
