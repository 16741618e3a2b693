"""Block hashes identify prompts by their prefixes."""

from services.core.prefix.block_hash import (
    HASH_BYTES,
    THIN_MAX,
    THIN_STRIDE,
    block_hashes,
    root_hash,
    sample_thin_hashes,
    tenant_salt,
    thin_hash,
)

ROOT = root_hash("model", "float32", "")
ANN_S = "9aab307ea59069f16243f34f9a5c7ab8"


def _hashes(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    return list(block_hashes(root, tokens, 4))


def test_prompts_with_a_common_prefix_share_hashes() -> None:
    first, second = _hashes([1, 2, 3, 4, 5, 6, 7, 8]), _hashes([1, 2, 3, 4, 5, 6, 7, 9])
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert {len(digest) for digest in first} == {HASH_BYTES}


def test_a_partial_block_has_no_hash() -> None:
    assert _hashes([1, 2, 3]) == []
    assert _hashes([1, 2, 3, 4, 5, 6, 7]) == _hashes([1, 2, 3, 4])


def test_a_hash_depends_on_the_preceding_tokens() -> None:
    assert len(set(_hashes([7] * 16))) == 4


def test_a_chain_goes_on_from_its_last_hash() -> None:
    whole = _hashes(list(range(20)))
    assert whole[:2] + list(block_hashes(whole[1], range(8, 20), 4)) == whole


def test_nothing_is_shared_across_models_types_and_salts() -> None:
    texts = [
        ("m", "float32", ""),
        ("m", "bfloat16", ""),
        ("n", "float32", ""),
        ("m", "float32", "s"),
    ]
    roots = [root_hash(*text) for text in texts]
    # Where one text ends and the next begins counts, too.
    roots += [root_hash("mf", "loat32", ""), root_hash("m", "", "float32")]
    assert len({_hashes([1, 2, 3, 4], root)[0] for root in roots}) == len(roots)


def test_an_owner_has_a_salt_that_no_other_and_no_anonymous_client_has() -> None:
    salts = [tenant_salt("ann", ""), tenant_salt("bob", ""), tenant_salt("ann", "s")]
    salts += [tenant_salt("", ""), tenant_salt("", "s"), tenant_salt("", "ann")]
    salts += [tenant_salt(owner, salt) for owner in ("", "bob") for salt in salts if salt]
    assert len(set(salts)) == len(salts), "a requested salt equals that of another owner"
    assert tenant_salt("ann", "s" * 128) == tenant_salt("ann", "s" * 128)
    assert len(tenant_salt("ann" * 100, "s" * 128)) < 64


def test_thin_hashes_are_of_every_eighth_block() -> None:
    hashes = _hashes(list(range(4 * 21)))
    thinned = sample_thin_hashes(hashes)
    assert thinned.stride == THIN_STRIDE
    assert thinned.hashes == (thin_hash(hashes[7]), thin_hash(hashes[15]))
    assert sample_thin_hashes(hashes[:7]).hashes == ()


def test_long_prompts_have_a_bounded_number_of_thin_hashes_and_share_them_with_short_ones() -> None:
    hashes = _hashes(list(range(4 * 8 * THIN_MAX * 5)))
    long, short = sample_thin_hashes(hashes), sample_thin_hashes(hashes[: 8 * THIN_MAX])
    assert len(short.hashes) == THIN_MAX
    assert THIN_MAX // 2 < len(long.hashes) <= THIN_MAX
    assert long.stride % short.stride == 0
    step = long.stride // short.stride
    assert short.hashes[step - 1 :: step] == long.hashes[: THIN_MAX // step]


def test_an_adapter_has_its_own_salts_and_its_absence_changes_none() -> None:
    digests = ("", "0" * 64, "1" * 64)
    owners, wanted = ("", "ann", "0" * 64), ("", "s", "1" * 64)
    salts = [tenant_salt(o, w, d) for o in owners for w in wanted for d in digests]
    assert len(set(salts)) == len(salts)
    # As before adapters were introduced.
    assert tenant_salt("", "", "") == ""
    assert tenant_salt("ann", "s", "") == tenant_salt("ann", "s") == ANN_S
