"""Log probabilities of completions: one entry per token, whatever its bytes."""

import json

from services.core.request import TokenLogprobs
from services.gateway.http.logprobs import LogprobFormat
from services.gateway.serving.output import TokenWithLogprobs
from services.gateway.text.token_text import TokenTexts

VOCABULARY = {1: "<0xE2>", 2: "<0x9F>", 3: "A", 4: "<0x41>", 5: "\ufffd", 6: "\u2581A"}
DECODER = json.dumps({"type": "ByteFallback"}).encode()


def completion(token_id: int, top: list[int], by_id: bool = False) -> tuple[str, dict[str, float]]:
    """The token and its top tokens; each log probability is the negated token id."""
    texts = TokenTexts(VOCABULARY.get, DECODER, ())
    logprobs = TokenLogprobs(-token_id, 1, tuple((other, -other) for other in top))
    formatted = LogprobFormat(texts, by_id).completion([TokenWithLogprobs(token_id, 0, logprobs)])
    return formatted["tokens"][0], json.loads(bytes(formatted["top_logprobs"][0]))


def test_parts_of_characters_have_an_entry_each() -> None:
    token, top = completion(1, [1, 2, 5, 6])
    assert token == r"bytes:\xe2"
    assert top == {r"bytes:\xe2": -1, r"bytes:\x9f": -2, "\ufffd": -5, " A": -6}


def test_tokens_of_the_same_text_have_an_entry_each() -> None:
    assert completion(4, [3, 4]) == ("A", {"token_id:3": -3, "A": -4})
    assert completion(1, [3, 4])[1] == {"A": -3, "token_id:4": -4, r"bytes:\xe2": -1}
    # Ids above the vocabulary, of padded output layers, have no text.
    assert completion(3, [8, 9])[1] == {"": -8, "token_id:9": -9, "A": -3}


def test_tokens_by_id() -> None:
    token, top = completion(4, [3, 4], by_id=True)
    assert (token, top) == ("token_id:4", {"token_id:3": -3, "token_id:4": -4})
