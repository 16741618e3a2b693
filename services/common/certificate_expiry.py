"""Reads the expiry of a certificate from its file, without a certificate library."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
_SEQUENCE, _VERSION = 0x30, 0xA0
# Formats of UTCTime and GeneralizedTime, by their DER tags (RFC 5280 §4.1.2.5).
_TIMES = {0x17: "%y%m%d%H%M%SZ", 0x18: "%Y%m%d%H%M%SZ"}


def expiry_unix_s(path: Path) -> float | None:
    """Expiry of the first certificate in a PEM file, in seconds since 1970.

    None if the file is unreadable or contains no certificate.
    """
    try:
        return expiry_of(path.read_bytes())
    except OSError:
        return None


def expiry_of(pem: bytes) -> float | None:
    """Expiry of the first certificate in `pem`, in seconds since 1970; None without one."""
    try:
        text = pem.decode(encoding="ascii", errors="replace")
        block = text[text.index(_BEGIN) : text.index(_END) + len(_END)]
        return _not_after(ssl.PEM_cert_to_DER_cert(block))
    except (ValueError, IndexError):
        return None


def _not_after(der: bytes) -> float:
    """End of validity. Raises ValueError or IndexError if `der` is not a certificate."""
    _, signed, _ = _element(der, 0)
    _, certificate, _ = _element(der, signed)
    tag, _, end = _element(der, certificate)
    # The version is optional; serial number, algorithm, issuer and validity follow.
    at = end if tag == _VERSION else certificate
    for _ in range(3):
        _, _, at = _element(der, at)
    tag, validity, _ = _element(der, at)
    if tag != _SEQUENCE:
        raise ValueError("the certificate has no validity")
    _, _, at = _element(der, validity)
    tag, start, end = _element(der, at)
    if tag not in _TIMES:
        raise ValueError("the certificate's validity has no end")
    text = der[start:end].decode("ascii")
    return datetime.strptime(text, _TIMES[tag]).replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag, start of the content, and end of the DER element at offset `at` (X.690, 8.1)."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size]), start + size
    if start + length > len(der):
        raise ValueError("the certificate is truncated")
    return tag, start, start + length
