"""Private torch APIs: what depends on the version."""

from __future__ import annotations

import pytest
import torch

from wholestep import compat


@pytest.mark.parametrize(("version", "warns"), [("2.11.0+cu130", False), ("2.13.0+cpu", False), ("2.14.1", True), ("3.0.0", True)])
def test_a_torch_newer_than_the_tested_ones_is_said(version: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    compat.untested_version.cache_clear()
    said = compat.untested_version()
    compat.untested_version.cache_clear()
    assert (said is not None) == warns and (not warns or version in str(said))


def test_onednn_is_put_back() -> None:
    kept = torch._C._get_mkldnn_enabled()
    with compat.without_onednn():
        assert not torch._C._get_mkldnn_enabled()
    assert torch._C._get_mkldnn_enabled() == kept
