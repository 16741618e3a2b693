"""From a checked body to a prepared request: model, template, tokens, sampling, limits."""

import secrets
from collections.abc import Callable
from functools import partial

from services.common import genai
from services.common.clock import monotonic_s, unix_s
from services.core.request import Limits, Request, Sampling
from services.core.service import Service
from services.gateway.api.fields import Prompt
from services.gateway.api.requests import ChatRequest, CompletionRequest, Generation
from services.gateway.errors import ContextExceeded, InvalidRequest, ModelNotFound
from services.gateway.prepared import PreparedChoice, PreparedRequest
from services.gateway.request_record import RequestRecord
from services.gateway.served_model import ServedModel
from services.gateway.tokenizer import TextPool

SEED_BITS = 63


class Preparer:
    """Knows the model; makes prepared requests of bodies."""

    def __init__(
        self, model: ServedModel, pool: TextPool, max_model_len: Callable[[], int]
    ) -> None:
        """`max_model_len`: longest sequence that any worker holds at the moment."""
        self._model = model
        self._pool = pool
        self.max_model_len = max_model_len

    async def prepare(self, body: Generation, record: RequestRecord) -> PreparedRequest:
        """Check the body against the model and tokenise it; `record` learns what is asked for.

        Raises:
            GatewayError: if a field does not fit the model, or a prompt not the context.
        """
        _note(record, body, self._model.name)
        self._check(body)
        record.principal.check_model(body.model, self._model.name)
        prompts = await self._prompts(body)
        record.tokenised_s = monotonic_s()
        choices = tuple(
            self._choice(body, record, prompt_ids, index, len(prompts))
            for index, prompt_ids in enumerate(prompts)
        )
        record.prompt_tokens = sum(map(len, prompts))
        return PreparedRequest(
            response_id=record.response_id,
            created=unix_s(),
            model=self._model.name,
            choices=choices,
            prompt_tokens=record.prompt_tokens,
        )

    def _check(self, body: Generation) -> None:
        model = self._model
        if body.model != model.name:
            raise ModelNotFound(
                f"the model {body.model[:128]!a} does not exist; '{model.name}' is served here",
                param="model",
            )
        if any(token_id >= model.vocab_size for token_id in body.stop_token_ids or ()):
            raise InvalidRequest(
                f"'stop_token_ids' must be below the vocabulary's size {model.vocab_size}",
                param="stop_token_ids",
            )
        if body.top_k is not None and body.top_k > model.vocab_size:
            raise InvalidRequest(
                f"'top_k' must be at most the vocabulary's size {model.vocab_size}", param="top_k"
            )

    async def _prompts(self, body: Generation) -> list[tuple[int, ...]]:
        """Token ids of each prompt; long texts are tokenised in a thread."""
        context = self.max_model_len()
        match body:
            case ChatRequest():
                size = sum(len(message.content) for message in body.messages)
                return [await self._pool.run(partial(self._chat_ids, body, context), size)]
            case CompletionRequest():
                return [
                    await self._pool.run(partial(self._prompt_ids, prompt, context), len(prompt))
                    for prompt in body.prompt
                ]
        raise TypeError(f"no prompt is made of {type(body).__name__}")

    def _chat_ids(self, body: ChatRequest, context: int) -> tuple[int, ...]:
        template = self._model.template
        if template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions")
        # The template writes the special tokens itself.
        text = template.render(body.template_messages())
        return tuple(self._model.tokenizer.encode(text, False, context))

    def _prompt_ids(self, prompt: Prompt, context: int) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._model.tokenizer.encode(prompt, True, context))
        if max(prompt) >= self._model.vocab_size:
            raise InvalidRequest(
                f"token ids must be below the vocabulary's size {self._model.vocab_size}",
                param="prompt",
            )
        return prompt

    def _choice(
        self,
        body: Generation,
        record: RequestRecord,
        prompt_ids: tuple[int, ...],
        index: int,
        choices: int,
    ) -> PreparedChoice:
        stop_ids = frozenset(body.stop_token_ids or ())
        if not body.ignore_eos:
            stop_ids |= self._model.eos_ids
        request = Request(
            request_id=record.response_id + (f"-{index}" if choices > 1 else ""),
            prompt_ids=prompt_ids,
            sampling=_sampling(body),
            limits=_limits(body, len(prompt_ids), self.max_model_len(), stop_ids),
            arrival_s=record.began_s,
            service=Service(tenant=record.principal.owner),
            traceparent=record.context.traceparent if record.context is not None else "",
            choice=index,
        )
        return PreparedChoice(
            request=request,
            model=self._model.name,
            stop=body.stop,
            eos_ids=self._model.eos_ids.difference(body.stop_token_ids or ()),
        )


def _sampling(body: Generation) -> Sampling:
    seed = body.seed if body.seed is not None else secrets.randbits(SEED_BITS)
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        # Negative seeds are allowed and mean what their bits mean.
        seed=seed % 2**64,
    )


def _limits(body: Generation, prompt_tokens: int, context: int, stop_ids: frozenset[int]) -> Limits:
    """The limits that fit into the context; raises InvalidRequest where they do not."""
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens; send some text", param="prompt")
    where = "messages" if isinstance(body, ChatRequest) else "prompt"
    wanted = body.output_limit()
    if prompt_tokens + (wanted or 1) > context:
        raise ContextExceeded(
            f"this model's maximum context length is {context} tokens, but you requested "
            f"{prompt_tokens + (wanted or 1)} tokens ({prompt_tokens} in the {where}, "
            f"{wanted or 1} in the completion); shorten one of them",
            param=where,
        )
    max_tokens = wanted or context - prompt_tokens
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' {min_tokens} is above the {max_tokens} tokens that fit; lower it",
            param="min_tokens",
        )
    return Limits(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_ids)


def _note(record: RequestRecord, body: Generation, model: str) -> None:
    """Tell the record what is asked for; nothing of what was said."""
    prompts = len(body.prompt) if isinstance(body, CompletionRequest) else 1
    settings = {
        genai.REQUEST_MAX_TOKENS: body.output_limit(),
        genai.REQUEST_TEMPERATURE: body.temperature,
        genai.REQUEST_TOP_P: body.top_p,
        genai.REQUEST_TOP_K: body.top_k,
        genai.REQUEST_SEED: body.seed,
        genai.REQUEST_CHOICE_COUNT: prompts if prompts > 1 else None,
    }
    record.parsed_s = monotonic_s()
    record.model = model
    record.settings = {name: value for name, value in settings.items() if value is not None}
