"""Sizes as people write them."""

import re


def parse_size(size: int | str) -> int:
    """A number of bytes from an integer or from text such as `"5GB"` (10^9 bytes) or `"5GiB"` (2^30).

    Raises:
        ValueError: it is neither, or not positive.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", str(size).strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"a size must be a number of bytes or text such as '5GB', found {size!r}")
    number, unit, binary = match.groups()
    bytes_ = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))
    if bytes_ <= 0:
        raise ValueError(f"a size must be positive, found {size!r}")
    return bytes_
