"""The fixture that calls the command line."""

from __future__ import annotations

import pytest
from tests.cli.calls import Call, caller


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    return caller(capsys, monkeypatch)
