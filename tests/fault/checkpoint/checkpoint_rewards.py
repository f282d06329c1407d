"""A reward that varies over random tokens, so that the advantages, and the gradients, are not zero."""

from __future__ import annotations

import zlib
from typing import Any


def varied(sample: Any) -> float:
    return (zlib.crc32(sample.response.encode()) % 1000) / 1000
