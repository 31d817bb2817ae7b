"""Cross-entropy over a linear layer becomes ws::linear_cross_entropy while tracing: what is recognised, what is left alone,
and that training stays the same."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.capture.readings import reading_of, subject_of
from tests.runtime.twins import Side, Twins, interpreted
from tests.zoo import hf
from tests.zoo.case import Built
from torch import Tensor, nn

import wholestep
from wholestep.capture.cache import capture_key
from wholestep.capture.chunked_loss import WHOLE_LOGITS_BYTES
from wholestep.capture.dry import capture_example
from wholestep.capture.subject import make_subject
from wholestep.capture.trace import Capture, capture
from wholestep.errors import BadOption
from wholestep.graph.training_graph import TrainingGraph, tensors_in
from wholestep.train.models.gpt import GPT, GPTConfig, next_token_loss

WIDTH, CLASSES, BATCH, LENGTH = 8, 37, 3, 5
Loss = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A layer, a linear head over it, and the loss under test of (logits, labels)."""

    def __init__(self, loss: Loss, bias: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES, bias=bias)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(torch.tanh(self.body(x))), labels)


def make(loss: Loss, bias: bool = False) -> Callable[[], Side]:
    def side() -> Side:
        model = Head(loss, bias)
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.5), lambda m, b: m(*b))

    return side


def batches(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(5)
    made = []
    for _ in range(count):
        labels = torch.randint(0, CLASSES, (BATCH, LENGTH), generator=source)
        labels[0, 0], labels[1, 1], labels[2, :2] = 0, CLASSES - 1, -100
        made.append((torch.randn(BATCH, LENGTH, WIDTH, generator=source), labels))
    return made


def chunked_nodes(graph: TrainingGraph) -> list[str]:
    return [str(n.target) for n in graph.operations() if "linear_cross_entropy" in str(n.target)]


def logits_nodes(graph: TrainingGraph, rows: int, classes: int) -> list[str]:
    """Nodes that hold whole logits: the classes and all rows in one tensor."""
    found = []
    for node in graph.operations():
        for tensor in tensors_in(node.meta.get("val")):
            if classes in tensor.shape and tensor.numel() == rows * classes:
                found.append(node.name)
    return found


def flat(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), **options)


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, CLASSES), labels[..., 1:].reshape(-1))


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(2.0 * torch.tanh(logits / 2.0), labels)


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(logits.float(), dim=-1).flatten(0, 1), labels.flatten())


RECOGNISED: dict[str, tuple[Loss, int]] = {
    "view": (flat, 15),
    "flatten": (lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()), 15),
    "cast": (lambda z, y: flat(z.to(torch.float32).float(), y), 15),
    "module": (lambda z, y: nn.CrossEntropyLoss(label_smoothing=0.1)(z.reshape(-1, CLASSES), y.reshape(-1)), 15),
    "sum": (lambda z, y: flat(z, y, reduction="sum") / 7, 15),
    "smoothing": (lambda z, y: flat(z, y, label_smoothing=0.2), 15),
    "ignored class": (lambda z, y: flat(z, y.clamp(min=0), ignore_index=0), 15),
    "shifted": (shifted, 12),
    "sliced": (lambda z, y: F.cross_entropy(z[:, 1:-1].reshape(-1, CLASSES), y[:, 1:-1].reshape(-1)), 9),
    "one position": (lambda z, y: F.cross_entropy(z[:, -1], y[:, -1].clamp(min=0)), 3),
    "index tensor": (lambda z, y: F.cross_entropy(z[:, torch.tensor([4, 0])].flatten(0, 1), y[:, [4, 0]].flatten()), 6),
    "turned": (lambda z, y: F.cross_entropy(z.transpose(1, 2), y), 15),
    "turned by property": (lambda z, y: F.cross_entropy(z.mT, y), 15),
    "permuted": (lambda z, y: F.cross_entropy(z.permute(1, 2, 0), y.t()), 15),
    "time first": (lambda z, y: F.cross_entropy(z.transpose(0, 1).reshape(-1, CLASSES), y.t().reshape(-1)), 15),
    "images": (lambda z, y: F.cross_entropy(z.unflatten(1, (1, 5)).movedim(-1, 1), y.unflatten(1, (1, 5))), 15),
    "soft cap": (capped, 15),
    "soft cap, methods": (lambda z, y: flat(z.div(2).tanh().mul(2), y), 15),
    "log_softmax + nll_loss": (by_hand, 15),
    "one row": (lambda z, y: F.cross_entropy(z[1, 2], y[1, 2]), 1),
}


@pytest.mark.parametrize("name", RECOGNISED)
@pytest.mark.parametrize("bias", [False, True])
def test_recognised_and_trains_as_eager(name: str, bias: bool) -> None:
    loss, rows = RECOGNISED[name]
    twins = Twins(make(loss, bias), batches()[0], chunked_loss=True)
    assert chunked_nodes(twins.step.graph) == ["ws.linear_cross_entropy_and_gradients.default"]
    assert not logits_nodes(twins.step.graph, BATCH * LENGTH, CLASSES)
    assert rows == 1 or not logits_nodes(twins.step.graph, rows, CLASSES)  # one row has the size of the bias
    assert any(note.startswith("loss: linear + cross-entropy in 1 chunk") for note in twins.step.notes)
    twins.train(batches(), tolerance=1e-5)


def written(logits: Tensor, labels: Tensor) -> Tensor:
    logits[..., 3] = -5.0
    return flat(logits, labels)


def written_through_a_view(logits: Tensor, labels: Tensor) -> Tensor:
    rows = logits.view(-1, CLASSES)
    logits.mul_(2.0)
    return F.cross_entropy(rows, labels.view(-1))


def hooked(logits: Tensor, labels: Tensor) -> Tensor:
    logits.register_hook(lambda g: g * 2.0)
    return flat(logits, labels)


def half_detached(logits: Tensor, labels: Tensor) -> Tensor:
    return flat(logits.detach(), labels) + flat(logits * 1.0, labels)


def no_grad_logits(logits: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        rows = logits.view(-1, CLASSES).float()
    return F.cross_entropy(rows, labels.view(-1)) + logits.mean()


LEFT_ALONE: dict[str, Loss] = {
    "class weights": lambda z, y: flat(z, y, weight=torch.linspace(0.5, 1.0, CLASSES)),
    "probabilities": lambda z, y: F.cross_entropy(
        z.view(-1, CLASSES), torch.full((BATCH * LENGTH, CLASSES), 1 / CLASSES)
    ),
    "no reduction": lambda z, y: flat(z, y, reduction="none").mean(),
    "scaled": lambda z, y: flat(z / 2.0, y),
    "tanh alone": lambda z, y: flat(torch.tanh(z), y),
    "another cap": lambda z, y: flat(3.0 * torch.tanh(z / 2.0), y),
    "half a cap": lambda z, y: flat(torch.tanh(z / 2.0), y),
    "fewer classes": lambda z, y: F.cross_entropy(z[..., :30].reshape(-1, 30), y.clamp(max=29).view(-1)),
    "classes picked": lambda z, y: F.cross_entropy(z[..., torch.arange(CLASSES)].view(-1, CLASSES), y.view(-1)),
    "classes mixed": lambda z, y: F.cross_entropy(z.transpose(1, 2).reshape(-1, CLASSES), y.view(-1)),
    "rounded": lambda z, y: flat(z.bfloat16().float(), y),
    "written": written,
    "written through a view": written_through_a_view,
    "hook": hooked,
    "detached": half_detached,
    "under no_grad": no_grad_logits,
    "log_softmax over rows": lambda z, y: F.nll_loss(F.log_softmax(z, dim=1).view(-1, CLASSES), y.view(-1)),
    "log_softmax twice": lambda z, y: flat(F.log_softmax(z, dim=-1), y),
    "nll of logits": lambda z, y: F.nll_loss(z.view(-1, CLASSES), y.view(-1)),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_does_not_fit_is_left_alone(name: str) -> None:
    twins = Twins(make(LEFT_ALONE[name]), batches()[0], chunked_loss=True)
    assert twins.step.rung == "whole step"
    assert not chunked_nodes(twins.step.graph)
    assert any("no cross-entropy over the output of a linear layer" in note for note in twins.step.notes)
    twins.train(batches(2))


class Detached(Head):
    """The head learns, the body does not get its gradient."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.loss(self.head(hidden.detach()), labels) + hidden.mean()


class Frozen(Head):
    """The head is not trained."""

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss, bias=True)
        self.head.requires_grad_(False)


class WrittenInput(Frozen):
    """What the head read is changed before the loss is computed; legal, because its frozen weight needs no gradient."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(x) * 1.0
        logits = self.head(hidden)
        hidden.zero_()
        return self.loss(logits.float(), labels)


@pytest.mark.parametrize(("kind", "found"), [(Detached, True), (Frozen, True), (WrittenInput, False)])
def test_gradients_that_are_not_wanted_and_inputs_that_are_gone(kind: type[Head], found: bool) -> None:
    def side() -> Side:
        model = kind(flat)
        trained = [p for p in model.parameters() if p.requires_grad]
        return Side(model, torch.optim.SGD(trained, lr=0.5), lambda m, b: m(*b))

    twins = Twins(side, batches()[0], chunked_loss=True)
    assert bool(chunked_nodes(twins.step.graph)) == found
    twins.train(batches(2), tolerance=1e-5)


def test_a_hook_after_the_loss_is_refused_not_lost() -> None:
    def late(logits: Tensor, labels: Tensor) -> Tensor:
        loss = flat(logits, labels)
        logits.register_hook(lambda g: g * 2.0)
        return loss

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        twins = Twins(make(late), batches()[0], chunked_loss=True)
    refused = any(
        re.search("the step runs in eager PyTorch: whole step: .*chunked_loss=False", str(w.message)) for w in told
    )
    assert (
        refused == (twins.step.rung == "eager") == any("chunked_loss=False" in str(fall) for fall in twins.step.falls)
    )
    # torch 2.11 hands the loss over in another form, in which it is not recognised
    assert refused or "no cross-entropy over the output of a linear layer was recognised" in twins.step.explain()
    before = twins.step.captures
    twins.train(batches())
    assert twins.step.captures == before, "what was refused is not traced again at every step"
    whole = Twins(make(late), batches()[0], chunked_loss=False)
    whole.train(batches())
    assert whole.step.rung == "whole step"


def test_returned_logits_stay() -> None:
    def side() -> Side:
        model = nn.Linear(WIDTH, CLASSES)

        def loss_fn(m: nn.Module, batch: Any) -> Any:
            logits = m(batch[0])
            return flat(logits, batch[1]), {"logits": logits}

        return Side(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_fn)

    twins = Twins(side, batches()[0], chunked_loss=True)
    assert chunked_nodes(twins.step.graph) and logits_nodes(twins.step.graph, BATCH * LENGTH, CLASSES)
    twins.train(batches(), tolerance=1e-5)


# ---- by size -------------------------------------------------------------------------------------------------


def captured(whole_logits_bytes: int, wish: bool | None = None) -> Capture:
    side = make(flat)()
    subject = subject_of(side, chunked_loss=wish)
    return capture(subject, reading_of(subject, batches()[0]), whole_logits_bytes=whole_logits_bytes)


@pytest.mark.parametrize(
    ("wish", "limit", "expected"),
    [
        (None, 4 * BATCH * LENGTH * CLASSES, True), (None, 4 * BATCH * LENGTH * CLASSES + 1, False),
        (None, WHOLE_LOGITS_BYTES, False), (True, WHOLE_LOGITS_BYTES, True), (False, 0, False),
    ],
)  # fmt: skip
def test_the_wish_and_the_size_decide(wish: bool | None, limit: int, expected: bool) -> None:
    assert bool(chunked_nodes(captured(limit, wish).graph)) == expected


def test_large_logits_are_chunked_by_default_and_told() -> None:
    """On tensors without data: 8192 tokens over 128256 classes are 4 GiB."""
    with torch.device("meta"):
        model = nn.Linear(4, 128256, bias=False)
    model = model.to_empty(device="cpu")
    subject = make_subject(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    made = capture_example(subject, (torch.zeros(8192, 4), torch.zeros(8192, dtype=torch.int64)))
    assert "loss: linear + cross-entropy in 4 chunks of 2048 rows, logits never whole (3.91 GiB)" in made.notes
    assert not logits_nodes(made.graph, 2048, 128256)


def test_symbolic_sizes_are_not_fixed() -> None:
    side = make(flat)()
    step = interpreted(side, batches()[0], dynamic=True, chunked_loss=True)
    assert chunked_nodes(step.graph)
    x, labels = batches()[0]
    for rows in (1, 2, 3):
        want = float(side.loss_fn(side.model, (x[-rows:], labels[-rows:])).detach())
        assert float(step((x[-rows:], labels[-rows:]))) == pytest.approx(want, rel=1e-5)


def test_the_cache_tells_wishes_apart() -> None:
    side = make(flat)()
    keys = set()
    for wish in (None, True, False):
        subject = subject_of(side, chunked_loss=wish)
        keys.add(capture_key(subject, reading_of(subject, batches()[0])))
    assert len(keys) == 3


def test_a_cached_capture_is_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHOLESTEP_CACHE_DIR", str(tmp_path))
    losses = []
    for _ in range(2):
        side = gpt_side()
        step = interpreted(side, gpt_batches()[0], chunked_loss=True, cache=True)
        assert chunked_nodes(step.graph) == ["ws.linear_cross_entropy_and_gradients.default"]
        losses.append([float(step(batch)) for batch in gpt_batches()])
    assert losses[0] == losses[1]


def test_wrong_wish() -> None:
    with pytest.raises(BadOption, match="chunked_loss='yes'"):
        interpreted(make(flat)(), batches()[0], chunked_loss="yes")


# ---- whole models --------------------------------------------------------------------------------------------


def gpt_side(tied: bool = True) -> Side:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=61, width=16, layers=1, heads=2, context=8, dropout=0.1, tied=tied))
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-2), next_token_loss)


def gpt_batches() -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, 61, (3, 9), generator=source) for _ in range(3)]
    return [{"input_ids": ids[:, :-1].clone(), "targets": ids[:, 1:].clone()} for ids in drawn]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpt_verifies(tied: bool, precision: str) -> None:
    side = gpt_side(tied)
    report = wholestep.verify(
        side.model, side.loss_fn, side.optimizer, gpt_batches(),
        steps=3, chunked_loss=True, backend="interpret", precision=precision, clip_norm=1.0,
    )  # fmt: skip
    assert report.ok, str(report)
    assert report.rung == "whole step"


def test_autocast_casts_are_in_the_graph() -> None:
    step = interpreted(gpt_side(), gpt_batches()[0], chunked_loss=True, precision="bf16")
    (node,) = [n for n in step.graph.operations() if "linear_cross_entropy" in str(n.target)]
    assert node.args[1].meta["val"].dtype == node.args[2].meta["val"].dtype == torch.bfloat16
    assert node.meta["val"][0].dtype == torch.float32


def test_accumulation_verifies() -> None:
    side = gpt_side()
    report = wholestep.verify(
        side.model, side.loss_fn, side.optimizer, [list(gpt_batches()[:2])],
        steps=2, chunked_loss=True, backend="interpret", accumulate=2,
    )  # fmt: skip
    assert report.ok, str(report)


def hugging_face(name: str) -> tuple[Built, int]:
    built: Built = getattr(hf, name)()
    return built, hf.ROWS * hf.TOKENS


@pytest.mark.parametrize("name", ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bert", "llama"))])
def test_hugging_face_verifies(name: str) -> None:
    built, rows = hugging_face(name)
    optimizer = torch.optim.AdamW(built.model.parameters(), lr=1e-3)
    step = interpreted(Side(built.model, optimizer, None), built.batches[0], chunked_loss=True)  # type: ignore[arg-type]
    assert chunked_nodes(step.graph) == ["ws.linear_cross_entropy_and_gradients.default"]
    assert not logits_nodes(step.graph, rows, hf.VOCAB)
    report = wholestep.verify(
        built.model, None, optimizer, built.batches, edge_batches=built.edge_batches,
        steps=3, chunked_loss=True, backend="interpret",
    )  # fmt: skip
    assert report.ok, str(report)


@pytest.mark.slow
def test_hugging_face_with_items_in_batch() -> None:
    """The Trainer's form: a sum over tokens, divided by their number over all micro-batches."""
    built, rows = hugging_face("gpt2")
    optimizer = torch.optim.SGD(built.model.parameters(), lr=0.1)
    listed = [batch | {"num_items_in_batch": torch.tensor(50)} for batch in built.batches]
    report = wholestep.verify(built.model, None, optimizer, listed, steps=2, chunked_loss=True, backend="interpret")
    assert report.ok, str(report)
    step = interpreted(Side(built.model, optimizer, None), listed[0], chunked_loss=True)  # type: ignore[arg-type]
    assert chunked_nodes(step.graph) == ["ws.linear_cross_entropy_and_gradients.default"]
    assert not logits_nodes(step.graph, rows, hf.VOCAB)


def test_bf16_model_without_autocast_keeps_the_dtype_of_its_loss() -> None:
    def side() -> Side:
        model = nn.Linear(WIDTH, CLASSES, dtype=torch.bfloat16)
        return Side(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: flat(m(b[0].bfloat16()), b[1]))

    ours, theirs = side(), side()
    theirs.model.load_state_dict(ours.model.state_dict())
    step = interpreted(ours, batches()[0], chunked_loss=True)
    assert chunked_nodes(step.graph)
    loss, want = step(batches()[0]), theirs.loss_fn(theirs.model, batches()[0])
    assert loss.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(loss, want.detach(), rtol=2e-2, atol=2e-2)


def test_compiled_by_inductor() -> None:
    side = make(shifted, bias=True)()
    report = wholestep.verify(
        side.model, side.loss_fn, side.optimizer, batches(), steps=2, chunked_loss=True, eval_too=False
    )
    assert report.ok and report.backend == "inductor", str(report)


# ---- on a GPU ------------------------------------------------------------------------------------------------


def gpu_gpt(vocabulary: int, context: int) -> tuple[Side, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=vocabulary, width=64, layers=1, heads=2, context=context)).cuda()
    drawn = [torch.randint(0, vocabulary, (4, context + 1), device="cuda") for _ in range(3)]
    listed = [{"input_ids": ids[:, :-1].clone(), "targets": ids[:, 1:].clone()} for ids in drawn]
    return Side(model, torch.optim.AdamW(model.parameters(), lr=1e-3), next_token_loss), listed


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["interpret", "inductor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gpt_verifies_on_cuda(backend: str, precision: str) -> None:
    side, listed = gpu_gpt(1003, 64)
    report = wholestep.verify(
        side.model, side.loss_fn, side.optimizer, listed,
        steps=3, chunked_loss=True, backend=backend, precision=precision, clip_norm=1.0,
    )  # fmt: skip
    assert report.ok, str(report)


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_large_vocabulary_needs_no_room_for_its_logits(cuda_graph: bool) -> None:
    """4096 tokens over 128256 classes: 1.96 GiB of float32 logits, of which eager holds several copies."""
    side, listed = gpu_gpt(128256, 1024)
    step = wholestep.compile(
        side.model, side.loss_fn, side.optimizer, listed[0],
        precision="bf16", check="off", cache=False, cuda_graph=cuda_graph,
    )  # fmt: skip
    assert any("logits never whole" in note for note in step.notes)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    losses = [float(step(batch)) for batch in listed]
    assert all(10.0 < loss < 14.0 for loss in losses)  # log(128256) is 11.8
    peak = torch.cuda.max_memory_allocated()
    assert peak < 4 * 4096 * 128256 // 2, f"{peak / 2**30:.2f} GiB"


@pytest.mark.parametrize(
    ("place", "dtype"), [("head.1", torch.float32), ("head", torch.float32), ("embed", torch.bfloat16)]
)
def test_the_product_has_the_precision_of_its_layer(place: str, dtype: torch.dtype) -> None:
    """Of the module that is named, or of the step; as with whole logits, backward too."""
    found = []
    for chunked in (True, False):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(9, 8)})
        model["head"] = torch.nn.Sequential(torch.nn.GELU(), torch.nn.Linear(8, 9))
        optimizer, ids = torch.optim.SGD(model.parameters(), lr=1.0), torch.arange(9)
        sch = wholestep.schedule(model)
        sch[place].precision("fp32")
        step = wholestep.compile(
            model, lambda m, ids: F.cross_entropy(m["head"](m["embed"](ids)), ids) / 3, optimizer, ids, recipe=sch,
            precision="bf16", chunked_loss=chunked, backend="interpret", cache=False,
        )  # fmt: skip
        found.append([float(step(ids)), *(p.detach() for p in model.parameters())])
        if chunked:
            (node,) = [n for n in step.graph.operations() if "linear_cross_entropy" in str(n.target)]
            assert {n.meta["val"].dtype for n in node.args[1:4]} == {dtype}
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-3, atol=1e-3 if dtype is torch.bfloat16 else 1e-5)
