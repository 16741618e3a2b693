"""Samples tokens, as a pure function of (raw logits, terms, output so far, output index).

The `terms` of a sequence are its sampling parameters, prompt and stop tokens, as the planner sends
them with the first chunk that samples. The *draws* are the parameters of the random choice.

The steps for a row of logits, in this order:

1. Apply repetition, frequency and presence penalties, then add the bias (`rules.py`).
2. Mask tokens (`rules.py`) that the grammar does not allow, that would complete a bad word, that
   stop before `min_tokens`, or that are not in `allowed_token_ids`. If the grammar allows only end
   tokens, the other rules are ignored.
3. Apply temperature, top-k, top-p and min-p, and draw (`token_choice.py`).

Log probabilities are computed from the raw logits, before all steps. Rows without rules and log
probabilities only need the third step. `DeviceSampler` runs all steps on a GPU.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from services.core.logprobs import LogprobRows, joined
from services.core.planner.batch import SampleSpec, SampleTerms
from services.worker.engine.model.cpu_kernels.candidates import Scratch
from services.worker.engine.model.cpu_kernels.token_choice import TokenChooser
from services.worker.engine.model.cpu_kernels.token_scores import TokenScorer
from services.worker.engine.sampling.device_row import device_row
from services.worker.engine.sampling.grammar import GrammarRefused, Grammars, Unusable
from services.worker.engine.sampling.request_state import (
    RequestDraws,
    RequestState,
    SampleRow,
    draw_numbers,
)
from services.worker.engine.sampling.rules import SamplingRules, apply_penalties, has_rules
from services.worker.errors import InvalidBatch

if TYPE_CHECKING:
    # It imports Triton, which CPU builds of torch may lack.
    from services.worker.engine.sampling.device_sampler import DeviceSampler


def draw_tokens(
    chooser: TokenChooser,
    logits: npt.NDArray[np.floating],
    wanted: Sequence[tuple[RequestDraws, int]],
) -> tuple[list[int], list[float]]:
    """Choose a token for each row of `logits` [rows, vocab]; also returns each row's best logit.

    `wanted[i]`: the sequence of row i and the index of the output token. With temperature 0, and in
    a row without a finite maximum, the best token is chosen; ties go to the lowest id.

    The order is temperature, top-k, top-p, min-p, draw. Top-p keeps the best tokens until their
    probabilities reach `top_p` of what top-k has left; min-p keeps tokens that are at least `min_p`
    times as likely as the best token. Output token `i` is drawn by Philox, keyed by the seed, at
    counter `i`, so that a preempted or migrated sequence gets the same tokens.
    """
    return chooser(logits, [draws.terms for draws, _ in wanted], draw_numbers(wanted))


def logprob_rows(
    scorer: TokenScorer,
    logits: npt.NDArray[np.floating],
    rows: Sequence[int],
    token_ids: Sequence[int],
    top: int,
) -> LogprobRows:
    """Return log probabilities of `token_ids[i]` and the `top` best tokens at row `rows[i]`.

    `logits` is [any, vocab]; `top` is at most the vocabulary. Ties go to the lowest id.
    """
    ids, values = scorer(logits, rows, token_ids, top)
    return LogprobRows(top, ids.astype("<i4").tobytes(), values.astype("<f4").tobytes())


Logits = npt.NDArray[np.floating]
"""[rows, vocab], in the dtype of the model's activations."""
NOTHING_LEFT = (
    "no token is left to choose from: allowed_token_ids, bad_words, min_tokens and the grammar"
    " contradict each other; ask for fewer of them"
)


@dataclass(slots=True)
class Sampled:
    """Results by sequence id: the token, or the error text in `failed`.

    `logprobs` has a row for each sequence whose request asks for log probabilities.
    """

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, LogprobRows] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def add_to(self, other: "Sampled") -> None:
        """Add these results to `other`."""
        other.tokens.update(self.tokens)
        other.logprobs.update(self.logprobs)
        other.failed.update(self.failed)


class Sampler:
    """Keeps a state per sequence until `keep_only` removes it. Not thread-safe.

    On the host, logits are converted to `dtype`, float32 or float64. `device_sampler` samples the
    dtypes that it supports on a GPU.
    """

    def __init__(
        self,
        vocab_size: int,
        grammars: Grammars,
        dtype: torch.dtype,
        device_sampler: "DeviceSampler | None" = None,
    ) -> None:
        self._device_sampler = device_sampler
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._dtype = dtype
        scratch = Scratch.of(vocab_size, str(dtype).removeprefix("torch."))
        self._chooser = TokenChooser(scratch)
        self._scorer = TokenScorer(scratch)
        self._states: dict[str, RequestState] = {}

    def __len__(self) -> int:
        """Number of sequences with a state."""
        return len(self._states)

    def keep_only(self, seq_ids: Collection[str]) -> None:
        """Remove the states of sequences that are not in `seq_ids`."""
        # Compare the lengths first: the usual call has nothing to remove.
        if len(self._states) > len(seq_ids):
            for seq_id in [name for name in self._states if name not in seq_ids]:
                del self._states[seq_id]
            if self._device_sampler is not None:
                self._device_sampler.keep_only(seq_ids)

    def prepare(self, specs: Iterable[SampleSpec | None]) -> None:
        """Start compiling the grammars that `sample` will need, on another thread."""
        for spec in specs:
            if spec is None or spec.terms is None:
                continue
            if (grammar := spec.terms.sampling.grammar) is not None:
                self._grammars.start_compiling(grammar)

    def starts_ahead(self, specs: Iterable[tuple[str, SampleSpec]]) -> bool:
        """Whether `start` only launches work for a GPU: there, the mask of a grammar takes long."""
        return self._device_sampler is not None and not any(
            terms.sampling.grammar for name, spec in specs if (terms := self._terms(name, spec))
        )

    def _terms(self, seq_id: str, spec: SampleSpec) -> SampleTerms | None:
        state = self._states.get(seq_id)
        return spec.terms if spec.terms is not None or state is None else state.terms

    def sample(
        self, logits: torch.Tensor, specs: Sequence[tuple[str, SampleSpec]], into: Sampled
    ) -> None:
        """Sample a token from each row of `logits` [rows, vocab], which may be overwritten.

        `specs[i]` is the sequence id and spec of row i. Ties go to the lowest id. A row that is not
        finite, after an overflow in the model, is sampled greedily. Raises InvalidBatch if the
        terms of a sequence are unknown.
        """
        self.start(logits, specs)(into)

    def start(
        self, logits: torch.Tensor, specs: Sequence[tuple[str, SampleSpec]]
    ) -> Callable[[Sampled], None]:
        """As `sample`, without waiting for a GPU: the result waits, and adds the tokens.

        Call the result before the next `start` with one of the sequences.
        """
        wanted = [SampleRow(name, spec.index, self._update(name, spec)) for name, spec in specs]
        device_sampler = self._device_sampler
        if device_sampler is not None and device_sampler.takes(logits):
            return self._start_on_device(device_sampler, logits, wanted)
        sampled = Sampled()
        self._sample(logits, wanted, sampled)
        return sampled.add_to

    def _start_on_device(
        self, device_sampler: "DeviceSampler", logits: torch.Tensor, wanted: Sequence[SampleRow]
    ) -> Callable[[Sampled], None]:
        failed: dict[str, str] = {}
        numbers = draw_numbers([(output.state.draws, output.index) for output in wanted]).tolist()
        rows = [
            device_row(output, number, failed)
            for output, number in zip(wanted, numbers, strict=True)
        ]
        most = device_sampler.rows_max
        launched = [
            device_sampler.launch(logits[first : first + most], rows[first : first + most])
            for first in range(0, len(rows), most)
        ]

        def finish(into: Sampled) -> None:
            into.failed.update(failed)
            for draws in launched:
                tokens, logprobs = draws.collect()
                for place, (row, token) in enumerate(zip(draws.rows, tokens, strict=True)):
                    if token < 0 and row.changes:
                        into.failed.setdefault(row.seq_id, NOTHING_LEFT)
                    elif row.seq_id not in failed:
                        into.tokens[row.seq_id] = max(token, 0)
                        if place in logprobs:
                            into.logprobs[row.seq_id] = logprobs[place]

        return finish

    def _sample(self, logits: torch.Tensor, wanted: list[SampleRow], into: Sampled) -> None:
        """Run all three steps on the host."""
        modified = [
            row for row, output in enumerate(wanted) if output.state.modifies_logits(output.index)
        ]
        scored = [
            row for row, output in enumerate(wanted) if output.state.terms.top_logprobs is not None
        ]
        rows = self._rows(logits)
        if modified:
            _modify(rows, sorted(set(modified).difference(scored)), wanted, into)
            for row in sorted(set(modified).intersection(scored)):
                self._modify_and_score(rows, row, wanted, into)
        tokens, best = self._choose(rows, wanted)
        for row in modified:
            # All tokens are masked, unless the row has NaN after an overflow in the model.
            if best[row] == -np.inf and not np.isnan(rows[row]).any():
                into.failed.setdefault(wanted[row].seq_id, NOTHING_LEFT)
        if scored:
            self._add_logprobs(rows, sorted(set(scored).difference(modified)), tokens, wanted, into)
        for output, token in zip(wanted, tokens, strict=True):
            if output.seq_id not in into.failed:
                into.tokens[output.seq_id] = token

    def score(self, logits: torch.Tensor, token_ids: Sequence[int], top: int) -> LogprobRows:
        """Return log probabilities of `token_ids[i]` and the `top` best tokens at row i."""
        device_sampler = self._device_sampler
        if device_sampler is not None and device_sampler.takes(logits):
            most = device_sampler.rows_max
            parts = [slice(first, first + most) for first in range(0, len(token_ids), most)]
            return joined(
                device_sampler.score(logits[part], token_ids[part], top) for part in parts
            )
        rows = range(len(token_ids))
        return logprob_rows(self._scorer, self._rows(logits), rows, token_ids, top)

    def _rows(self, logits: torch.Tensor) -> Logits:
        """Return logits in host memory, without a copy if they already are."""
        rows: Logits = logits.to("cpu", self._dtype).numpy()
        return rows

    def _choose(self, logits: Logits, wanted: Sequence[SampleRow]) -> tuple[list[int], list[float]]:
        """Run step 3; returns the token and the best logit of each row."""
        draws = [(output.state.draws, output.index) for output in wanted]
        return draw_tokens(self._chooser, logits, draws)

    def _modify_and_score(
        self, logits: Logits, row: int, wanted: Sequence[SampleRow], into: Sampled
    ) -> None:
        """Run steps 1 to 3 for a row with rules and log probabilities."""
        # Log probabilities are those of the raw logits, so keep a copy until the token is known.
        raw = logits[row : row + 1].copy()
        _modify(logits, (row,), wanted, into)
        output = wanted[row]
        top = output.state.terms.top_logprobs
        if output.seq_id not in into.failed and top is not None:
            tokens, _ = self._choose(logits[row : row + 1], (output,))
            into.logprobs[output.seq_id] = logprob_rows(self._scorer, raw, (0,), tokens, top)

    def _add_logprobs(
        self,
        logits: Logits,
        rows: Sequence[int],
        tokens: Sequence[int],
        wanted: Sequence[SampleRow],
        into: Sampled,
    ) -> None:
        """Add log probabilities of unmodified rows, in groups of equal `top_logprobs`."""
        for top in {wanted[row].state.terms.top_logprobs for row in rows}:
            assert top is not None
            group = [row for row in rows if wanted[row].state.terms.top_logprobs == top]
            group_tokens = [tokens[row] for row in group]
            logprobs = logprob_rows(self._scorer, logits, group, group_tokens, top)
            for place, row in enumerate(group):
                into.logprobs[wanted[row].seq_id] = logprobs.rows(place, place + 1)

    def _update(self, seq_id: str, spec: SampleSpec) -> RequestState:
        """Return the sequence's state, updated by `spec`. Raises InvalidBatch."""
        # A spec with terms replaces the state; later specs carry only the new output tokens.
        if spec.terms is not None:
            created = self._states[seq_id] = self._create(spec.terms)
            return created
        state = self._states.get(seq_id)
        if state is None:
            raise InvalidBatch(f"the sampler never received the terms of {seq_id}")
        if state.rules is not None:
            state.rules.add(spec.output_ids)
        return state

    def _create(self, terms: SampleTerms) -> RequestState:
        draws = RequestDraws(terms.sampling)
        if not has_rules(terms):
            return RequestState(terms, draws, None)
        try:
            rules = SamplingRules(terms, self._vocab_size, self._grammars)
        except GrammarRefused as refused:
            return RequestState(terms, draws, None, Unusable(str(refused)))
        return RequestState(terms, draws, rules)


def _modify(
    logits: Logits, rows: Sequence[int], wanted: Sequence[SampleRow], into: Sampled
) -> None:
    """Apply steps 1 and 2 to these rows, in place."""
    counted = [
        (row, rules.counts) for row in rows if (rules := wanted[row].state.rules) is not None
    ]
    # Apply all penalties in a single vectorized pass, then the rules row by row.
    penalized = [(row, counts) for row, counts in counted if counts is not None]
    apply_penalties(logits, [row for row, _ in penalized], [counts for _, counts in penalized])
    for row in rows:
        seq_id, index, state = wanted[row]
        if state.refused is not None:
            into.failed[seq_id] = state.refused.reason
        elif state.rules is None:
            # Without rules, only `min_tokens` can modify a row: mask the stop tokens.
            logits[row, list(state.terms.stop_ids)] = -np.inf
        else:
            state.rules.add_bias(logits[row])
            try:
                state.rules.forbid(logits[row], index)
            except GrammarRefused as refused:
                into.failed[seq_id] = str(refused)
