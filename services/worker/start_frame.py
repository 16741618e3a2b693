"""Converts a gateway's Start frame to a request for the engine, and validates every field."""

import math
from collections.abc import Collection

from services.common.adapter_messages import to_adapter
from services.common.slo import to_service
from services.core.adapter import Adapter
from services.core.destination import Destination
from services.core.request import (
    BAD_WORD_TOKENS_MAX,
    BAD_WORDS_MAX,
    BIAS_MAX,
    CACHE_SALT_CHARS_MAX,
    EOS_IDS_MAX,
    GRAMMAR_BYTES_MAX,
    LOGIT_BIAS_MAX,
    NO_LOGPROBS,
    PROMPT_LOGPROBS_MAX,
    REPETITION_PENALTY_MAX,
    REPETITION_PENALTY_MIN,
    STOP_TOKEN_IDS_MAX,
    TOP_LOGPROBS_MAX,
    Grammar,
    GrammarKind,
    Limits,
    LogprobOptions,
    Request,
    Sampling,
)
from tideserve.worker.v1 import worker_pb2 as pb

STOP_TOKENS_MAX = STOP_TOKEN_IDS_MAX + EOS_IDS_MAX
REQUEST_ID_CHARS_MAX = 128
TRACEPARENT_CHARS_MAX = 256


class InvalidStart(ValueError):
    """A field of a Start frame is invalid; the message names the field."""


def to_request(
    start: pb.Start,
    vocab_size: int,
    max_model_len: int,
    now_s: float,
    adapter_rank_max: int = 0,
) -> Request:
    """The request in a Start frame; older gateways leave many fields unset.

    `adapter_rank_max`: largest rank of an adapter, 0 if the worker loads none.

    Raises:
        InvalidStart: if a field is invalid, so that the engine never gets such a value.
    """
    prompt, output = tuple(start.prompt_ids), tuple(start.output_ids)
    _check_fields(start, prompt, output, vocab_size)
    service = to_service(start.service)
    fault = service.fault()
    _require(fault is None, fault or "")
    return Request(
        request_id=start.request_id,
        prompt_ids=prompt,
        sampling=_sampling(start.sampling, vocab_size),
        limits=_limits(start.limits, len(prompt), vocab_size, max_model_len),
        arrival_s=now_s,
        logprobs=_logprobs(start, len(prompt), vocab_size),
        service=service,
        waited_s=start.waited_s,
        traceparent=start.traceparent,
        cache_salt=start.cache_salt,
        choice=start.choice,
        returnable=start.returnable,
        resumable=start.resumable,
        output_ids=output,
        server_losses=start.server_losses,
        hand_to=_destination(start.hand_to) if start.HasField("hand_to") else None,
        adapter=_adapter(start, adapter_rank_max),
    )


def _check_fields(
    start: pb.Start, prompt: tuple[int, ...], output: tuple[int, ...], vocab_size: int
) -> None:
    _require(
        0 < len(start.request_id) <= REQUEST_ID_CHARS_MAX,
        f"request_id must have 1 to {REQUEST_ID_CHARS_MAX} characters",
    )
    _require(len(prompt) > 0, "prompt_ids must not be empty")
    _require_ids("prompt_ids", prompt, vocab_size)
    _require_ids("output_ids", output, vocab_size)
    _require(
        not output or len(output) < start.limits.max_tokens,
        "output_ids must be fewer than max_tokens",
    )
    _require(
        len(start.traceparent) <= TRACEPARENT_CHARS_MAX,
        f"traceparent must have at most {TRACEPARENT_CHARS_MAX} characters",
    )
    _require(
        len(start.cache_salt) <= CACHE_SALT_CHARS_MAX,
        f"cache_salt must have at most {CACHE_SALT_CHARS_MAX} characters",
    )
    _require(0 <= start.waited_s < math.inf, "waited_s must be finite and not below 0")
    _require(start.choice >= 0, "choice must not be below 0")
    _require(start.server_losses >= 0, "server_losses must not be below 0")


def _destination(place: pb.GoTo) -> Destination:
    _require(bool(place.worker_id and place.address), "hand_to must name a worker and its address")
    return Destination(place.worker_id, place.address, place.group_id, place.epoch)


def _adapter(start: pb.Start, rank_max: int) -> Adapter | None:
    if not start.HasField("adapter"):
        return None
    # An engine without adapters would ignore it, and answer with the model alone.
    _require(rank_max > 0, "this worker loads no adapters; it needs `adapter_slots`")
    adapter = to_adapter(start.adapter)
    fault = adapter.fault()
    _require(fault is None, fault or "")
    _require(
        adapter.rank <= rank_max,
        f"the adapter has rank {adapter.rank}, but this worker's `adapter_rank_max` is {rank_max}",
    )
    return adapter


def _limits(limits: pb.Limits, prompt_tokens: int, vocab_size: int, max_model_len: int) -> Limits:
    _require(limits.max_tokens >= 1, "max_tokens must be at least 1")
    _require(
        prompt_tokens + limits.max_tokens <= max_model_len,
        f"prompt and max_tokens together must not exceed {max_model_len} tokens",
    )
    _require(0 <= limits.min_tokens <= limits.max_tokens, "min_tokens must lie in 0 to max_tokens")
    _require(
        len(limits.stop_token_ids) <= STOP_TOKENS_MAX,
        f"stop_token_ids must be at most {STOP_TOKENS_MAX} token ids",
    )
    _require_ids("stop_token_ids", limits.stop_token_ids, vocab_size)
    return Limits(limits.max_tokens, limits.min_tokens, frozenset(limits.stop_token_ids))


def _sampling(sampling: pb.Sampling, vocab_size: int) -> Sampling:
    # Older gateways send no repetition penalty; the protobuf default 0 would be invalid.
    has_penalty = sampling.HasField("repetition_penalty")
    repetition_penalty = sampling.repetition_penalty if has_penalty else 1.0
    _require(0 <= sampling.temperature <= 2, "temperature must lie in 0 to 2")
    _require(0 < sampling.top_p <= 1, "top_p must be above 0 and at most 1")
    _require(0 <= sampling.top_k <= vocab_size, f"top_k must lie in 0 to {vocab_size}")
    _require(0 <= sampling.min_p <= 1, "min_p must lie in 0 to 1")
    _require(-2 <= sampling.presence_penalty <= 2, "presence_penalty must lie in -2 to 2")
    _require(-2 <= sampling.frequency_penalty <= 2, "frequency_penalty must lie in -2 to 2")
    # Without a minimum, a divided logit could become infinite.
    _require(
        REPETITION_PENALTY_MIN <= repetition_penalty <= REPETITION_PENALTY_MAX,
        f"repetition_penalty must lie in {REPETITION_PENALTY_MIN} to {REPETITION_PENALTY_MAX}",
    )
    allowed = sampling.allowed_token_ids
    _require(
        len(allowed) <= vocab_size, f"allowed_token_ids must be at most {vocab_size} token ids"
    )
    _require_ids("allowed_token_ids", allowed, vocab_size)
    return Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(sampling, vocab_size),
        bad_words=_bad_words(sampling, vocab_size),
        allowed_token_ids=tuple(allowed),
        grammar=_grammar(sampling.grammar) if sampling.HasField("grammar") else None,
    )


def _logit_bias(sampling: pb.Sampling, vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias = tuple((entry.token_id, entry.bias) for entry in sampling.logit_bias)
    ids = {token_id for token_id, _ in bias}
    _require(
        len(bias) <= LOGIT_BIAS_MAX and len(ids) == len(bias),
        f"logit_bias must name at most {LOGIT_BIAS_MAX} tokens, each once",
    )
    _require_ids("logit_bias", ids, vocab_size)
    _require(
        all(-BIAS_MAX <= value <= BIAS_MAX for _, value in bias),
        f"logit_bias must lie in -{BIAS_MAX} to {BIAS_MAX}",
    )
    return bias


def _bad_words(sampling: pb.Sampling, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    bad_words = tuple(tuple(word.token_ids) for word in sampling.bad_words)
    _require(
        len(bad_words) <= BAD_WORDS_MAX and sum(map(len, bad_words)) <= BAD_WORD_TOKENS_MAX,
        f"bad_words must be at most {BAD_WORDS_MAX} sequences of {BAD_WORD_TOKENS_MAX} tokens"
        " together",
    )
    _require(all(bad_words), "bad_words must not hold an empty sequence")
    for word in bad_words:
        _require_ids("bad_words", word, vocab_size)
    return bad_words


def _grammar(grammar: pb.Grammar) -> Grammar:
    form = grammar.WhichOneof("body")
    _require(form is not None, "grammar must have a form: json_schema, regex or lark")
    assert form is not None
    text: str = getattr(grammar, form)
    size_bytes = len(text.encode())
    _require(
        0 < size_bytes <= GRAMMAR_BYTES_MAX, f"grammar must have 1 to {GRAMMAR_BYTES_MAX} bytes"
    )
    return Grammar(GrammarKind(form), text)


def _logprobs(start: pb.Start, prompt_tokens: int, vocab_size: int) -> LogprobOptions:
    if not start.HasField("logprobs"):
        return NO_LOGPROBS
    options = start.logprobs
    output = options.output_top if options.HasField("output_top") else None
    prompt = options.prompt_top if options.HasField("prompt_top") else None
    most = min(TOP_LOGPROBS_MAX, vocab_size)
    for name, top in (("output_top", output), ("prompt_top", prompt)):
        _require(top is None or 0 <= top <= most, f"{name} of logprobs must lie in 0 to {most}")
    _require(
        prompt is None or prompt_tokens * (1 + prompt) <= PROMPT_LOGPROBS_MAX,
        f"the log probabilities of {prompt_tokens} prompt tokens exceed {PROMPT_LOGPROBS_MAX}"
        " numbers; request fewer per token",
    )
    return LogprobOptions(output, prompt)


def _require_ids(name: str, ids: Collection[int], vocab_size: int) -> None:
    within = not ids or (min(ids) >= 0 and max(ids) < vocab_size)
    _require(within, f"{name} must lie in 0 to {vocab_size - 1}")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise InvalidStart(message)
