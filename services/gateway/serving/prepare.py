"""Turns a validated request body into choices that workers can run.

Applies the chat template, tokenizes, fills in sampling defaults, and checks grammar and limits.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

from services.common import genai
from services.common.clock import monotonic_s, unix_s
from services.core.adapter import Adapter
from services.core.prefix.block_hash import prompt_prefix, tenant_salt
from services.core.request import Limits, LogprobOptions, Request, Sampling
from services.core.service import Service
from services.gateway.api.chat import ChatRequest
from services.gateway.api.completion import COMPLETION_TOKENS, CompletionRequest
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.tokens import TEXT_TOKENS_MAX
from services.gateway.model.sampling import (
    bad_word_ids,
    check_choices,
    check_ids,
    choice_seed,
    kept_output_tokens,
    logprob_options,
    sampling_of,
)
from services.gateway.model.served_model import ServedModel
from services.gateway.records.request_record import RequestRecord
from services.gateway.serving.early_asks import EarlyAsks
from services.gateway.serving.grammar import checked_grammar
from services.gateway.serving.prepared import PreparedChoice, PreparedRequest, choice_key
from services.gateway.serving.prompt_encoder import PromptEncoder
from services.gateway.serving.service_policy import ServicePolicy, expected_tokens_of
from services.gateway.structure.checker import GrammarChecker
from services.gateway.text.tokenizer import TextPool
from services.gateway.tools.format import Thinking
from services.gateway.vocabulary.errors import BadRequest, ContextExceeded

# Maximum prompt before truncation, as a multiple of the context length.
TRUNCATED_CONTEXTS = 4
# Tokens that are hashed in the time of tokenizing one character, the cost unit of `TextPool.run`.
HASHED_PER_CHARACTER = 8
# Tokens at the end of a prompt that are searched for a reasoning mark such as <think>.
MARK_TOKENS = 16


class Preparer:
    """Turns request bodies into prepared requests for its model."""

    def __init__(
        self,
        model: ServedModel,
        pool: TextPool,
        max_model_len: Callable[[], int],
        checker: GrammarChecker,
        prefix_block_size: Callable[[], int] = lambda: 0,
        policy: ServicePolicy | None = None,
        early_asks: EarlyAsks | None = None,
    ) -> None:
        """`max_model_len`: longest sequence, in tokens, of any worker now.

        `prefix_block_size`: tokens per KV block if the scheduler ranks groups by cached prefixes,
        else 0. `policy` maps requests to service classes and SLO targets. `early_asks` asks the
        scheduler about a request before its prompt is tokenized; None: never.
        """
        self._early_asks = early_asks
        self._policy = policy or ServicePolicy()
        self._model = model
        self._pool = pool
        self._prompt_encoder = PromptEncoder(model, pool)
        self._checker = checker
        self.max_model_len = max_model_len
        self._prefix_block_size = prefix_block_size
        self._adapter: Adapter | None = None

    def with_adapter(self, adapter: Adapter) -> "Preparer":
        """A preparer for requests with an adapter of the model, which shares all parts."""
        preparer = copy(self)
        preparer._adapter = adapter
        return preparer

    async def prepare(self, body: GenerationRequest, record: RequestRecord) -> PreparedRequest:
        """Check the body against the model and tokenize it; writes its settings to `record`.

        Raises:
            GatewayError: if a field does not fit the model, or a prompt exceeds the context.
        """
        _record_settings(record, body, self._model.name)
        check_ids(body, self._model.vocab_size)
        service = self._policy.service_of(body, record.slo_headers, record.principal.owner)
        record.warnings += body.warnings
        if self._early_asks is not None:
            await self._early_asks.check(body, service, record, self.max_model_len())
        prompts = await self._prompts(body, record)
        thinking = self._thinking(prompts[0])
        sampling = await self._sampling(body)
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        prompt_tokens = sum(map(len, prompts))
        if self._early_asks is not None:
            self._early_asks.learn(body, prompt_tokens)
        echoed = isinstance(body, CompletionRequest) and bool(body.echo)
        logprobs = logprob_options(body, echoed, body.choices * prompt_tokens)
        check_choices(prompt_tokens, len(prompts), body.choices, sampling, field)
        grammar = await checked_grammar(body, self._model.chat, thinking, self._checker, record)
        sampling = replace(sampling, grammar=grammar)
        echoes = [await self._echo(body, *prompt) for prompt in enumerate(prompts)]
        record.tokenised_s = monotonic_s()
        choices = [
            choice
            for prompt_ids, echo in zip(prompts, echoes, strict=True)
            for choice in self._choices(body, record, prompt_ids, echo, sampling, logprobs, service)
        ]
        if (chat := self._model.chat) is not None and isinstance(body, ChatRequest):
            form = chat.form(body, thinking)
            choices = [replace(choice, chat=form) for choice in choices]
        if len(choices) > 1:
            choices = [_with_index(choice, index) for index, choice in enumerate(choices)]
        # Prompt log probabilities need a prefill of the whole prompt; a cached prefix is unused.
        if (block_size := self._prefix_block_size()) and not logprobs.runs_prompt:
            choices = await self._with_prefixes(choices, block_size)
        record.prompt_tokens = prompt_tokens
        return PreparedRequest(
            response_id=record.response_id,
            created=unix_s(),
            model=body.model,
            choices=tuple(choices),
            prompt_tokens=record.prompt_tokens,
            texts=self._model.tokenizer.texts,
            service_class=service.service_class,
        )

    async def token_ids(self, body: GenerationRequest, record: RequestRecord) -> tuple[int, ...]:
        """The tokens of the body's first prompt, without generating.

        Raises:
            GatewayError: if the prompt far exceeds the model's context.
        """
        check_ids(body, self._model.vocab_size)
        tokens_max = TRUNCATED_CONTEXTS * self.max_model_len()
        prompts = await self._prompt_encoder.encode(body, tokens_max, record)
        return prompts[0]

    async def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of tokens of the model, including special tokens.

        Raises:
            BadRequest: if there are too many tokens, or a token is outside the vocabulary.
        """
        if len(token_ids) > TEXT_TOKENS_MAX:
            raise BadRequest(
                f"'tokens' has {len(token_ids)} tokens, but the limit is {TEXT_TOKENS_MAX}; send"
                " fewer per request",
                param="tokens",
            )
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._model.vocab_size:
            raise BadRequest(
                f"token ids must be below the vocabulary's size {self._model.vocab_size}",
                param="tokens",
            )
        decode = partial(self._model.tokenizer.decode, token_ids, skip_special_tokens=False)
        return await self._pool.run(decode, len(token_ids))

    async def _prompts(
        self, body: GenerationRequest, record: RequestRecord
    ) -> list[tuple[int, ...]]:
        """Token ids of each prompt; long texts are tokenized in a thread."""
        context = self.max_model_len()
        if body.truncate_prompt_tokens is None:
            return await self._prompt_encoder.encode(body, context, record)
        tokens_max = TRUNCATED_CONTEXTS * context
        try:
            prompts = await self._prompt_encoder.encode(body, tokens_max, record)
        except ContextExceeded as error:
            raise ContextExceeded(
                f"a prompt may have at most {tokens_max} tokens before truncation; shorten it",
                param=error.param,
            ) from None
        return [_truncated(body, prompt_ids, context) for prompt_ids in prompts]

    def _thinking(self, prompt_ids: tuple[int, ...]) -> Thinking:
        """Whether a chat's output starts inside, before or after its reasoning."""
        if self._model.chat is None:
            return Thinking.OVER
        end = self._model.tokenizer.decode(prompt_ids[-MARK_TOKENS:], skip_special_tokens=False)
        return self._model.chat.thinking(end)

    async def _sampling(self, body: GenerationRequest) -> Sampling:
        """The sampling parameters of the first choice of each prompt."""
        bad_words: tuple[tuple[int, ...], ...] = ()
        if body.bad_words:
            # Each word is tokenized twice: with and without a space before it.
            bad_words = await self._pool.run(
                partial(bad_word_ids, body.bad_words, self._model.tokenizer),
                2 * sum(map(len, body.bad_words)),
            )
        return sampling_of(body, self._model.defaults, bad_words)

    def _choices(
        self,
        body: GenerationRequest,
        record: RequestRecord,
        prompt_ids: tuple[int, ...],
        echo: str,
        sampling: Sampling,
        logprobs: LogprobOptions,
        service: Service,
    ) -> list[PreparedChoice]:
        """The choices of a prompt, which differ only in seed; `echo` is the echoed prompt text."""
        eos_ids = self._model.eos_ids
        stop_ids = frozenset(body.stop_token_ids or ())
        if not body.ignore_eos:
            stop_ids |= eos_ids
        request = Request(
            request_id=record.response_id,
            prompt_ids=prompt_ids,
            sampling=sampling,
            limits=self._limits(body, len(prompt_ids), stop_ids),
            arrival_s=record.began_s,
            logprobs=logprobs,
            service=service,
            traceparent=record.context.traceparent if record.context is not None else "",
            cache_salt=tenant_salt(
                record.principal.owner,
                body.cache_salt or "",
                self._adapter.digest if self._adapter is not None else "",
            ),
            adapter=self._adapter,
        )
        first = PreparedChoice(
            request=request,
            model=self._model.name,
            stop=body.stop,
            eos_ids=eos_ids.difference(body.stop_token_ids or ()),
            n=body.choices,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            echo=echo,
            prompt_only=body.output_limit() == 0,
            prompt_top=body.prompt_logprobs,
            expected_tokens=expected_tokens_of(record.slo_headers),
            fingerprint=record.fingerprint,
            affinity=self._policy.affinity_of(body, record.slo_headers, record.principal.owner),
            held=sampling.grammar is not None and not body.stream,
            coalesced=_coalesced(body, service),
        )
        return [_with_seed(first, number) for number in range(body.choices)]

    async def _with_prefixes(
        self, choices: list[PreparedChoice], block_size: int
    ) -> list[PreparedChoice]:
        """The choices with block hashes of their prompts, for the scheduler's prefix ranking."""
        hashed, latest = list[PreparedChoice](), choices[0]
        for choice in choices:
            request, prefix = choice.request, latest.prefix
            # Choices of the same prompt share the hashes: hash each prompt once.
            if not hashed or request.prompt_ids is not latest.request.prompt_ids:
                ids, salt = request.prompt_ids, request.cache_salt
                prefix = await self._pool.run(
                    partial(prompt_prefix, ids, salt, block_size), len(ids) // HASHED_PER_CHARACTER
                )
            latest = replace(choice, prefix=prefix)
            hashed.append(latest)
        return hashed

    async def _echo(self, body: GenerationRequest, number: int, prompt_ids: tuple[int, ...]) -> str:
        """The text of prompt `number` if it is echoed, after truncation."""
        if not isinstance(body, CompletionRequest) or not body.echo:
            return ""
        prompt = body.prompt[number]
        if isinstance(prompt, str) and body.truncate_prompt_tokens is None:
            return prompt
        skip = body.skip_special_tokens is not False
        decode = partial(self._model.tokenizer.decode, prompt_ids, skip)
        return await self._pool.run(decode, len(prompt_ids))

    def _limits(
        self, body: GenerationRequest, prompt_tokens: int, stop_ids: frozenset[int]
    ) -> Limits:
        """Token limits and stop tokens of a request.

        Raises:
            BadRequest: if the prompt is empty, or `min_tokens` exceeds the output limit.
            ContextExceeded: if prompt and output exceed the context.
        """
        context = self.max_model_len()
        if prompt_tokens == 0:
            raise BadRequest("the prompt is empty; send some text", param="prompt")
        field = "messages" if isinstance(body, ChatRequest) else "prompt"
        wanted, kept = body.output_limit() or 1, kept_output_tokens(body)
        if prompt_tokens + wanted > context:
            raise ContextExceeded(
                f"this model's maximum context length is {context} tokens, but you requested "
                f"{prompt_tokens + wanted} tokens ({prompt_tokens} in the {field}, "
                f"{wanted} in the completion); shorten one of them",
                param=field,
            )
        max_tokens = wanted
        if body.output_limit() is None:
            default = COMPLETION_TOKENS if isinstance(body, CompletionRequest) else None
            default = default or self._model.defaults.max_tokens or context
            max_tokens = min(default, context - prompt_tokens, kept)
        min_tokens = body.min_tokens or 0
        if min_tokens > max_tokens:
            raise BadRequest(
                f"'min_tokens' is {min_tokens}, but the output is limited to {max_tokens} tokens;"
                " lower it or raise 'max_tokens'",
                param="min_tokens",
            )
        return Limits(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_ids)


def _truncated(
    body: GenerationRequest, prompt_ids: tuple[int, ...], context: int
) -> tuple[int, ...]:
    """The prompt, cut to `truncate_prompt_tokens`; -1 leaves room for the output."""
    keep = body.truncate_prompt_tokens
    assert keep is not None, "called only for requests with `truncate_prompt_tokens`"
    if keep == -1:
        room = body.output_limit()
        keep = max(1, context - (COMPLETION_TOKENS if room is None else max(1, room)))
    return prompt_ids[:keep] if body.truncation_side == "right" else prompt_ids[-keep:]


def _with_seed(first: PreparedChoice, number: int) -> PreparedChoice:
    """Choice `number` of a prompt, with a seed of its own; `first` is choice 0."""
    if number == 0:
        return first
    sampling = first.request.sampling
    sampling = replace(sampling, seed=choice_seed(sampling.seed, number))
    return replace(first, request=replace(first.request, sampling=sampling))


def _with_index(choice: PreparedChoice, index: int) -> PreparedChoice:
    """`choice` with an id of its own for scheduler and workers: the response id and `index`."""
    request_id, fingerprint = choice_key(choice.request_id, choice.fingerprint, index)
    request = replace(choice.request, request_id=request_id, choice=index)
    return replace(choice, request=request, fingerprint=fingerprint)


def _coalesced(body: GenerationRequest, service: Service) -> bool:
    """Whether a worker may send the tokens of several iterations in one message.

    True for batch requests that do not stream and have no stop strings: the gateway must see each
    token at once to detect a stop string.
    """
    return not (service.online or body.stream or body.stop)


def _record_settings(record: RequestRecord, body: GenerationRequest, model: str) -> None:
    """Write the settings of the request to its record, never its texts."""
    settings = {
        genai.REQUEST_MAX_TOKENS: body.output_limit(),
        genai.REQUEST_TEMPERATURE: body.temperature,
        genai.REQUEST_TOP_P: body.top_p,
        genai.REQUEST_TOP_K: body.top_k,
        genai.REQUEST_SEED: body.seed,
        genai.REQUEST_CHOICE_COUNT: body.all_choices if body.all_choices > 1 else None,
    }
    record.parsed_s = monotonic_s()
    record.model = model
    record.settings = {name: value for name, value in settings.items() if value is not None}
    if body.request_id is not None:
        record.note_client_id(body.request_id)
