"""The table of devices, which driver names it answers to, and what is measured when it does not."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from wholestep.cost import measure
from wholestep.cost.devices import DEVICES, detect, find_device
from wholestep.cost.measure import measure_device, this_device
from wholestep.errors import BadOption


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H200", "h200"), ("NVIDIA H200 NVL", "h200-nvl"), ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"), ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA L4", "l4"), ("NVIDIA A10", "a10"), ("Tesla T4", "t4"), ("NVIDIA T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("GeForce RTX 3090", "rtx3090"), ("NVIDIA B200", "b200"),
    ],
)  # fmt: skip
def test_driver_names(driver_name, name) -> None:
    found = detect(driver_name)
    assert found is not None and found.name == name


@pytest.mark.parametrize(
    "driver_name",
    [
        "NVIDIA A10G", "NVIDIA L40S", "NVIDIA L40", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D", "NVIDIA H100",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GH200 480GB", "NVIDIA GB200",
        "NVIDIA A100", "NVIDIA H100 64GB HBM3", "NVIDIA H20", "AMD Instinct MI300X", "",
    ],
)  # fmt: skip
def test_another_card_is_not_taken_for_a_known_one(driver_name) -> None:
    assert detect(driver_name) is None


def test_the_same_chip_on_another_board_has_other_figures() -> None:
    for board, other in (("h100", "h100-pcie"), ("h100", "h100-nvl"), ("h200", "h200-nvl")):
        assert DEVICES[board].peak("bf16") > DEVICES[other].peak("bf16")
    assert DEVICES["a100-80gb"].bandwidth > DEVICES["a100-80gb-pcie"].bandwidth


def test_every_number_has_a_source_and_peaks_are_dense() -> None:
    for device in DEVICES.values():
        assert not device.measured and set(device.peaks) <= {"fp64", "fp32", "tf32", "bf16", "fp16", "fp8"}
        for field in dataclasses.fields(device):
            assert device.source(field.name), (device.name, field.name)
        assert device.peak("fp16") <= 2.3e15 and device.memory_bytes > 14 * 2**30
        if "fp8" in device.peaks:  # the sparse figure of one format is the dense one of the next
            assert device.peak("fp8") == pytest.approx(2 * device.peak("fp16"), rel=0.01)
    assert {"h200", "h100", "a100-80gb", "a100-40gb", "l4", "a10", "t4", "rtx4090", "rtx3090", "b200"} <= set(DEVICES)


def test_a_profile_is_data_that_nobody_changes() -> None:
    device = DEVICES["h200"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        device.bandwidth = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        device.peaks["bf16"] = 1.0  # type: ignore[index]


def test_names_as_people_write_them() -> None:
    assert find_device(" H200 ").name == "h200"
    with pytest.raises(BadOption, match=r"did you mean h200\?"):
        find_device("h20")
    with pytest.raises(BadOption, match="known: b200, h200"):
        find_device("abacus")


def test_a_format_without_units_is_an_error() -> None:
    with pytest.raises(BadOption, match=r"NVIDIA T4 has no peak for bf16.*it has fp64, fp32, fp16"):
        DEVICES["t4"].peak("bf16")


# ---- measuring ----


@pytest.fixture
def quick(monkeypatch, tmp_path):
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(measure, "LONGEST", 0.02)
    return tmp_path / "devices"


def test_the_cpu_is_measured_once_and_kept(quick, monkeypatch) -> None:
    device = measure_device("cpu")
    assert device.measured and device.name == "cpu" and "measured" in device.source("peaks")
    assert 1e8 < device.peak("fp32") < 1e14 and 1e8 < device.bandwidth < 1e13 and device.memory_bytes > 2**28
    assert set(device.peaks) == {"fp64", "fp32", "bf16", "fp16"}
    monkeypatch.setattr(measure, "_measure", lambda kind: pytest.fail("measured again"))
    assert measure_device("cpu") == device
    if not torch.cuda.is_available():
        assert this_device() == device


def test_a_broken_cache_is_measured_again(quick) -> None:
    measure_device("cpu")
    (path,) = quick.iterdir()
    for text in ("{", json.dumps({"peaks": {}}), "[]"):
        path.write_text(text, "utf-8")
        assert measure_device("cpu").measured and json.loads(path.read_text("utf-8"))["peaks"]


def test_other_threads_are_another_device(quick) -> None:
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            measure_device("cpu")
    finally:
        torch.set_num_threads(before)
    assert len(list(quick.iterdir())) == 2


def test_an_unknown_gpu_is_measured_not_guessed(quick, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure, "measure_device", lambda kind: f"measured {kind}")
    for name, expected in (("NVIDIA A10G", "measured cuda"), ("NVIDIA H200", DEVICES["h200"])):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert this_device() == expected


def test_no_gpu_and_no_such_kind() -> None:
    with pytest.raises(BadOption, match="use cpu or cuda"):
        measure_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(BadOption, match="no GPU here"):
            measure_device("cuda")


@pytest.mark.gpu
def test_a_gpu_is_measured(quick, monkeypatch) -> None:
    monkeypatch.setattr(measure, "LONGEST", 1.0)
    device = measure_device("cuda")
    known = detect(torch.cuda.get_device_name())
    assert device.measured and device.link_bandwidth > 1e9
    if known is not None:  # what is reached lies below what is printed, and not far
        assert 0.5 < device.peak("bf16") / known.peak("bf16") < 1.05
        assert 0.6 < device.bandwidth / known.bandwidth < 1.05
        assert known.memory_bytes == pytest.approx(device.memory_bytes, rel=0.03)


def test_the_document_has_the_table() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "cost.md").read_text("utf-8")
    rows = {line.split("`")[1]: line for line in text.split("## Devices")[1].splitlines() if line.startswith("| `")}
    assert set(rows) == set(DEVICES)
    for name, device in DEVICES.items():
        rates = [device.peak("fp32") / 1e12, device.peak("fp16") / 1e12, device.bandwidth / 1e9]
        assert all(
            f" {shown} |" in rows[name] for shown in (*(f"{rate:g}" for rate in rates), device.sources["all"])
        ), name
