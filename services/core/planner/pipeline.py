"""The pipeline planner: deals decodes evenly, and forms prefills into microbatches by rounds."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from services.core.cost.model import TOKENS
from services.core.planner.config import BatchFormation, IterationConfig
from services.core.planner.lookahead import Piece, decodes_to_run, form_round, marginal
from services.core.planner.plan import Plan
from services.core.planner.sequence import Phase, Sequence
from services.core.planner.sequence_table import SequenceTable
from services.core.request import blocks_for

ROUND_BATCHES = 2
"""How many full microbatches for each stage a round looks ahead to. With more than one, parts can
cost the same without leaving much of the token budget of each unused."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """What a microbatch of a round may cost, and whether only online requests start in it.

    Its prompts may add `prompts_cost` to its decodes in any case.
    """

    cost_max: float = inf
    prompts_cost: float = 0.0
    online_alone: bool = False


NO_LIMITS = RoundLimits()


@dataclass(slots=True)
class PipelinePlanner:
    """Fills one microbatch after the other of a group of `stages` > 1.

    A sequence that decodes runs in one of every `stages` microbatches. Prefills, begun and
    waiting, are formed into the microbatches of a round together, which are then handed out one by
    one. A request that arrives meanwhile waits for the next round.
    """

    config: IterationConfig
    sequence_table: SequenceTable
    stages: int
    formed: deque[list[Piece[Sequence]]] = field(default_factory=deque)

    def schedule(self, plan: Plan, in_flight: deque[Plan]) -> None:
        """Choose what `plan` runs beside `in_flight`, and take the blocks for it."""
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
        """A microbatch's share of the `ready` decodes, the one that ran longest ago first.

        `in_flight` is what decodes cost after each microbatch in flight.
        """
        ready.sort(key=lambda seq: (seq.last_microbatch, seq.age))
        costs = [self._decode_cost(seq) for seq in ready]
        count = decodes_to_run(costs, in_flight, self.stages)
        return ready[: min(count, self.config.max_batch_tokens)]

    def _add_decodes(self, plan: Plan, chosen: list[Sequence]) -> bool:
        """Add these decodes; returns whether a sequence was preempted."""
        # The oldest takes its block first, so `victims.newest` preempts none that was added.
        chosen.sort(key=lambda seq: seq.age)
        preempted = False
        block_size = self.config.block_size
        for sequence in chosen:
            if sequence.phase is not Phase.RUNNING:
                continue
            if len(sequence.token_ids) > sequence.blocks * block_size:
                preempted = self.sequence_table.grow(sequence) or preempted
                if sequence.phase is not Phase.RUNNING:
                    continue
            sequence.last_microbatch = plan.number
            plan.decodes.append(sequence)
        if preempted:  # by a policy perhaps one that was added
            plan.decodes = [one for one in plan.decodes if one.phase is Phase.RUNNING]
        return preempted

    def _form(
        self,
        plan: Plan,
        begun: list[Sequence],
        decodes: list[Sequence],
        admit: bool,
        limits: RoundLimits = NO_LIMITS,
    ) -> None:
        """Form the next round beside `decodes`; waiting sequences start if `admit`."""
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
        model, base = config.cost_model or TOKENS, 0.0
        if decodes:
            base = model.lam + sum(map(self._decode_cost, decodes)) / self.stages
        share = blocks_for(len(decodes), self.stages)
        self.formed.extend(
            form_round(
                pieces,
                self.stages,
                model,
                tokens_min=max(1, config.min_microbatch_tokens - share),
                tokens_max=max(1, config.max_batch_tokens - share),
                base=base,
                cost_max=max(limits.cost_max, (base or model.lam) + limits.prompts_cost),
            )
        )

    def _to_prefill(
        self, begun: list[Sequence], admit: bool, online_alone: bool
    ) -> Iterator[Sequence]:
        """Sequences that have begun, then waiting ones that can start: they start on request."""
        yield from begun
        config, sequence_table = self.config, self.sequence_table
        running_max = config.max_running * self.stages
        while admit and (first := sequence_table.next_to_admit(running_max, config.overtaken_max)):
            if online_alone and not first.online:
                return
            yield sequence_table.admit(first, running_max)

    def _add_prefills(self, plan: Plan, budget: int) -> None:
        """Add the next microbatch of the round, as far as its requests still run.

        Tokens that do not fit run in the next round. A sequence whose last prompt token was dealt
        as a decode, and that decodes since, may need a block first: `_add_decodes` takes it.
        """
        while self.formed and budget > 0 and not plan.prefills:
            for sequence, _, formed in self.formed.popleft():
                covered = sequence.blocks * self.config.block_size - sequence.computed
                tokens = min(formed, sequence.remaining, covered, budget)
                runs = sequence.phase is Phase.RUNNING and sequence.last_microbatch != plan.number
                if runs and tokens > 0:
                    sequence.last_microbatch = plan.number
                    plan.add(sequence, tokens)
                    budget -= tokens

    def _decode_cost(self, sequence: Sequence) -> float:
        """What its next decode adds to a microbatch."""
        model = self.config.cost_model
        if model is None or self.config.batch_formation is not BatchFormation.LOOKAHEAD:
            return 1.0
        return marginal(model, len(sequence.token_ids), 1)
