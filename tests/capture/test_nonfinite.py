"""nonfinite="skip": a step whose gradients are not finite changes nothing; any other is the step it would have been."""

import copy

import pytest
import torch
from torch import nn

import wholestep
from wholestep.errors import BadOption


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch["x"]), batch["y"])


def batch(bad=None):
    generator = torch.Generator().manual_seed(1)
    made = {"x": torch.randn(5, 6, generator=generator), "y": torch.randn(5, 1, generator=generator)}
    if bad is not None:
        made["x"][2, 3] = bad
    return made


def state_of(model, optimizer):
    tensors = {k: v.clone() for k, v in model.state_dict().items()}
    for i, p in enumerate(model.parameters()):
        tensors |= {f"{i}/{k}": v.clone() for k, v in optimizer.state[p].items() if k != "step"}
    return tensors


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),  # its update is not captured
}


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore::wholestep.WholestepWarning")
def test_a_bad_step_changes_nothing_and_a_good_one_is_the_same(kind, clip_norm):
    models = [network(), network()]
    opts = [OPTIMIZERS[kind](m.parameters()) for m in models]
    options = dict(clip_norm=clip_norm, backend="interpret", cache=False)
    skipping = wholestep.compile(models[0], loss_fn, opts[0], batch(), nonfinite="skip", **options)
    plain = wholestep.compile(models[1], loss_fn, opts[1], batch(), **options)
    for _ in range(2):
        assert torch.equal(skipping(batch()), plain(batch()))
    before = state_of(models[0], opts[0])
    for bad in (float("nan"), float("inf")):
        assert not skipping(batch(bad)).isfinite()
    for name, value in state_of(models[0], opts[0]).items():
        assert torch.equal(value, before[name]), name
    assert not skipping.grad_norm.isfinite()
    for name, value in state_of(models[1], opts[1]).items():
        assert torch.equal(value, before[name]), name
    plain(batch(float("nan")))
    assert not all(p.isfinite().all() for p in models[1].parameters()), "without the option torch's behaviour stays"


def test_training_goes_on_after_a_skipped_step():
    model = network()
    step = wholestep.compile(
        model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.05), batch(), nonfinite="skip", backend="interpret"
    )
    first = step(batch())
    step(batch(float("nan")))
    for _ in range(10):
        last = step(batch())
    assert last < first


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_with_accumulation_one_bad_micro_batch_leaves_the_whole_update_out(kind):
    """And what its micro-batches have written to buffers."""
    model = network()
    bad = [batch(), batch(float("nan"))]
    good = [batch(), batch()]
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = wholestep.compile(model, loss_fn, optimizer, good, accumulate=2, nonfinite="skip", backend="interpret")
    step(good)
    before = state_of(model, optimizer)
    for _ in range(2):
        step(bad)
        assert all(torch.equal(v, before[n]) for n, v in state_of(model, optimizer).items())
        assert not step.grad_norm.isfinite()
    step(good)
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert int(model[1].num_batches_tracked) == int(before["1.num_batches_tracked"]) + 2


def test_in_eager_a_bad_step_changes_nothing_either():
    model = network()

    def drawing(model, batch):
        if float(batch["y"].sum()) > 1e9:  # reads a value: cannot be captured
            return loss_fn(model, batch) * 2
        return loss_fn(model, batch)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = wholestep.compile(model, drawing, optimizer, batch(), nonfinite="skip", backend="interpret", cache=False)
    with pytest.warns(wholestep.WholestepWarning, match="eager PyTorch: .*depends on a value"):
        for _ in range(2):  # after the first one it is tried again
            step(batch())
    before = state_of(model, optimizer)
    step(batch(float("inf")))
    assert step.rung == "eager" and not step.grad_norm.isfinite()
    assert all(torch.equal(v, before[n]) for n, v in state_of(model, optimizer).items())


def test_a_bad_first_step_is_no_difference_from_eager():
    model = network()
    before = copy.deepcopy(model.state_dict())
    step = wholestep.compile(
        model,
        loss_fn,
        torch.optim.AdamW(model.parameters()),
        batch(),
        nonfinite="skip",
        backend="interpret",
        check="first",
    )
    step(batch(float("nan")))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


@pytest.mark.parametrize("options", [dict(nonfinite="ignore"), dict(nonfinite="skip", optimizer=None)])
def test_what_cannot_be_honoured_is_said(options):
    model = network()
    arguments = dict(optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) | options
    with pytest.raises(BadOption, match="nonfinite="):
        wholestep.compile(model, loss_fn, example_batch=batch(), **arguments)


@pytest.mark.slow
def test_compiled_buffers_are_kept_too():
    model = network()
    step = wholestep.compile(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), batch(), nonfinite="skip")
    step(batch())
    before = copy.deepcopy(model.state_dict())
    step(batch(float("nan")))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    step(batch())
    assert not any(torch.equal(v, before[n]) for n, v in model.state_dict().items() if "weight" in n or "running" in n)


class Replacing(nn.Module):
    """A running mean in a buffer that every forward replaces."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        return self.layer(x - self.mean)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore::wholestep.WholestepWarning")
def test_a_buffer_that_a_bad_step_replaces_is_put_back(kind, accumulate):
    torch.manual_seed(0)
    model = Replacing()
    optimizer = OPTIMIZERS[kind](model.parameters())
    good, bad = ([batch(), batch(value)] if accumulate == 2 else batch(value) for value in (None, float("nan")))
    options = dict(accumulate=accumulate, nonfinite="skip", backend="interpret", cache=False)
    step = wholestep.compile(model, loss_fn, optimizer, good, **options)
    step(good)
    before = state_of(model, optimizer)
    step(bad)
    assert all(torch.equal(v, before[n]) for n, v in state_of(model, optimizer).items())
    assert step(good).isfinite()
    assert not torch.equal(model.mean, before["mean"])


def test_in_eager_a_buffer_that_a_bad_step_replaces_is_put_back():
    model = Replacing()

    def reading(model, batch):
        return loss_fn(model, batch) * (2 if float(batch["y"].sum()) > 1e9 else 1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.warns(wholestep.WholestepWarning, match="eager PyTorch: .*depends on a value"):
        step = wholestep.compile(model, reading, optimizer, batch(), nonfinite="skip", backend="interpret", cache=False)
        step(batch())
        step(batch())
    mean = model.mean.clone()
    step(batch(float("nan")))
    assert step.rung == "eager" and torch.equal(model.mean, mean)
