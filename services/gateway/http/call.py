"""From a checked request body to jobs for the cluster."""

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from services.common import genai
from services.common.clock import monotonic_s, unix_s
from services.core.request import Limits, Sampling
from services.gateway.errors import ContextExceeded, InvalidRequest, ModelNotFound
from services.gateway.http.format import ChatFormat, CompletionFormat, Envelope, Format
from services.gateway.http.requests import ChatRequest, CompletionRequest, Generation, Prompt
from services.gateway.message import Job
from services.gateway.request_record import RequestRecord
from services.gateway.served_model import ServedModel
from services.gateway.tokenizer import TextPool

SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class PromptSource:
    """A prompt that is not tokenised yet."""

    # Characters or items, which is what making the ids costs.
    size: int
    # Token ids for a context of so many tokens; may raise InvalidRequest.
    token_ids: Callable[[int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request that is not tokenised yet."""

    request: Generation
    envelope: Envelope
    layout: Format
    # One for each choice.
    prompts: tuple[PromptSource, ...]

    @property
    def stream(self) -> bool:
        """Whether the client wants server-sent events."""
        return bool(self.request.stream)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with token counts."""
        options = self.request.stream_options
        return options is not None and bool(options.include_usage)


class CallFactory:
    """Knows the model; makes calls of requests and jobs of calls."""

    def __init__(
        self, model: ServedModel, pool: TextPool, max_model_len: Callable[[], int]
    ) -> None:
        """`max_model_len`: longest sequence that any worker holds at the moment."""
        self._model = model
        self._pool = pool
        self.max_model_len = max_model_len

    def chat(self, request: ChatRequest, response_id: str) -> Call:
        """A call of /v1/chat/completions; raises GatewayError."""
        self._check(request)
        template = self._model.template
        if template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions")

        def token_ids(tokens_max: int) -> tuple[int, ...]:
            text = template.render(request.template_messages())
            # The template writes the special tokens itself.
            return tuple(self._model.tokenizer.encode(text, False, tokens_max))

        prompt = PromptSource(sum(len(m.content) for m in request.messages), token_ids)
        return Call(request, self._envelope(response_id), ChatFormat(), (prompt,))

    def completion(self, request: CompletionRequest, response_id: str) -> Call:
        """A call of /v1/completions; raises GatewayError."""
        self._check(request)
        prompts = tuple(map(self._prompt, request.prompt))
        return Call(request, self._envelope(response_id), CompletionFormat(), prompts)

    async def jobs(self, call: Call) -> list[Job]:
        """Tokenise; one job for each choice.

        Raises:
            GatewayError: if a prompt is unusable, or too long for the context.
        """
        context = self.max_model_len()
        jobs = []
        for index, prompt in enumerate(call.prompts):
            make = functools.partial(prompt.token_ids, context)
            prompt_ids = await self._pool.run(make, prompt.size)
            job_id = call.envelope.response_id
            if len(call.prompts) > 1:
                job_id += f"-{index}"
            jobs.append(self._job(job_id, call.request, prompt_ids, context))
        return jobs

    def _check(self, request: Generation) -> None:
        model = self._model
        if request.model != model.name:
            raise ModelNotFound(
                f"the model {request.model[:128]!a} does not exist; '{model.name}' is served here",
                param="model",
            )
        if any(token_id >= model.vocab_size for token_id in request.stop_token_ids or ()):
            raise InvalidRequest(
                f"'stop_token_ids' must be below the vocabulary's size {model.vocab_size}",
                param="stop_token_ids",
            )
        if request.top_k is not None and request.top_k > model.vocab_size:
            raise InvalidRequest(
                f"'top_k' must be at most the vocabulary's size {model.vocab_size}", param="top_k"
            )

    def _prompt(self, prompt: Prompt) -> PromptSource:
        tokenizer, vocab_size = self._model.tokenizer, self._model.vocab_size

        def token_ids(tokens_max: int) -> tuple[int, ...]:
            if isinstance(prompt, str):
                return tuple(tokenizer.encode(prompt, True, tokens_max))
            if max(prompt) >= vocab_size:
                raise InvalidRequest(
                    f"token ids must be below the vocabulary's size {vocab_size}", param="prompt"
                )
            return prompt

        return PromptSource(len(prompt), token_ids)

    def _envelope(self, response_id: str) -> Envelope:
        return Envelope(response_id, unix_s(), self._model.name)

    def _job(
        self, job_id: str, request: Generation, prompt_ids: tuple[int, ...], context: int
    ) -> Job:
        seed = request.seed if request.seed is not None else secrets.randbits(SEED_BITS)
        sampling = Sampling(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(0, request.top_k or 0),
            # Negative seeds are allowed and mean what their bits mean.
            seed=seed % 2**64,
        )
        stop_ids = frozenset(request.stop_token_ids or ())
        if not request.ignore_eos:
            stop_ids |= self._model.eos_ids
        return Job(
            request_id=job_id,
            model=self._model.name,
            prompt_ids=prompt_ids,
            sampling=sampling,
            limits=_limits(request, len(prompt_ids), context, stop_ids),
            stop=request.stop,
        )


def _limits(
    request: Generation, prompt_tokens: int, context: int, stop_ids: frozenset[int]
) -> Limits:
    """The limits that fit into the context; raises InvalidRequest where they do not."""
    if prompt_tokens == 0:
        raise InvalidRequest("the prompt has no tokens; send some text", param="prompt")
    where = "messages" if isinstance(request, ChatRequest) else "prompt"
    wanted = request.output_limit()
    if prompt_tokens + (wanted or 1) > context:
        raise ContextExceeded(
            f"this model's maximum context length is {context} tokens, but you requested "
            f"{prompt_tokens + (wanted or 1)} tokens ({prompt_tokens} in the {where}, "
            f"{wanted or 1} in the completion); shorten one of them",
            param=where,
        )
    max_tokens = wanted or context - prompt_tokens
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' {min_tokens} is above the {max_tokens} tokens that fit; lower it",
            param="min_tokens",
        )
    return Limits(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_ids)


def note_call(record: RequestRecord, call: Call) -> None:
    """Tell the record what is asked for; nothing of what was said."""
    request = call.request
    settings = {
        genai.REQUEST_MAX_TOKENS: request.output_limit(),
        genai.REQUEST_TEMPERATURE: request.temperature,
        genai.REQUEST_TOP_P: request.top_p,
        genai.REQUEST_TOP_K: request.top_k,
        genai.REQUEST_SEED: request.seed,
        genai.REQUEST_CHOICE_COUNT: len(call.prompts) if len(call.prompts) > 1 else None,
    }
    record.parsed_s = monotonic_s()
    record.model = call.envelope.model
    record.settings = {name: value for name, value in settings.items() if value is not None}
