"""Expected output lengths: estimates by key, bounds, and errors on recorded traces."""

import csv
import random
from collections.abc import Iterator
from importlib.resources import files

import pytest

from services.core.ask import Ask
from services.core.prefix.block_hash import ThinHashes
from services.core.scheduler import lengths
from services.core.scheduler.lengths import Keys, Lengths, keys_of
from services.core.service import Service, ServiceClass


def learnt(*samples: tuple[Keys, int], cut_off: bool = False) -> Lengths:
    known = Lengths()
    for keys, tokens in samples:
        known.add(keys, tokens, cut_off)
        known.check_invariants()
    return known


def mean_of(known: Lengths, keys: Keys) -> float:
    expected = known.expect(keys, 10_000)
    assert expected is not None
    return expected.mean


def test_without_samples_there_is_no_estimate() -> None:
    assert Lengths().expect(("a", ""), 100) is None


def test_a_key_without_samples_has_the_estimate_of_the_next() -> None:
    known = learnt(*[(("a", ""), 20)] * 10)
    assert mean_of(known, ("b", "")) == pytest.approx(20)
    assert mean_of(known, (None, "")) == pytest.approx(20)


def test_weight_of_a_key_grows_with_its_samples() -> None:
    common = [(("a", ""), 20)] * 50
    few = mean_of(learnt(*common, (("b", ""), 500)), ("b", ""))
    many = mean_of(learnt(*common, *[(("b", ""), 500)] * 200), ("b", ""))
    assert 20 < few < 60
    assert 400 < many < 600


def test_a_cut_off_output_is_a_lower_bound() -> None:
    known = learnt(*[(("a", ""), 200)] * 20)
    for _ in range(100):
        known.add(("a", ""), 10, cut_off=True)
    assert mean_of(known, ("a", "")) == pytest.approx(200)
    known.add(("a", ""), 2000, cut_off=True)
    assert mean_of(known, ("a", "")) > 200


def test_an_estimate_is_at_most_the_limit() -> None:
    known = learnt(*[(("a", ""), tokens) for tokens in (50, 60, 70, 80, 90) * 4])
    assert mean_of(known, ("a", "")) == pytest.approx(70, rel=0.05)
    assert known.expect(("a", ""), 16) == (16,)


def test_a_hint_is_clamped_once_lengths_are_known() -> None:
    few, many = learnt(*[(("a", ""), 100)] * 5), learnt(*[(("a", ""), 100)] * 80)
    for known, hint, mean in ((few, 1000, 1000), (many, 1000, 400), (many, 3, 25), (many, 90, 90)):
        expected = known.expect(("a", ""), 10_000, hint)
        assert expected is not None and expected.mean == pytest.approx(mean)


def test_the_oldest_key_of_a_level_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "KEYS_MAX", 3)
    known = learnt(*[((name, ""), 10) for name in "abc"], (("a", ""), 10), (("d", ""), 10_000))
    # "b" had the oldest sample; "a" is kept.
    assert mean_of(known, ("b", "")) == pytest.approx(mean_of(known, ("e", "")))
    assert mean_of(known, ("a", "")) < mean_of(known, ("e", ""))


@pytest.mark.parametrize("seed", range(10))
def test_random_samples_keep_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    known = Lengths()
    for _ in range(2000):
        keys = (rng.choice((None, *range(20))), rng.randrange(3), "")
        known.add(keys, rng.choice((0, 1, rng.randrange(100_000))), rng.random() < 0.3)
        expected = known.expect(keys, rng.randrange(1, 5000), rng.choice((0, 5)))
        assert expected is not None and 0 <= expected.mean <= 5000
    known.check_invariants()


def test_keys_separate_owners_sizes_and_classes() -> None:
    ask = Ask("r", "m", 300, 64, service=Service(tenant="o"), prefix=ThinHashes(8, (5, 6)))
    standard = ServiceClass.STANDARD
    own = ("o", standard)
    assert keys_of(ask) == (("o", 5), (*own, 9, 7), own, standard, "")
    assert keys_of(Ask("r", "m", 1, 1))[0] is None


def recorded() -> Iterator[tuple[str, int, int, str]]:
    """Requests of two Azure services by time: prompt tokens, output tokens and service."""
    rows = []
    for name in ("conv", "code"):
        text = files("tideserve.load").joinpath(f"data/azure_{name}_2023_slice.csv").read_text()
        for row in csv.DictReader(text.splitlines()):
            tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
            rows.append((row["TIMESTAMP"], *tokens, name))
    return iter(sorted(rows))


@pytest.mark.parametrize("owners", [True, False])
def test_the_error_on_recorded_traces_is_below_that_of_the_mean(owners: bool) -> None:
    """The mean absolute error is at most 0.8 of that of the running mean of the class."""
    known, error, error_of_mean, total = Lengths(), 0.0, 0.0, 0
    for count, (_, prompt, output, name) in enumerate(recorded()):
        service = Service(tenant=name if owners else "")
        keys = keys_of(Ask("r", "m", max(prompt, 1), 2000, service=service))
        if count > 50:
            error += abs(mean_of(known, keys) - output)
            error_of_mean += abs(total / count - output)
        known.add(keys, output, cut_off=False)
        total += output
    print(f"owners {owners}: {error / error_of_mean:.2f} of the mean's error")
    assert error <= 0.8 * error_of_mean
