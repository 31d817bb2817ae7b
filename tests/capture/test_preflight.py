"""What is refused with a named error, and what is set aside and said: wrappers, scalers, checkpoints, compilers."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.twins import Side, Twins, class_batches, classify, eager_update, interpreted, mlp_side, small_mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

import wholestep
from wholestep.capture.optimizers import needs_closure
from wholestep.errors import BadLoss, BadOption, UnsupportedModel, UnsupportedOptimizer, WholestepWarning

BATCHES = class_batches()


def sgd_side(model: nn.Module) -> Side:
    return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), classify)


# ---- refused ----


@pytest.fixture
def lone_process(tmp_path: Any) -> Any:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_model_wrapped_by_fabric_is_refused() -> None:
    fabric = pytest.importorskip("lightning_fabric")
    wrapped = fabric.Fabric(accelerator="cpu", devices=1).setup_module(small_mlp())
    with pytest.raises(UnsupportedModel, match=r"Lightning Fabric.*model\.module"):
        interpreted(sgd_side(wrapped), BATCHES[0])


def test_ddp_is_refused(lone_process: None) -> None:
    """Guard: `_refuse_wrapper`. A captured DDP model would lose its all-reduce."""
    wrapped = nn.parallel.DistributedDataParallel(small_mlp())
    with pytest.raises(UnsupportedModel, match=r"DistributedDataParallel.*all-reduce.*pass the bare module"):
        interpreted(sgd_side(wrapped), BATCHES[0])
    with pytest.raises(UnsupportedModel, match="inner is wrapped in DistributedDataParallel"):
        holder = nn.Module()
        holder.inner = wrapped
        interpreted(sgd_side(holder), BATCHES[0])


def test_inference_mode_is_refused() -> None:
    side = sgd_side(small_mlp())
    with torch.inference_mode():
        with pytest.raises(
            UnsupportedModel, match=r"^inside of torch.inference_mode\(\) nothing can be trained\. compile outside"
        ):
            interpreted(side, BATCHES[0])
        made_inside = sgd_side(small_mlp())
    with pytest.raises(
        UnsupportedModel, match=r"weight was made inside of torch.inference_mode\(\), so it has no gradient"
    ):
        interpreted(made_inside, BATCHES[0])


def test_data_parallel_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"DataParallel.*pass the bare module"):
        interpreted(sgd_side(nn.DataParallel(small_mlp())), BATCHES[0])


def test_a_users_class_of_that_name_is_not_refused() -> None:
    class DataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    assert interpreted(sgd_side(DataParallel()), BATCHES[0]).rung == "whole step"


def test_fsdp_and_dtensor_are_refused(lone_process: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    sharded = fully_shard(small_mlp(), mesh=mesh)
    with pytest.raises(UnsupportedModel, match=r"fully_shard.*before fully_shard"):
        interpreted(sgd_side(sharded), BATCHES[0])
    model = small_mlp()
    model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Replicate()]))
    with pytest.raises(UnsupportedModel, match=r"0\.weight is a DTensor.*plain parameters"):
        interpreted(sgd_side(model), BATCHES[0])


def accelerated(**options: Any) -> tuple[Any, Any, list[torch.Tensor]]:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    model = small_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return accelerate.Accelerator(cpu=True, **options).prepare(model, optimizer, schedule)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_what_accelerate_prepared_is_trained_as_it_trains_it(precision: str) -> None:
    torch.manual_seed(0)
    ours, theirs = (Side(m, o, classify, s) for m, o, s in (accelerated(mixed_precision=precision) for _ in range(2)))
    theirs.model.load_state_dict(ours.model.state_dict())
    step = interpreted(ours, BATCHES[0], clip_norm=1.0)
    for batch in BATCHES:
        assert step(batch) == eager_update(theirs, batch, clip_norm=1.0)[0]
        ours.extra.step(), theirs.extra.step()
    assert step.rung == "whole step" and step.subject.optimizer is ours.optimizer.optimizer
    assert ours.optimizer.param_groups[0]["lr"] == theirs.optimizer.param_groups[0]["lr"] < 1e-2


def test_accelerates_own_accumulation_is_refused() -> None:
    model, optimizer, _ = accelerated(gradient_accumulation_steps=4)
    with pytest.raises(UnsupportedOptimizer, match=r"once in 4 batches .* use wholestep.compile\(accumulate=4\)"):
        interpreted(Side(model, optimizer, classify), BATCHES[0])


class Around(torch.optim.Optimizer):
    """An optimizer around another one, as libraries write them: without the base class's `__init__`."""

    def __init__(self, within: torch.optim.Optimizer) -> None:
        self.within, self.param_groups, self.state = within, within.param_groups, within.state

    def step(self, closure: Any = None) -> None:
        self.within.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.within.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.within.state_dict()


def test_an_optimizer_without_hooks_updates_by_its_own_call() -> None:
    def side() -> Side:
        model = small_mlp()
        return Side(model, Around(torch.optim.SGD(model.parameters(), lr=0.1)), classify)

    with pytest.warns(WholestepWarning, match="Around is not one of"):
        twins = Twins(side, BATCHES[0])
    twins.train(BATCHES)


def test_several_processes_are_refused(lone_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreted(mlp_side(), BATCHES[0]).rung == "whole step"
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 4)
    with pytest.raises(UnsupportedModel, match=r"one of 4 .*optimizer=None and reduce p.grad yourself"):
        interpreted(mlp_side(), BATCHES[0])
    side = mlp_side()
    side.optimizer = None
    assert interpreted(side, BATCHES[0]).rung == "whole step", "what the message advises must work"


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedModel) as caught:
        interpreted(mlp_side(), BATCHES[0])
    assert str(caught.value) == (
        "this process is one of 2 (WORLD_SIZE=2, and torch.distributed is not initialised): a captured step would train each "
        "replica alone. the distributed engine is not built yet; start one process, use torch's own loop, or optimizer=None and "
        "reduce p.grad yourself."
    )


@pytest.mark.parametrize("said", ["1", "0", "", "many"])
def test_a_world_of_one_is_no_obstacle(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", said)
    assert interpreted(mlp_side(), BATCHES[0]).rung == "whole step"


TWO_PROCESSES = """
import sys, torch, wholestep
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if "group" in sys.argv:
    torch.distributed.init_process_group("gloo")
try:
    wholestep.compile(model, lambda m, b: m(b).sum(), optimizer, torch.ones(3, 2), backend="interpret")
except wholestep.WholestepError as error:
    sys.stdout.write(f"refused: {error}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("group", ["", "group"])
def test_two_true_processes_are_refused(group: str, tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_PROCESSES)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "two.py", group]
    found = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert found.stdout.count("refused: this process is one of 2 ") == 2, found.stderr
    assert found.stdout.count("is initialised" if group else "is not initialised") == 2


@pytest.mark.parametrize(
    "criterion", [nn.CrossEntropyLoss(), nn.MSELoss(), F.cross_entropy, F.binary_cross_entropy_with_logits, F.mse_loss]
)
def test_a_criterion_in_place_of_a_loss_is_told_how_to_wrap_it(criterion: Any) -> None:
    name = type(criterion).__name__ if isinstance(criterion, nn.Module) else criterion.__name__
    side = mlp_side()
    side.loss_fn = criterion
    with pytest.raises(BadLoss) as caught:
        interpreted(side, BATCHES[0])
    assert str(caught.value) == (
        f"loss_fn is {name}, a criterion: it would be called as {name}(model, batch). "
        "wrap it: loss_fn=lambda model, batch: criterion(model(batch[0]), batch[1])."
    )


def test_what_the_message_about_a_criterion_advises_works() -> None:
    side, criterion = mlp_side(), nn.CrossEntropyLoss()
    side.loss_fn = lambda model, batch: criterion(model(batch[0]), batch[1])
    pair = torch.randn(5, 4), torch.randint(0, 3, (5,))
    assert interpreted(side, pair)(pair).isfinite()


def test_a_criterion_of_ones_own_is_known_by_its_parameters() -> None:
    class Focal(nn.Module):
        def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return logits.sum()

    def error(y_pred: torch.Tensor, y_true: torch.Tensor) -> torch.Tensor:
        return (y_pred - y_true).square().mean()

    side = mlp_side()
    for side.loss_fn, name in ((Focal(), "Focal"), (error, "error")):
        with pytest.raises(BadLoss, match=f"loss_fn is {name}, a criterion"):
            interpreted(side, BATCHES[0])


@pytest.mark.parametrize("kind", ["function", "module", "partial", "method"])
def test_a_loss_with_names_of_its_own_is_no_criterion(kind: str) -> None:
    class Loss(nn.Module):
        def forward(self, net: nn.Module, targets: Any) -> torch.Tensor:
            return classify(net, targets)

    def loss(net: nn.Module, inputs: Any, scale: float = 1.0) -> torch.Tensor:
        return classify(net, inputs) * scale

    side = mlp_side()
    twice = functools.partial(loss, scale=2.0)
    side.loss_fn = {"function": loss, "module": Loss(), "partial": twice, "method": Loss().forward}[kind]
    assert interpreted(side, BATCHES[0]).rung == "whole step"


def test_a_grad_scaler_in_the_loss_is_refused() -> None:
    scaler = torch.amp.GradScaler("cpu")
    side = mlp_side()
    side.loss_fn = lambda m, b: scaler.scale(classify(m, b))
    with pytest.raises(BadLoss, match=r"GradScaler.*return the unscaled loss"):
        interpreted(side, BATCHES[0])


def test_lbfgs_is_refused() -> None:
    model = small_mlp()
    with pytest.raises(UnsupportedOptimizer, match=r"LBFGS.*closure.*optimizer=None"):
        interpreted(Side(model, torch.optim.LBFGS(model.parameters()), classify), BATCHES[0])


class SAM(torch.optim.SGD):
    """As it is written for PyTorch: two halves of a step, and a closure between them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM requires closure, but it was not provided"
        closure = torch.enable_grad()(closure)
        closure()
        return super().step()


class TwoHalves(torch.optim.SGD):
    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Requires(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        closure()


class Raises(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is None:
            raise ValueError("no closure")
        return super().step(closure)


class Calls(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


@pytest.mark.parametrize("kind", [SAM, TwoHalves, Requires, Raises, Calls])
def test_an_optimizer_that_needs_a_closure_is_refused(kind: type[torch.optim.SGD]) -> None:
    model = small_mlp()
    with pytest.raises(UnsupportedOptimizer) as caught:
        interpreted(Side(model, kind(model.parameters(), lr=0.1), classify), BATCHES[0])
    assert str(caught.value) == (
        f"{kind.__name__} re-evaluates the loss through a closure inside its step. "
        "use optimizer=None: Wholestep fills p.grad, and your closure calls the step."
    )


class Asks(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        super().step()
        return loss


class AsksInPassing(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        super().step()
        return loss


class TakesNone(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            raise ValueError("closures are not for this one")
        assert closure is None
        return super().step()


class ReturnsEarly(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if not closure:
            return super().step()
        return closure()


@pytest.mark.filterwarnings("ignore:forward and backward are captured:wholestep.WholestepWarning")
@pytest.mark.parametrize("kind", [Asks, AsksInPassing, TakesNone, ReturnsEarly])
def test_an_optimizer_that_may_have_a_closure_is_not_refused(kind: type[torch.optim.SGD]) -> None:
    model = small_mlp()
    assert interpreted(Side(model, kind(model.parameters(), lr=0.1), classify), BATCHES[0])(BATCHES[0]).isfinite()


def test_every_optimizer_of_torch_but_lbfgs_steps_without_a_closure() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    every = [c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)]
    made = [c([weight], lr=0.1) for c in every if c is not torch.optim.Optimizer]  # type: ignore[call-arg]
    assert [type(o).__name__ for o in made if needs_closure(o)] == ["LBFGS"] and len(made) > 10


def test_lazy_and_meta_parameters_are_refused() -> None:
    lazy = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 3))
    side = Side(lazy, torch.optim.SGD(lazy[1].parameters(), lr=0.1), classify)
    with pytest.raises(UnsupportedModel, match=r"0\.weight has no shape yet.*run one forward"):
        interpreted(side, BATCHES[0])
    with torch.device("meta"):
        meta = small_mlp()
    with pytest.raises(UnsupportedModel, match=r"0\.weight is on the meta device.*to_empty"):
        interpreted(sgd_side(meta), BATCHES[0])


def test_nothing_to_train_is_said() -> None:
    model = small_mlp()
    side = sgd_side(model)
    model.requires_grad_(False)
    with pytest.raises(UnsupportedOptimizer, match=r"nothing to train.*requires_grad"):
        interpreted(side, BATCHES[0])


# ---- set aside ----


class Checkpointed(nn.Module):
    """Two blocks behind torch's activation checkpointing."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.before, self.first, self.second, self.reentrant = (
            nn.Linear(4, 4),
            nn.Linear(4, 6),
            nn.Linear(6, 3),
            reentrant,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda t: self.first(t).tanh(), self.before(x), use_reentrant=self.reentrant)
        return checkpoint(self.second, hidden, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_set_aside(reentrant: bool) -> None:
    twins = Twins(lambda: sgd_side(Checkpointed(reentrant)), BATCHES[0])
    twins.train(BATCHES[:3])
    assert any("activation checkpointing set aside" in note for note in twins.step.notes), twins.step.explain()
    products = [n for n in twins.step.graph.operations() if "addmm" in str(n.target)]
    assert len(products) == 3, "nothing is recomputed in the graph"


def test_hugging_face_checkpointing_is_set_aside() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip

    def make() -> Side:
        model = transformers.GPT2LMHeadModel(config).train()
        model.gradient_checkpointing_enable()
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(**b).loss)

    ids = torch.randint(0, 31, (2, 8))
    batch = {"input_ids": ids, "labels": ids}
    twins = Twins(make, batch)
    twins.train([batch, batch], tolerance=1e-6)
    assert any("activation checkpointing set aside" in note for note in twins.step.notes)
    assert twins.ours.model.is_gradient_checkpointing, "the user's flag is put back"


def test_torch_compile_on_the_model_is_looked_through() -> None:
    def compiled_part() -> Side:
        model = small_mlp()
        model[1] = torch.compile(nn.Tanh(), backend="eager")
        return sgd_side(model)

    def compiled_in_place() -> Side:
        model = small_mlp()
        model.compile(backend="eager")
        return sgd_side(model)

    for make in (compiled_part, compiled_in_place):
        twins = Twins(make, BATCHES[0])
        ours = [float(twins.step(b)) for b in BATCHES[:2]]
        plain = sgd_side(small_mlp())
        plain.model.load_state_dict(
            {k.replace("_orig_mod.", ""): v for k, v in twins.theirs.model.state_dict().items()}
        )
        assert ours == [float(eager_update(plain, b)[0]) for b in BATCHES[:2]]
        assert (twins.step.rung, twins.step.captures) == ("whole step", 1)
    assert twins.ours.model._compiled_call_impl is not None, "put back"


def test_the_users_autocast_is_kept_alone() -> None:
    def make() -> Side:
        side = sgd_side(small_mlp())

        def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(batch[0])
            return nn.functional.cross_entropy(logits.float(), batch[1])

        side.loss_fn = loss_fn
        return side

    twins = Twins(make, BATCHES[0])
    twins.train(BATCHES[:3], tolerance=1e-6)
    with pytest.raises(
        BadOption, match=r"precision='bf16' and loss_fn enters torch.autocast itself.*use one of the two"
    ):
        interpreted(make(), BATCHES[0], precision="bf16")


def test_a_disabled_autocast_inside_is_no_conflict() -> None:
    side = mlp_side()

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return classify(model, batch)

    side.loss_fn = loss_fn
    assert interpreted(side, BATCHES[0], precision="bf16").rung == "whole step"


def test_bf16_runs_under_autocast() -> None:
    """As close to eager autocast as rounding allows: same operators, bf16 products."""
    ours, theirs = mlp_side(), mlp_side()
    theirs.model.load_state_dict(ours.model.state_dict())
    plain = theirs.loss_fn

    def under_autocast(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(model, batch)

    theirs.loss_fn = under_autocast
    step = interpreted(ours, BATCHES[0], precision="bf16")
    for batch in BATCHES[:4]:
        assert float(step(batch)) == pytest.approx(float(eager_update(theirs, batch)[0]), rel=1e-2)
    dtypes = {n.meta["val"].dtype for n in step.graph.operations() if "mm" in str(n.target)}
    assert dtypes == {torch.bfloat16}
    assert all(p.dtype == torch.float32 for p in ours.model.parameters())


def test_surroundings_are_put_back_when_capture_fails() -> None:
    import torch.utils.checkpoint as module

    kept = module.CheckpointFunction, torch.amp.GradScaler.scale, torch.autocast.__enter__, nn.Module.__call__
    side = mlp_side()
    side.loss_fn = lambda m, b: m(b[0])
    with pytest.raises(BadLoss):
        interpreted(side, BATCHES[0])
    assert kept == (module.CheckpointFunction, torch.amp.GradScaler.scale, torch.autocast.__enter__, nn.Module.__call__)


def test_no_warning_without_reason() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", WholestepWarning)
        step = wholestep.compile(m := small_mlp(), classify, torch.optim.SGD(m.parameters()), BATCHES[0],
                                 backend="interpret", cache=False)  # fmt: skip
        step(BATCHES[0])
