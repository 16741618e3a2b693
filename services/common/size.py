"""Parses and formats sizes in bytes with units, such as 1GiB."""

from services.common.errors import ConfigError

_SIZE_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SIZE_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_size_bytes(text: str) -> int:
    """Bytes in a size such as "1GiB", "400 MiB" or "1500000".

    Raises:
        ConfigError: if the text is not a size.
    """
    stripped = text.strip().lower()
    digits = stripped.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = stripped[len(digits) :].strip()
    try:
        size = float(digits) * _SIZE_UNITS[unit]
        # A fraction without a unit, such as 0.5, would be rounded down to a few bytes.
        if _SIZE_UNITS[unit] == 1 and not size.is_integer():
            raise ValueError
    except (ValueError, KeyError):
        raise ConfigError(
            f"'{text}' is not a size; write a number and a unit, such as 1GiB or 400MiB"
        ) from None
    if not 1 <= size < 2**60:
        raise ConfigError(
            f"the size '{text}' is out of range; it must be from 1 byte to below 1 EiB"
        )
    return int(size)


def format_size(size_bytes: int) -> str:
    """The size in the largest binary unit that divides it, as `parse_size_bytes` accepts it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _SIZE_UNITS[unit.lower()]
        if size_bytes >= scale and size_bytes % scale == 0:
            return f"{size_bytes // scale}{unit}"
    return str(size_bytes)
