"""Amounts of memory as people write them, and as they are shown."""

import pytest

from wholestep.errors import BadOption
from wholestep.graph.bytes import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("12GiB", 12 * 2**30), ("1.5 GB", 1_500_000_000), ("800mib", 800 * 2**20), (" 17 b ", 17), ("4096", 4096),
        (4096, 4096), (".5KiB", 512), ("2TB", 2 * 10**12), ("1.KB", 1000),
    ],
)  # fmt: skip
def test_what_people_write(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    "text", ["12GBs", "12 G", "GiB", "", "-3GiB", "1.5", "0GiB", "0.2B", "12,5GiB", True, 0, -1, None, "1e9"]
)
def test_anything_else_is_one_line(text):
    with pytest.raises(BadOption, match="12GiB") as caught:
        parse_bytes(text)
    assert "\n" not in str(caught.value)


def test_back_again():
    assert [show_bytes(n) for n in (0, 17, 1536, 800 * 2**20, 12.34 * 2**30, 3 * 2**40)] == [
        "0 B", "17 B", "1.5 KiB", "800 MiB", "12.3 GiB", "3.0 TiB",
    ]  # fmt: skip
