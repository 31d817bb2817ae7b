"""What tests of operators share."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.ops.ahead import Launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launches:
    return Launches(monkeypatch, tmp_path)
