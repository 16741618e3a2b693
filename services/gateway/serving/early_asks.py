"""Asks the scheduler about requests of busy classes before their prompts are tokenized.

Under overload most requests are refused. Tokenizing a long prompt takes longer than a refusal
needs, so the gateway first sends an estimated ask.
"""

from services.core.ask import Ask
from services.core.service import Service
from services.gateway.api.completion import CompletionRequest
from services.gateway.api.generation import GenerationRequest
from services.gateway.cluster.admission_client import AdmissionClient
from services.gateway.records.request_record import RequestRecord
from services.gateway.serving.prepared import choice_key
from services.gateway.serving.prompt_encoder import prompt_sizes
from services.gateway.vocabulary.errors import Expired, GatewayError, ServiceUnavailable

TARGET_SHARE = 0.5
"""Part of the target that the predicted wait of a class must exceed for an early ask."""
TOKENS_PER_CHARACTER = 0.25
"""Estimate before the first prompt."""
LEARNING_RATE = 0.05
"""Weight of a prompt in the estimate."""


class EarlyAsks:
    """Sends estimated asks to the scheduler."""

    def __init__(self, admission: AdmissionClient, model: str) -> None:
        self._admission = admission
        self._model = model
        self._tokens_per_character = TOKENS_PER_CHARACTER

    async def check(
        self, body: GenerationRequest, service: Service, record: RequestRecord, context: int
    ) -> None:
        """Return if the request may be tokenized; at once unless its class waits long.

        `context`: tokens of the longest sequence.

        Raises:
            ServiceUnavailable, Expired: the scheduler's refusal.
        """
        wait = self._admission.class_wait(self._model, service.service_class)
        if wait is None:
            return
        target_s = service.ttft_s or wait.limit_s
        if target_s is None or wait.optimistic_s <= TARGET_SHARE * target_s:
            return
        try:
            await self._admission.check(self._asks(body, service, record, context))
        except (ServiceUnavailable, Expired):
            raise
        except GatewayError:
            # The estimate may exceed a limit that the prompt does not exceed.
            return

    def _asks(
        self, body: GenerationRequest, service: Service, record: RequestRecord, context: int
    ) -> list[Ask]:
        """An estimated ask for each choice: a refusal must book time for all of them."""
        asks = list[Ask]()
        for size in prompt_sizes(body):
            tokens = size if _is_tokenized(body) else round(size * self._tokens_per_character)
            tokens = min(max(1, tokens), context - 1)
            for _ in range(body.choices):
                request_id, fingerprint = record.response_id, record.fingerprint
                if body.all_choices > 1:
                    request_id, fingerprint = choice_key(request_id, fingerprint, len(asks))
                ask = Ask(
                    request_id,
                    self._model,
                    prompt_tokens=tokens,
                    max_tokens=max(1, min(body.output_limit() or 1, context - tokens)),
                    service=service,
                    estimated=True,
                    fingerprint=fingerprint,
                    choice=len(asks),
                )
                asks.append(ask)
        return asks

    def learn(self, body: GenerationRequest, prompt_tokens: int) -> None:
        """Correct the estimate by a tokenized prompt."""
        if (size := sum(prompt_sizes(body))) and not _is_tokenized(body):
            error = prompt_tokens / size - self._tokens_per_character
            self._tokens_per_character += LEARNING_RATE * error


def _is_tokenized(body: GenerationRequest) -> bool:
    """Whether the client sent token ids."""
    return isinstance(body, CompletionRequest) and not isinstance(body.prompt[0], str)
