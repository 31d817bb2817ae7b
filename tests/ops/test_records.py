"""Every operator of ours against its record: the reference on its cases, without data, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from wholestep import ops
from wholestep import relational as relational  # has operators of its own
from wholestep.graph.training_graph import tensors_in
from wholestep.ops.call import Call
from wholestep.ops.flops import flops
from wholestep.ops.record import FACTS, arguments_of, overloads, record, record_of
from wholestep.ops.traffic import traffic
from wholestep.ops.updates import UPDATES

OWN = sorted(name for name in FACTS if name.startswith("ws::"))
ON_CUDA_ONLY = {"ws::recurrent", "ws::recurrent_backward"}
"""cuDNN's; tests/ops/test_recurrent.py compares them with the unrolled layer there."""
TRIED_ELSEWHERE = {
    *(f"ws::{kind}" for kind in UPDATES),
    "ws::packed_recurrent_backward",
    "ws::edge_softmax",
    "ws::row_einsum",
    "ws::row_matmul",
}
"""By tests of their own, against torch's optimizers, by gradcheck, and as part of message functions."""


def overload(name: str) -> Any:
    return getattr(torch.ops.ws, name.removeprefix("ws::")).default


def cases_of(name: str) -> list[tuple[Any, ...]]:
    torch.manual_seed(0)
    given = record_of(overload(name)).cases
    return [] if given is None else list(given())


def test_every_operator_of_ours_has_a_record() -> None:
    registered = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("ws::")}
    assert registered - {"ws::signed_momentum"} == set(OWN), (
        "the one of docs/add-an-optimizer.md, once its test has run"
    )
    lacking = {n for n in OWN if record_of(overload(n)).cases is None or record_of(overload(n)).reference is None}
    assert lacking == ON_CUDA_ONLY | TRIED_ELSEWHERE


@pytest.mark.parametrize("name", OWN)
def test_it_computes_what_its_reference_does(name: str) -> None:
    known = record_of(overload(name))
    for case in cases_of(name):
        found, wanted = tensors_in(overload(name)(*case)), tensors_in(known.reference(*case))  # type: ignore[misc]
        for one, other in zip(found, wanted):  # an operator may give more: what its backward needs
            assert one.shape == other.shape and one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=known.tolerance, atol=known.tolerance, equal_nan=True)


@pytest.mark.parametrize("name", OWN)
def test_without_data_it_has_the_same_shape_and_strides(name: str) -> None:
    for case in cases_of(name):
        found = tensors_in(overload(name)(*case))
        with FakeTensorMode() as mode:
            told = tensors_in(overload(name)(*tree_map_only(Tensor, mode.from_tensor, case)))
        assert [(t.shape, t.dtype, t.stride()) for t in found] == [(t.shape, t.dtype, t.stride()) for t in told]


@pytest.mark.parametrize("name", OWN)
def test_it_costs_something_known(name: str) -> None:
    target = overload(name)
    assert record_of(target).kind is not None and record_of(target).flops is not None
    for case in cases_of(name):
        call = Call(name, "", arguments_of(target, case, {}), target(*case), target._schema)
        assert flops(call).found == "formula" and flops(call).count >= flops(call).model >= 0
        assert traffic(call).total >= 0
        scratch = record_of(target).scratch
        assert scratch is None or scratch(call) >= 0


def test_what_is_said_twice_is_an_error() -> None:
    with pytest.raises(AssertionError, match="ws::dropout: fuses is said twice"):
        record("ws::dropout", fuses=False)
    assert record_of(torch.ops.ws.dropout.default).fuses is True


def test_an_overload_goes_before_its_bare_name() -> None:
    bernoulli = torch.ops.aten.bernoulli
    assert record_of(bernoulli.p).unread == ("self",) and record_of(bernoulli.default).unread == ()
    assert record_of(bernoulli.p).flops is record_of(bernoulli.default).flops


def test_what_nobody_described_is_safe() -> None:
    known = record_of(torch.ops.aten.linalg_eig.default)
    assert (
        known.name == "aten::linalg_eig" and known.precision is None and known.compiled and known.decomposition is None
    )


def test_the_views_over_all_records() -> None:
    assert overloads("in_place") == ops.IN_PLACE and torch.ops.ws.sgd.default in ops.IN_PLACE
    assert torch.ops.ws.attention.default in ops.DECOMPOSITIONS and torch.ops.aten.index_put.default in ops.IN_ORDER
