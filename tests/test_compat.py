"""Private torch APIs: what depends on the version."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from wholestep import compat


@pytest.mark.parametrize(
    ("version", "warns"), [("2.11.0+cu130", False), ("2.13.0+cpu", False), ("2.14.1", True), ("3.0.0", True)]
)
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


def test_onednn_is_put_back_by_two_threads() -> None:
    kept = torch._C._get_mkldnn_enabled()
    inside = threading.Event()

    def enter() -> None:
        with compat.without_onednn():
            inside.set()

    with compat.without_onednn():
        other = threading.Thread(target=enter)
        other.start()
        assert not inside.wait(0.2), "it waits: else it would put back what is switched off here"
    other.join()
    assert inside.is_set() and torch._C._get_mkldnn_enabled() == kept


@pytest.mark.parametrize(
    ("told", "bytes_held"),
    [
        (
            "GPU:0\nprocess {pid:>10d} uses     1634.000 MB GPU memory\nprocess          1 uses 9.000 MB GPU memory",
            1634 << 20,
        ),
        ("GPU:0\nprocess          1 uses     1634.000 MB GPU memory", None),
        ("GPU:0\nno processes are running", None),
        ("nvidia-ml-py not found, please install nvidia-ml-py", None),
    ],
)
def test_what_the_driver_says_this_process_holds(
    told: str, bytes_held: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "list_gpu_processes", lambda device=None: told.format(pid=os.getpid()))
    assert compat.bytes_on_card(torch.device("cuda")) == bytes_held


def test_a_driver_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: object = None) -> str:
        raise RuntimeError("cuda driver can't be loaded, is cuda enabled?")

    monkeypatch.setattr(torch.cuda, "list_gpu_processes", refuse)
    assert compat.bytes_on_card(torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("fact", "python"),
    [
        ("Eq(u0, 1)", "n == 1"), ("FloatTrueDiv(1.0, ToFloat(u0))", "1.0 / n"), ("Ne(u0, u1)", "n1 != n2"),
        ("2*Max(2, TruncToInt(zuf0 + 5.7)) > 38", "2*max(2, int(n + 5.7)) > 38"), ("Eq(4*u3, Mod(u1, 3))", "4*n1 == Mod(n2, 3)"),
    ],
)  # fmt: skip
def test_facts_about_data_read_as_python(fact: str, python: str) -> None:
    assert compat.in_python(fact) == python
