"""The last table of a file that people may edit: `[end]`, or `[end.1a2b3c4d]` with a checksum of what decides about the numbers.

A file that was cut off has none. One in which a flipped bit made another training has another checksum; who edits such a line takes
the number away.
"""

from __future__ import annotations

import json
import zlib
from typing import Any


def checksum(values: Any) -> str:
    """Of what JSON can write."""
    return f"{zlib.crc32(json.dumps(values).encode()):08x}"


def is_end(table: Any) -> bool:
    """Whether it is such a table."""
    return isinstance(table, dict) and len(table) <= 1 and all(value == {} for value in table.values())
