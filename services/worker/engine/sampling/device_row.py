"""What a GPU needs to sample from a row of logits. Imports no Triton."""

from typing import NamedTuple

from services.worker.engine.model.cpu_kernels.token_choice import DrawTerms
from services.worker.engine.sampling.grammar import GrammarRefused
from services.worker.engine.sampling.request_state import SampleRow
from services.worker.engine.sampling.rules import Bias, ForbiddenTokens, TokenCounts


class DeviceRow(NamedTuple):
    """What to sample from a row of logits. `counts` None: no penalties.

    `number` in [0, 1) selects the token; see `draw_tokens`.
    """

    seq_id: str
    terms: DrawTerms
    number: float
    counts: TokenCounts | None = None
    bias: Bias | None = None
    forbidden: ForbiddenTokens | None = None
    top_logprobs: int | None = None

    @property
    def changes(self) -> bool:
        """Whether rules change the row's logits."""
        return not (self.counts is None and self.bias is None and self.forbidden is None)


def device_row(output: SampleRow, number: float, failed: dict[str, str]) -> DeviceRow:
    """Return the row for the device sampler; a failure goes to `failed`, and no rule applies."""
    seq_id, index, state = output
    plain = DeviceRow(seq_id, state.draws.terms, number, top_logprobs=state.terms.top_logprobs)
    if state.refused is not None:
        failed[seq_id] = state.refused.reason
        return plain
    if state.rules is None:
        # Without rules, only `min_tokens` can modify a row: mask the stop tokens.
        if not state.modifies_logits(index):
            return plain
        return plain._replace(forbidden=ForbiddenTokens(None, list(state.terms.stop_ids)))
    try:
        forbidden = state.rules.forbidden(index)
    except GrammarRefused as refused:
        failed[seq_id] = str(refused)
        return plain
    return plain._replace(counts=state.rules.counts, bias=state.rules.bias, forbidden=forbidden)
