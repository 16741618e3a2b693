"""Request fields, as seen by clients and by the worker."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.etcd import Store
from services.core.prefix.block_hash import tenant_salt
from services.core.service import Service, ServiceClass
from services.gateway.api.chat import ChatRequest
from services.gateway.api.parameters import CHAT
from services.gateway.model.sampling import choice_seed
from services.worker.start_frame import to_request
from tests.support.bad_inputs import VOCABULARY, BadInput, bad_inputs
from tests.support.byte_tokenizer import EOS_ID
from tests.support.gateway import TEXT, Case, gateway_case, text_ids
from tests.support.waiting import eventually
from tideserve.worker.v1 import worker_pb2

# The first words of the output, their ids and log probabilities.
THE = text_ids("The")
PROMPT = text_ids("hi")


def last_start(case: Case) -> worker_pb2.Start:
    return case.cluster.workers[0].starts[-1]


async def events(case: Case, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a complete stream."""
    answer = await case.http.post(path, json={"stream": True} | body)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def test_bad_inputs_are_refused_without_affecting_later_requests(case: Case) -> None:
    worker = case.cluster.workers[0]
    for bad in bad_inputs():
        path = "/v1/chat/completions" if bad.endpoint == "chat" else "/v1/completions"
        content = json.dumps(bad.body).encode()
        headers = {"content-type": "application/json"}
        answer = await case.http.post(path, content=content, headers=headers)
        _check_refusal(bad, answer.status_code, answer.json())
    assert worker.starts == []
    assert (await case.complete(max_tokens=1)).status_code == 200
    assert (await case.chat(max_tokens=1)).status_code == 200


def _check_refusal(bad: BadInput, status: int, body: Any) -> None:
    assert status == bad.status, (bad.name, body)
    assert (body["error"]["param"] or "").split(".")[0] == bad.param, bad.name


async def test_all_sampling_fields_reach_the_worker(case: Case) -> None:
    await case.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.25,
        seed=5,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias={"7": -100, "3": 0.5},
        bad_words=["no", " way"],
        allowed_token_ids=[9, 4, 9],
        logprobs=True,
        top_logprobs=4,
        prompt_logprobs=2,
        cache_salt="salt",
    )
    start = last_start(case)
    assert start.sampling == worker_pb2.Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.25,
        seed=5,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias=[
            worker_pb2.LogitBias(token_id=3, bias=0.5),
            worker_pb2.LogitBias(token_id=7, bias=-100),
        ],
        bad_words=[
            worker_pb2.TokenSequence(token_ids=text_ids(text))
            for text in ("no", " no", "way", " way")
        ],
        allowed_token_ids=[4, 9],
    )
    assert start.logprobs == worker_pb2.LogprobOptions(output_top=4, prompt_top=2)
    assert start.cache_salt == tenant_salt("", "salt")
    to_request(start, VOCABULARY, max_model_len=256, now_s=0.0)


async def test_choices_of_one_prompt_differ_in_their_seeds_only(case: Case) -> None:
    answer = (await case.chat(n=3, seed=7, max_tokens=5)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    usage = answer["usage"]
    starts = sorted(case.cluster.workers[0].starts, key=lambda start: start.choice)
    assert [start.request_id for start in starts] == [f"{answer['id']}-{k}" for k in range(3)]
    seeds = [start.sampling.seed for start in starts]
    assert seeds == [7, choice_seed(7, 1), choice_seed(7, 2)]
    assert len(set(seeds)) == 3
    assert len({tuple(start.prompt_ids) for start in starts}) == 1
    assert usage["prompt_tokens"] == len(starts[0].prompt_ids)
    assert usage["completion_tokens"] == 15
    metrics = (await case.http.get("/metrics")).text.splitlines()
    assert 'vllm:request_params_n_sum{model_name="m"} 9.0' in metrics
    name = 'tideserve_gateway_prompt_tokens_total{model_name="m"}'
    assert f"{name} {usage['prompt_tokens']}.0" in metrics


async def test_the_largest_numbers_of_choices_and_stop_strings(case: Case) -> None:
    stop = [f"never {number}" for number in range(15)] + ["tide"]
    for answer in (
        await case.complete(n=128, max_tokens=2, stop=stop),
        await case.chat(n=128, max_tokens=2, stop=stop),
    ):
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"]) == 128
    choices = await case.grpc.complete("hi", model="m", n=128, max_tokens=2, stop=stop)
    assert len(choices.choices) == 128
    refused = await case.complete(n=128, max_tokens=8193)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_tokens"


async def test_choices_of_several_prompts_are_ordered_by_prompt(case: Case) -> None:
    case.cluster.workers[0].script = lambda ids: [*ids] * 9
    body = {"prompt": ["a", "bc"], "n": 2, "max_tokens": 4, "seed": 1}
    answer = (await case.complete(**body)).json()
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == [(0, "aaaa"), (1, "aaaa"), (2, "bcbc"), (3, "bcbc")]
    assert answer["usage"]["prompt_tokens"] == 3
    seeds = {start.choice: start.sampling.seed for start in case.cluster.workers[0].starts}
    assert seeds == {0: 1, 1: choice_seed(1, 1), 2: 1, 3: choice_seed(1, 1)}
    streamed = await events(case, "/v1/completions", {"model": "m"} | body)
    streamed_texts = ["", "", "", ""]
    for chunk in streamed:
        streamed_texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed_texts == ["aaaa", "aaaa", "bcbc", "bcbc"]


async def test_a_failed_choice_ends_the_whole_request(case: Case) -> None:
    worker = case.paused(2)
    worker.stale_times = 0
    answer = await case.chat(n=2, max_tokens=5, messages=[])
    assert answer.status_code == 400
    worker.finish = worker_pb2.FINISH_REASON_ERROR
    worker.pause_at = None
    assert (await case.chat(n=3, max_tokens=5)).status_code == 503
    # The gateway aborts the other choices concurrently with its response.
    await eventually(lambda: not worker.active)


@pytest.mark.parametrize(("options", "continuous"), [({}, False), ({"include_usage": True}, True)])
async def test_usage_in_every_event_if_requested(
    case: Case, options: dict[str, Any], continuous: bool
) -> None:
    body = {
        "model": "m",
        "prompt": "hi",
        "max_tokens": 5,
        "stream_options": {"continuous_usage_stats": True} | options,
    }
    chunks = await events(case, "/v1/completions", body)
    if not continuous:
        assert all("usage" not in chunk for chunk in chunks)
        return
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 4, 5, 5]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


async def test_usage_in_events_is_that_of_their_choice(case: Case) -> None:
    body = {
        "model": "m",
        "prompt": ["a", "bcd"],
        "n": 2,
        "max_tokens": 4,
        "stream_options": {"continuous_usage_stats": True, "include_usage": True},
    }
    *chunks, last = await events(case, "/v1/completions", body)
    counts: dict[int, list[tuple[int, int]]] = {}
    for chunk in chunks:
        usage = chunk["usage"]
        counted = (usage["prompt_tokens"], usage["completion_tokens"])
        counts.setdefault(chunk["choices"][0]["index"], []).append(counted)
    for index in range(4):
        prompt_tokens = 1 if index < 2 else 3
        assert counts[index] == [(prompt_tokens, count) for count in (1, 2, 3, 4)]
    assert last["usage"]["prompt_tokens"] == 4 and last["usage"]["completion_tokens"] == 16


async def test_nul_in_a_prompt_is_text(case: Case) -> None:
    assert (await case.complete(prompt="a\0b", max_tokens=1)).status_code == 200
    assert list(last_start(case).prompt_ids) == text_ids("a\0b")


async def test_unknown_fields_are_listed_in_a_header(case: Case) -> None:
    answer = await case.chat(odd=1, max_tokens=1, user="u")
    assert answer.status_code == 200
    assert answer.headers["warning"] == '299 tideserve "ignored unknown fields: odd"'
    assert "warning" not in (await case.chat(max_tokens=1)).headers
    stream = await case.chat(odd=1, max_tokens=1, stream=True)
    assert stream.headers["warning"] == answer.headers["warning"]


@pytest.mark.gateway(unknown_fields="refuse")
async def test_unknown_fields_can_be_refused(case: Case) -> None:
    answer = await case.chat(odd=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unknown_parameter"
    assert (await case.chat(user="u", nvext={}, max_tokens=1)).status_code == 200


async def test_log_probabilities_of_a_chat(case: Case) -> None:
    answer = await case.chat(logprobs=True, top_logprobs=2, max_tokens=3)
    content = answer.json()["choices"][0]["logprobs"]["content"]
    top = [
        {"token": bytes_of(other), "logprob": -other / 64, "bytes": [*bytes_of(other).encode()]}
        for other in (3, 4)
    ]
    assert content == [
        {"token": letter, "logprob": -token_id / 64, "bytes": [ord(letter)], "top_logprobs": top}
        for letter, token_id in zip("The", THE, strict=True)
    ]
    chunks = await events(
        case,
        "/v1/chat/completions",
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": True,
         "max_tokens": 3},
    )  # fmt: skip
    assert chunks[0]["choices"][0]["logprobs"] is None
    tokens = [token for chunk in chunks[1:] for token in chunk["choices"][0]["logprobs"]["content"]]
    assert [token["token"] for token in tokens] == ["T", "h", "e"]
    assert all(token["top_logprobs"] == [] for token in tokens)


def bytes_of(token_id: int) -> str:
    """The ASCII character of a token of the byte tokenizer."""
    return next(chr(code) for code in range(128) if text_ids(chr(code)) == [token_id])


async def test_log_probabilities_of_a_completion(case: Case) -> None:
    answer = await case.complete(logprobs=1, max_tokens=3)
    first = bytes_of(3)
    assert answer.json()["choices"][0]["logprobs"] == {
        "tokens": ["T", "h", "e"],
        "token_logprobs": [-token_id / 64 for token_id in THE],
        "top_logprobs": [
            {first: -3 / 64, letter: -token_id / 64}
            for letter, token_id in zip("The", THE, strict=True)
        ],
        "text_offset": [0, 1, 2],
    }
    assert (await case.complete(max_tokens=3)).json()["choices"][0]["logprobs"] is None
    answer = await case.complete(logprobs=0, max_tokens=1, return_tokens_as_token_ids=True)
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{THE[0]}"]
    assert logprobs["top_logprobs"] == [{f"token_id:{THE[0]}": -THE[0] / 64}]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_with_log_probabilities(case: Case, stream: bool) -> None:
    body = {"model": "m", "prompt": "hi", "echo": True, "logprobs": 0, "max_tokens": 2}
    if stream:
        chunks = await events(case, "/v1/completions", body)
        choices = [chunk["choices"][0] for chunk in chunks]
        text = "".join(choice["text"] for choice in choices)
        logprobs: dict[str, list[Any]] = {}
        for choice in choices:
            for name, values in choice["logprobs"].items():
                logprobs.setdefault(name, []).extend(values)
    else:
        (choice,) = (await case.http.post("/v1/completions", json=body)).json()["choices"]
        text, logprobs = choice["text"], choice["logprobs"]
    assert text == "hiTh"
    assert logprobs["tokens"] == ["h", "i", "T", "h"]
    assert logprobs["token_logprobs"] == [
        None,
        *(-token_id / 64 for token_id in (PROMPT[1], *THE[:2])),
    ]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"i": -PROMPT[1] / 64}
    assert logprobs["text_offset"] == [0, 1, 2, 3]


async def test_an_echo_without_output(case: Case) -> None:
    answer = (await case.complete(echo=True, max_tokens=0, logprobs=1)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    assert choice["logprobs"]["tokens"] == ["h", "i"]
    assert answer["usage"]["completion_tokens"] == 0
    assert last_start(case).limits.max_tokens == 1
    answer = (await case.complete(echo=True, max_tokens=0, prompt=PROMPT)).json()
    assert answer["choices"][0]["text"] == "hi"
    assert (await case.complete(echo=True, max_tokens=1)).json()["choices"][0]["text"] == "hiT"


async def test_log_probabilities_of_prompts(case: Case) -> None:
    choice = (await case.complete(prompt_logprobs=1, max_tokens=1)).json()["choices"][0]
    (first, second) = choice["prompt_logprobs"]
    assert first is None
    own = PROMPT[1]
    assert second == {
        "3": {"logprob": -3 / 64, "rank": 1, "decoded_token": bytes_of(3)},
        str(own): {"logprob": -own / 64, "rank": own - 2, "decoded_token": "i"},
    }
    assert choice["logprobs"] is None
    chat = (await case.chat(prompt_logprobs=0, max_tokens=1)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert chat["prompt_logprobs"][0] is None
    # The first token of a prompt has no log probability.
    single = (await case.complete(prompt="h", prompt_logprobs=1, max_tokens=1)).json()
    assert single["choices"][0]["prompt_logprobs"] == [None]


async def test_token_ids_if_requested(case: Case) -> None:
    answer = (await case.complete(return_token_ids=True, max_tokens=3)).json()["choices"][0]
    assert (answer["prompt_token_ids"], answer["token_ids"]) == (PROMPT, THE)
    chat = (await case.chat(return_token_ids=True, max_tokens=3)).json()
    assert chat["prompt_token_ids"] == list(last_start(case).prompt_ids)
    assert chat["choices"][0]["token_ids"] == THE
    for path, more in (
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        body = {"model": "m", "max_tokens": 3, "return_token_ids": True} | more
        chunks = await events(case, path, body)
        first = chunks[0] if "messages" in more else chunks[0]["choices"][0]
        assert first["prompt_token_ids"] == list(last_start(case).prompt_ids)
        ids = [
            token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids", [])
        ]
        assert ids == THE
    plain = (await case.chat(max_tokens=3)).json()
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]


async def test_stop_reasons(case: Case) -> None:
    worker = case.cluster.workers[0]
    shown = {"include_stop_str_in_output": True}
    for fields, text, reason in (
        ({"stop": " comes"}, "The tide", " comes"),
        ({"stop": " comes"} | shown, "The tide comes", " comes"),
        ({"max_tokens": 3}, "The", None),
    ):
        (choice,) = (await case.complete(**({"max_tokens": 20} | fields))).json()["choices"]
        assert (choice["text"], choice["stop_reason"]) == (text, reason)
        chunks = await events(
            case, "/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 20} | fields
        )
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        assert chunks[-1]["choices"][0]["stop_reason"] == reason
    worker.script = lambda _: [*THE, EOS_ID]
    for fields, text in (
        ({}, "The"),
        (shown, "The"),
        (shown | {"skip_special_tokens": False}, "The<|im_end|>"),
    ):
        (choice,) = (await case.complete(**({"max_tokens": 9} | fields))).json()["choices"]
        assert (choice["text"], choice["stop_reason"]) == (text, None)
    (choice,) = (await case.complete(stop_token_ids=[EOS_ID])).json()["choices"]
    assert choice["stop_reason"] == EOS_ID


async def test_special_tokens_in_the_output(case: Case) -> None:
    case.cluster.workers[0].script = lambda _: [1, *THE]
    for skip, text in ((None, "The"), (True, "The"), (False, "<|im_start|>The")):
        answer = await case.complete(max_tokens=4, skip_special_tokens=skip)
        assert answer.json()["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"truncate_prompt_tokens": 3}, "hij"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 99}, "abcdefghij"),
        ({"truncate_prompt_tokens": -1}, "abcdefghij"),
    ],
)
async def test_a_prompt_is_truncated_as_requested(
    case: Case, fields: dict[str, Any], left: str
) -> None:
    answer = await case.complete(prompt="abcdefghij", max_tokens=1, echo=True, **fields)
    assert list(last_start(case).prompt_ids) == text_ids(left)
    assert answer.json()["choices"][0]["text"] == f"{left}T"
    assert answer.json()["usage"]["prompt_tokens"] == len(left)


async def test_a_prompt_beyond_the_context_may_be_truncated(case: Case) -> None:
    long = "x" * 300 + "end"
    assert (await case.complete(prompt=long, max_tokens=6)).status_code == 400
    answer = await case.complete(prompt=long, max_tokens=6, truncate_prompt_tokens=-1)
    assert answer.json()["usage"]["prompt_tokens"] == 250
    assert list(last_start(case).prompt_ids)[-3:] == text_ids("end")
    refused = await case.complete(prompt=long * 200, max_tokens=6, truncate_prompt_tokens=5)
    assert refused.status_code == 400
    assert "1024 tokens before truncation" in refused.json()["error"]["message"]


async def test_a_last_message_is_continued(case: Case) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    both = {"add_generation_prompt": False, "continue_final_message": True}
    await case.chat(messages=messages, max_tokens=1, **both)
    assert list(last_start(case).prompt_ids)[-6:] == text_ids("Well, ")
    await case.chat(messages=messages, max_tokens=1, add_generation_prompt=False)
    assert list(last_start(case).prompt_ids)[-2:] == [EOS_ID, *text_ids("\n")]
    messages[-1]["content"] = ""
    await case.chat(messages=messages, max_tokens=1, **both)
    assert list(last_start(case).prompt_ids)[-10:] == text_ids("assistant\n")


INTERACTIVE = Service(ServiceClass.INTERACTIVE, ttft_s=0.5, tpot_s=0.1)
TIERS = {"interactive": "priority", "standard": None, "batch": "flex"}
PROMISES: list[tuple[dict[str, Any], dict[str, str], Service]] = [
    ({"service_tier": "priority"}, {}, INTERACTIVE),
    ({"service_tier": "flex"}, {}, Service(ServiceClass.BATCH)),
    ({"priority": -3}, {}, replace(INTERACTIVE, rank=-3)),
    ({"priority": 2, "slo_class": "batch"}, {}, Service(ServiceClass.BATCH, rank=2)),
    ({"slo": {"ttft_ms": 400, "tpot_ms": 50}}, {}, Service(ttft_s=0.4, tpot_s=0.05)),
    ({}, {"x-slo-ttft-ms": "250", "x-slo-tpot-ms": "20.5"}, Service(ttft_s=0.25, tpot_s=0.0205)),
    ({}, {"x-gateway-inference-objective": "batch"}, Service(ServiceClass.BATCH)),
]


@pytest.mark.parametrize(("fields", "headers", "service"), PROMISES)
async def test_targets_reach_the_worker_and_responses_name_the_tier(
    case: Case, fields: dict[str, Any], headers: dict[str, str], service: Service
) -> None:
    body = {"model": "m", "prompt": "hi", "max_tokens": 1} | fields
    answer = await case.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    assert "warning" not in answer.headers
    start = to_request(last_start(case), VOCABULARY, max_model_len=256, now_s=0.0)
    assert start.service == service
    assert case.cluster.scheduler.asks[-1].service == last_start(case).service
    assert answer.json().get("service_tier") == TIERS[service.service_class]
    streamed = await case.http.post(
        "/v1/completions", json=body | {"stream": True}, headers=headers
    )
    event = json.loads(streamed.text.split("\n\n")[0].removeprefix("data: "))
    assert event.get("service_tier") == TIERS[service.service_class]


@pytest.mark.parametrize(
    ("fields", "gathered"),
    [
        ({"slo_class": "batch"}, True),
        ({"slo_class": "batch", "stop": "x"}, False),
        ({"slo_class": "batch", "stream": True}, False),
        ({"slo_class": "standard"}, False),
        ({}, False),
    ],
)
async def test_tokens_of_whole_responses_are_coalesced(
    case: Case, fields: dict[str, Any], gathered: bool
) -> None:
    answer = await case.complete(max_tokens=3, **fields)
    assert answer.status_code == 200
    assert (last_start(case).delivery == worker_pb2.DELIVERY_COALESCED) == gathered


async def test_neutral_targets_are_omitted(case: Case) -> None:
    answer = await case.complete(max_tokens=1, service_tier="auto", priority=0)
    assert "warning" not in answer.headers
    assert answer.json()["service_tier"] == "default"


@pytest.mark.parametrize("value", ["0", "nan", "inf", "-5", "soon", "1e99", ""])
async def test_targets_in_headers_are_checked(case: Case, value: str) -> None:
    body = {"model": "m", "prompt": "hi"}
    headers = {"x-slo-ttft-ms": value}
    answer = await case.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-slo-ttft-ms"


async def test_the_id_chosen_by_a_client(case: Case) -> None:
    answer = await case.complete(max_tokens=1, request_id="mine:1")
    assert answer.headers["x-request-id"] == "mine:1"
    assert answer.json()["id"].startswith("cmpl-")
    body = {"model": "m", "prompt": "hi", "max_tokens": 1, "request_id": "mine:2"}
    headers = {"x-request-id": "theirs"}
    answer = await case.http.post("/v1/completions", json=body, headers=headers)
    assert answer.headers["x-request-id"] == "theirs"


async def test_the_text_is_the_same_with_and_without_notes(case: Case) -> None:
    plain = (await case.chat(max_tokens=90)).json()
    body = (await case.chat(max_tokens=90, logprobs=True, top_logprobs=1)).json()
    text = plain["choices"][0]["message"]["content"]
    assert body["choices"][0]["message"]["content"] == text
    assert TEXT[:20] in text
    content = body["choices"][0]["logprobs"]["content"]
    data = bytes(byte for token in content for byte in token["bytes"])
    assert data.decode(errors="replace") == text


async def test_the_models_sampling_defaults_apply(store: Store, tmp_path: Path) -> None:
    advice = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 9}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "generation_config.json").write_text(json.dumps(advice))
    async with gateway_case(store, folder) as case:
        await case.chat()
        start = last_start(case)
        sampling = (start.sampling.temperature, start.sampling.top_p, start.sampling.top_k)
        assert sampling == (0.6, 0.95, 20)
        assert start.limits.max_tokens == 9
        await case.chat(temperature=0, top_p=1, top_k=0, max_tokens=11)
        start = last_start(case)
        sampling = (start.sampling.temperature, start.sampling.top_p, start.sampling.top_k)
        assert sampling == (0, 1, 0)
        assert start.limits.max_tokens == 11


@pytest.mark.gateway(model_aliases="gpt-4o, m,best")
async def test_aliases_name_the_model(case: Case) -> None:
    models = (await case.http.get("/v1/models")).json()["data"]
    assert [(row["id"], row["root"], row["parent"]) for row in models] == [
        ("m", "m", None),
        ("gpt-4o", "m", None),
        ("best", "m", None),
    ]
    assert (await case.http.get("/v1/models/best")).json()["id"] == "best"
    answer = await case.chat(model="gpt-4o", max_tokens=1)
    assert answer.json()["model"] == "gpt-4o"
    assert case.cluster.scheduler.asks[-1].model == "m"
    assert (await case.chat(model="gpt-5")).status_code == 404


async def test_tokens_of_prompts_and_chats(case: Case) -> None:
    body = {"prompt": "a\0b", "return_token_strs": True}
    tokenized = (await case.http.post("/tokenize", json=body)).json()
    assert tokenized["tokens"] == text_ids("a\0b")
    assert (tokenized["count"], tokenized["max_model_len"]) == (3, 256)
    assert tokenized["token_strs"] == ["a", "\u0100", "b"]
    messages = [{"role": "user", "content": "hi"}]
    chat = (await case.http.post("/tokenize", json={"model": "m", "messages": messages})).json()
    await case.chat(messages=messages, max_tokens=1)
    assert chat["tokens"] == list(last_start(case).prompt_ids)
    assert chat["token_strs"] is None
    empty = (await case.http.post("/tokenize", json={"prompt": ""})).json()
    assert (empty["count"], empty["tokens"]) == (0, [])
    # Prompts beyond the context can be counted, too.
    long = await case.http.post("/tokenize", json={"prompt": "x" * 900, "odd": 1})
    assert long.json()["count"] == 900
    assert "odd" in long.headers["warning"]
    assert case.cluster.workers[0].starts[:-1] == []


async def test_detokenization(case: Case) -> None:
    body = {"model": "m", "tokens": [1, *text_ids("hi"), EOS_ID]}
    answer = await case.http.post("/detokenize", json=body)
    assert answer.json() == {"prompt": "<|im_start|>hi<|im_end|>"}
    assert (await case.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "x" * 90_000}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["1"]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [VOCABULARY]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_bad_bodies_about_tokens(
    case: Case, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    headers = {"content-type": "application/json"}
    answer = await case.http.post(path, content=json.dumps(body).encode(), headers=headers)
    assert answer.status_code == status
    assert (answer.json()["error"]["param"] or "").split(".")[0] == param


async def test_all_routes_are_described(case: Case) -> None:
    description = (await case.http.get("/openapi.json")).json()
    version = (await case.http.get("/version")).json()["version"]
    assert description["info"]["version"] == version
    posts = {
        path: route["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path, route in description["paths"].items()
        if "requestBody" in route.get("post", {})
    }
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"} <= posts.keys()
    chat = posts["/v1/chat/completions"]
    assert set(ChatRequest.model_fields) | set(CHAT.ignored) == set(chat["properties"])
    assert chat["required"] == ["model", "messages"]
    assert "$ref" not in json.dumps(posts)
