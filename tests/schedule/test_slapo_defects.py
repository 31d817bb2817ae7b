"""What Slapo got wrong, as tests: each of its published defects that needs no ranks, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.schedule.small_models import CARRIED, WIDTH, FastMLP, Net, loss, made
from torch import nn

import wholestep
from wholestep.errors import BadOption

QUICK: dict[str, Any] = {"backend": "interpret", "steps": 1, "eval_too": False}


@pytest.mark.parametrize("act", ["relu", "gelu", "silu"])
def test_a_replaced_mlp_keeps_its_activation(act: str) -> None:
    """FusedMLP turned every activation into GELU: here the wrong one is found, and the verb named."""
    model, optimizer, batch = made(1, act=act)
    sch = wholestep.schedule(model)
    sch["layers.*.mlp"].replace(FastMLP(act), params=CARRIED)
    assert wholestep.verify(model, loss, optimizer, batch, recipe=sch, **QUICK).ok


def test_a_replaced_mlp_of_another_activation_is_caught_with_the_verbs_name() -> None:
    model, optimizer, batch = made(1, act="relu")
    sch = wholestep.schedule(model)
    sch["head"].annotate("note", "harmless")
    sch["layers.*.mlp"].replace(FastMLP("gelu"), params=CARRIED)
    report = sch.verify(loss, optimizer, batch, edge_batches=(), **QUICK)
    assert not report.ok and report.first_departure is not None
    assert "line 2 of the schedule (replace layers.*.mlp by=FastMLP()" in str(report.first_departure)
    assert report.first_departure.module.startswith("layers.0")


def test_a_wrong_gradient_is_caught_though_the_forward_is_right() -> None:
    """Slapo verified one forward: what is wrong in the backward alone, as a missing exchange of gradients is, was not seen."""

    def half_the_gradient(module: Any, input: torch.Tensor) -> torch.Tensor:
        out = F.linear(input, module.weight, module.bias)
        return out.detach() * 0.5 + out * 0.5

    model, optimizer, batch = made(1)
    sch = wholestep.schedule(model)
    sch["head"].replace(half_the_gradient)
    report = sch.verify(loss, optimizer, batch, edge_batches=(), **QUICK)
    assert not report.ok and "replace head" in str(report.first_departure)
    assert all(row.ok for row in report.rows if row.kind == "loss")


def test_modules_with_default_arguments_are_replaced() -> None:
    """MLP and FastMLP both have an argument with a default; Slapo crashed on it."""
    model, optimizer, batch = made(1)
    sch = wholestep.schedule(model)
    sch["layers.0.mlp"].replace(make=lambda path, module: FastMLP(module.act), params=CARRIED)
    assert wholestep.verify(model, loss, optimizer, batch, recipe=sch, **QUICK).ok


VERBS: dict[str, Any] = {
    "replace": lambda sch: sch["layers.*.mlp"].replace(FastMLP(), params=CARRIED),
    "replace_all": lambda sch: sch.replace_all(nn.LayerNorm, "lean"),
    "fuse": lambda sch: sch["layers.*"].fuse(),
    "decompose": lambda sch: sch["head"].decompose(),
    "recompute": lambda sch: sch["layers.*"].recompute(),
    "precision": lambda sch: sch["head"].precision("fp32"),
    "annotate": lambda sch: sch["head"].annotate("note", 1, param="weight"),
    "cudagraph": lambda sch: sch.cudagraph("auto"),
    "print_values": lambda sch: sch["head"].print_values(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_changes_keys_parameters_hooks_or_classes(verb: str) -> None:
    """Checkpointing renamed `l1.weight` to `l1.mod.weight`. Here a step runs, and nothing is another."""
    model, optimizer, batch = made(2)
    keys, parameters, modules = list(model.state_dict()), list(model.parameters()), list(model.modules())
    called: list[Any] = []
    model.head.register_forward_hook(lambda module, args, out: called.append(isinstance(module, nn.Linear)))
    sch = wholestep.schedule(model)
    VERBS[verb](sch)
    step = wholestep.compile(model, loss, optimizer, batch, recipe=sch, backend="interpret", verbose=False)
    step(batch)
    assert list(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert all(type(a) is type(b) for a, b in zip(model.modules(), Net(2).modules(), strict=True))
    assert called and all(called)
    loaded = Net(2)
    loaded.load_state_dict(model.state_dict())


class Attention(nn.Module):
    """Causal, with a mask and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.p = 0.25

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
        if mask is not None:
            scores = scores + mask
        kept = F.dropout(scores.softmax(-1), self.p, self.training)
        return (kept @ v).transpose(1, 2).flatten(-2)


class OneCall(nn.Module):
    """The same through torch's one call."""

    def __init__(self, causal: bool = True, masked: bool = True) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.causal, self.masked = causal, masked

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        full = torch.zeros(x.shape[1], x.shape[1])
        if self.causal:
            full = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
        if mask is not None and self.masked:
            full = full + mask
        return F.scaled_dot_product_attention(q, k, v, full).transpose(1, 2).flatten(-2)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.attn(x, mask=mask))


def attends(p: float) -> tuple[Any, Any, Any, Any]:
    torch.manual_seed(0)
    model = Attends()
    model.attn.p = p
    batch = (torch.randn(2, 5, WIDTH), torch.zeros(1, 1, 1, 5).index_fill(-1, torch.tensor([3]), -1e4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, lambda model, batch: model(*batch).square().mean(), optimizer, batch


def test_attention_keeps_its_mask_and_its_causality() -> None:
    """Flash kernels dropped a given mask with a warning, SDPA lost causality: each is found, the right one passes."""
    model, squared, optimizer, batch = attends(p=0.0)
    for new, right in ((OneCall(), True), (OneCall(causal=False), False), (OneCall(masked=False), False)):
        sch = wholestep.schedule(model)
        sch["attn"].replace(new)
        assert wholestep.verify(model, squared, optimizer, batch, recipe=sch, **QUICK).ok is right


def test_attention_keeps_its_dropout() -> None:
    """A replacement that leaves dropout out draws fewer numbers; one whose forward has no mask is refused when recorded."""
    model, squared, optimizer, batch = attends(p=0.25)
    sch = wholestep.schedule(model)
    sch["attn"].replace(OneCall())
    report = wholestep.verify(model, squared, optimizer, batch, recipe=sch, **QUICK)
    assert not report.ok and any(row.kind == "random" and not row.ok for row in report.rows)

    class NoMask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(BadOption, match="NoMask does not take 'mask'"):
        wholestep.schedule(model)["attn"].replace(NoMask())


def test_parameters_are_carried_or_the_replacement_is_refused() -> None:
    model, _, _ = made(1)
    sch = wholestep.schedule(model)
    with pytest.raises(BadOption, match=r"FastMLP has a parameter 'up.weight' of its own"):
        sch["layers.0.mlp"].replace(FastMLP())
    with pytest.raises(BadOption, match=r"no 'fc3.weight'. did you mean fc"):
        sch["layers.0.mlp"].replace(FastMLP(), params={**CARRIED, "up.weight": "fc3.weight"})
    with pytest.raises(BadOption, match=r"shapes differ: \(4, 4\) of Linear.weight, \(11, 8\) of head.weight"):
        sch["head"].replace(nn.Linear(4, 4))
    with pytest.raises(BadOption, match="Linear does not take over 'bias'"):
        sch["head"].replace(nn.Linear(WIDTH, 11, bias=False))
    model.layers[0].mlp.fc1.register_forward_hook(lambda *_: None)
    with pytest.raises(BadOption, match=r"layers.0.mlp.fc1 has a hook, which would no longer run"):
        sch["layers.0.mlp"].replace(FastMLP(), params=CARRIED)
    assert not sch.lines


def test_a_forward_on_the_instance_is_not_passed_over() -> None:
    """A changed class would have no effect, in silence."""
    model, _, _ = made(1)
    model.head.forward = lambda input: input
    for record in (
        lambda place: place.replace(lambda module, input: input),
        lambda place: place.replace("lean"),
        lambda place: place.decompose(),
    ):
        with pytest.raises(BadOption, match="head has a forward that was put on the instance"):
            record(wholestep.schedule(model)["head"])


def test_after_every_verb() -> None:
    """The steps of the model alone, then of one line more each: the first that fails is named."""
    model, optimizer, batch = made(1)
    sch = wholestep.schedule(model)
    sch["layers.*"].recompute()
    sch["head"].replace(lambda module, input: F.linear(input, module.weight, module.bias) * 1.001)
    sch["embed"].annotate("note", 1)
    report = sch.verify(loss, optimizer, batch, each=True, edge_batches=(), **QUICK)
    assert not report.ok and "line 2 of the schedule (replace head" in str(report.first_departure)


def test_awkward_batches_are_made_of_the_first_one() -> None:
    """Slapo's embedding was wrong for id 0 and the ids of other ranks, and its test drew from 1 to the last but one."""
    model, optimizer, batch = made(1)

    def wrong_for_the_last_id(module: Any, input: torch.Tensor) -> torch.Tensor:
        rows = F.embedding(input, module.weight)
        return torch.where((input == 10).unsqueeze(-1), rows * 1.1, rows)

    batch["ids"].clamp_(max=9)
    sch = wholestep.schedule(model)
    sch["embed"].replace(wrong_for_the_last_id)
    report = sch.verify(loss, optimizer, batch, **QUICK)
    assert not report.ok and report.first_departure is not None
    assert report.first_departure.step == "edge 1" and "replace embed" in str(report.first_departure)


def test_what_is_not_captured_is_not_verified() -> None:
    model, optimizer, batch = made(1)

    def reads_data(model: Any, batch: Any) -> torch.Tensor:
        found = loss(model, batch)
        return found * float(str(found.item())[0] == "9" or 1.0)

    sch = wholestep.schedule(model)
    sch["head"].replace(lambda module, input: F.linear(input, module.weight, module.bias) * 2)
    with pytest.raises(wholestep.WholestepError, match="a recipe cannot be verified"):
        sch.verify(reads_data, optimizer, batch, edge_batches=(), **QUICK)
