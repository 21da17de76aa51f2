"""Amounts of memory as people write them: "40GiB", "80 GB", 1073741824."""

import re
from fractions import Fraction

_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS = {"": 1, "b": 1, **_BINARY, **_DECIMAL}
_AMOUNT = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([A-Za-z]{0,3})")
_MAX_BYTES = 2**63 - 1
_WANTED = "a positive amount such as 40GiB, 1.5GB, 512MiB or 1073741824"


def parse_bytes(text: str | int) -> int:
    """Bytes in `text`: GiB, MiB, KiB and TiB are powers of 1024, GB, MB, KB and TB of 1000.

    The case of the letters does not matter. A fraction of a byte is dropped.

    Raises:
      ValueError: not an amount, zero, negative or more than 2^63 - 1.

    Example:
      >>> parse_bytes("40GiB"), parse_bytes("80 GB"), parse_bytes("4096")
      (42949672960, 80000000000, 4096)
    """
    if isinstance(text, bool) or not isinstance(text, (str, int)):
        raise ValueError(f"a memory size must be {_WANTED}, got {text!r}")
    if isinstance(text, int):
        return _checked(text, str(text) if abs(text) <= _MAX_BYTES else "a larger integer")
    shown = repr(text if len(text) <= 60 else text[:57] + "...")
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"a memory size must be {_WANTED}, got {shown}")
    number, unit = match.groups()
    if unit.lower() not in _UNITS:
        raise ValueError(
            f"unknown unit {unit!r} in {shown}; use B, KiB, MiB, GiB, TiB (powers of 1024) or "
            "KB, MB, GB, TB (powers of 1000)"
        )
    if "." in number and _UNITS[unit.lower()] == 1:
        raise ValueError(f"a size in bytes must be a whole number, got {shown}")
    # Exact: a float would round sizes above 2^53.
    return _checked(int(Fraction(number) * _UNITS[unit.lower()]), shown)


def _checked(amount: int, shown: str) -> int:
    if amount < 1:
        raise ValueError(f"a memory size must be {_WANTED}, got {shown}")
    if amount > _MAX_BYTES:
        raise ValueError(f"a memory size must be at most 2^63 - 1 bytes, got {shown}")
    return amount


def format_bytes(amount: int, like: int | None = None) -> str:
    """`amount` in the largest power of 1024 that it reaches, with up to two decimals.

    Args:
      amount: bytes.
      like: bytes whose unit is taken instead, so that amounts can be compared by eye; not where
        nothing would be left of `amount`.

    Example:
      >>> format_bytes(42949672960), format_bytes(1500), format_bytes(12)
      ('40 GiB', '1.46 KiB', '12 B')
      >>> format_bytes(629145600, like=42949672960)
      '0.59 GiB'
    """
    if isinstance(amount, bool) or not isinstance(amount, int) or amount < 0:
        raise ValueError(f"a number of bytes must be a non-negative integer, got {amount!r}")
    measure = amount if like is None else like
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if measure >= factor and 100 * amount >= factor:
            return f"{float(Fraction(amount, factor)):.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{amount} B"
