"""Tensors that become Python values or decide what runs, and operators that tracers find hard."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from tests.trust.case import Made, Net, at, cases_of, labelled, mse, pairs, sgd, tokens, train
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

case, more = cases_of("Python values")


def padded(length: int = 7) -> list[Any]:
    """Sequences of several lengths, padded, longest first, with their lengths."""
    source = torch.Generator().manual_seed(5)
    lengths = [torch.tensor([length, 5, 3, 2 + i % 3]).sort(descending=True).values for i in range(6)]
    return [(torch.randn(4, length, 6, generator=source), n, torch.randn(4, 3, generator=source)) for n in lengths]


# ---- numbers out of tensors ----


@case
def item_in_the_loss() -> Made:
    """A detached weight, computed on the host."""

    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        return found / (1.0 + found.item())

    return train(loss)


@case
def list_of_numbers() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        weights = b[1].mean(0).tolist()
        return sum(w * out.mean() for w, out in zip(weights, m(b[0]).unbind(1)))

    return train(loss)


@case
def branch_on_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        if found > 1.1:
            return found.sqrt()
        return found

    return train(loss)


@more
def branch_on_not_a_number() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        if torch.isnan(found):
            return (m(torch.ones(2, 6)) ** 2).mean()
        return found

    batches = pairs()
    batches[3] = (batches[3][0] * float("nan"), batches[3][1])
    return train(loss, batches=batches)


@case
def assertion_on_a_tensor() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        found = mse(m, b)
        assert torch.isfinite(found), "the loss is not finite"
        return found

    batches = pairs()
    batches[3] = (batches[3][0] * float("nan"), batches[3][1])
    return train(loss, batches=batches, raises={3: AssertionError})


@case
def fixed_point_until_it_settles() -> Made:
    model = nn.ModuleDict({"cell": nn.Linear(6, 6), "head": nn.Linear(6, 3)})

    def loss(m: Any, b: Any) -> torch.Tensor:
        z, steps, moved = torch.zeros_like(b[0]), 0, torch.tensor(1.0)
        while moved > 0.05 and steps < 20:
            new = torch.tanh(0.5 * m["cell"](z) + b[0])
            z, moved, steps = new, (new - z).abs().max().detach(), steps + 1
        return F.mse_loss(m["head"](z), b[1])

    return train(loss, model=model)


@case
def rows_chosen_by_a_mask() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        kept = b[1][:, 0] > 0
        return F.mse_loss(m(b[0])[kept], b[1][kept])

    return train(loss)


@more
def rows_chosen_by_nonzero() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        rows = (b[1][:, 0] > 0).nonzero(as_tuple=True)[0]
        return F.mse_loss(m(b[0][rows]), b[1][rows])

    return train(loss)


@case
def masked_entries_set_in_place() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0]).clone()
        out[b[1] < 0] = 0.0
        return F.mse_loss(out, b[1])

    return train(loss)


@more
def masked_select() -> Made:
    return train(lambda m, b: (m(b[0]) - b[1]).masked_select(b[1] > 0).square().mean())


@more
def hardest_examples_only() -> Made:
    model, options = Net(), {"kept": 4}
    loss = lambda m, b: (m(b[0]) - b[1]).square().mean(1).topk(options["kept"]).values.mean()  # noqa: E731
    return train(loss, at(3, options.update, kept=2), model=model)


@more
def unique_labels() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        logits = m(b[0])
        centers = [logits[b[1] == label].mean(0) for label in b[1].unique()]
        return F.cross_entropy(logits, b[1]) + 0.1 * torch.stack(centers).square().mean()

    return train(loss, batches=labelled())


@more
def loop_over_labels_in_python() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        logits = m(b[0])
        return sum(-logits[row].log_softmax(0)[int(label)] for row, label in enumerate(b[1])) / len(b[1])

    return train(loss, batches=labelled())


@case
def cut_to_the_longest() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        longest = int(b[1].max())
        return F.mse_loss(m(b[0][:, :longest]).mean(1), b[2])

    return train(loss, batches=padded())


@case
def packed_sequences() -> Made:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True)
            out, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
            return self.out(out.sum(1) / lengths[:, None])

    return train(lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]), model=Model(), batches=padded())


@more
def repeated_by_counts() -> Made:
    loss = lambda m, b: m(b[0].repeat_interleave(1 + b[1], 0)).square().mean()  # noqa: E731
    return train(loss, batches=labelled())


@case
def experts_with_a_loop() -> Made:
    """Each expert gets the rows routed to it, as Mixtral does it."""
    model = nn.ModuleDict({"gate": nn.Linear(6, 3), "experts": nn.ModuleList(nn.Linear(6, 3) for _ in range(3))})

    def loss(m: Any, b: Any) -> torch.Tensor:
        share, choice = m["gate"](b[0]).softmax(-1).max(-1)
        out = torch.zeros(len(b[0]), 3)
        for number, expert in enumerate(m["experts"]):
            rows = torch.where(choice == number)[0]
            out.index_add_(0, rows, expert(b[0][rows]) * share[rows, None])
        return F.mse_loss(out, b[1])

    return train(loss, model=model)


# ---- Python's own control ----


@case
def exception_as_control_flow() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                scale = self.extra["scale"]
            except (AttributeError, KeyError):
                scale = 1.0
            return super().forward(x) * scale

    model = Model()
    return train(model=model, change=at(3, setattr, model, "extra", {"scale": 0.1}))


@more
def finally_and_else() -> Made:
    notes: list[str] = []

    def loss(m: Any, b: Any) -> torch.Tensor:
        try:
            found = mse(m, b)
        except ValueError:
            notes.append("failed")
            raise
        else:
            notes.append("done")
            return found
        finally:
            notes.append("left")

    return train(loss, state=lambda: notes)


@more
def keyword_arguments_and_stars() -> Made:
    def inner(*parts: torch.Tensor, power: int = 2, **more: Any) -> torch.Tensor:
        return sum(part.abs().pow(power).mean() for part in parts) * more.get("scale", 1.0)

    options = {"power": 2}
    return train(lambda m, b: inner(m(b[0]) - b[1], m(-b[0]), **options), at(3, options.update, power=1, scale=0.5))


@case
def reshapes_by_a_pattern() -> Made:
    def rearrange(x: torch.Tensor, pattern: str, **sizes: int) -> torch.Tensor:
        left, right = (side.replace("(", "").replace(")", "").split() for side in pattern.split("->"))
        return x.view(len(x), *[sizes.get(name, -1) for name in left[1:]]).permute([left.index(name) for name in right])

    class Model(Net):
        heads = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parts = rearrange(x, "rows (heads columns) -> heads rows columns", heads=self.heads)
            return super().forward(
                rearrange(parts.flip(0), "heads rows columns -> rows heads columns", rows=len(x)).flatten(1)
            )

    model = Model()
    return train(model=model, change=at(3, setattr, model, "heads", 3))


@more
def recursion_over_a_tree() -> Made:
    cell = nn.Linear(12, 6)
    shape = [((0, 1), (2, 3))]

    def fold(m: Any, x: torch.Tensor, tree: Any) -> torch.Tensor:
        if isinstance(tree, int):
            return x[:, tree]
        return torch.tanh(m(torch.cat([fold(m, x, part) for part in tree], -1)))

    batches = [(torch.stack([x, x + 1, -x, 2 * x], 1), y) for x, y in pairs()]
    loss = lambda m, b: F.mse_loss(fold(m, b[0], shape[0])[:, :3], b[1])  # noqa: E731
    return train(loss, at(3, shape.__setitem__, 0, (0, (1, (2, 3)))), model=cell, batches=batches)


# ---- distributions ----


@case
def normal_distribution_validated() -> Made:
    model = Net()
    model.spread = nn.Parameter(torch.zeros(3))
    loss = lambda m, b: -torch.distributions.Normal(m(b[0]), m.spread.exp()).log_prob(b[1]).mean()  # noqa: E731
    return train(loss, model=model)


@case
def normal_distribution_not_validated() -> Made:
    model = Net()
    model.spread = nn.Parameter(torch.zeros(3))
    make = lambda m, b: torch.distributions.Normal(m(b[0]), m.spread.exp(), validate_args=False)  # noqa: E731
    return train(lambda m, b: -make(m, b).log_prob(b[1]).mean(), model=model)


@case
def categorical_distribution() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        chosen = torch.distributions.Categorical(logits=m(b[0]))
        return -chosen.log_prob(b[1]).mean() - 0.01 * chosen.entropy().mean()

    return train(loss, batches=labelled())


@more
def divergence_of_distributions() -> Made:
    normal = torch.distributions.Normal
    loss = lambda m, b: torch.distributions.kl_divergence(normal(m(b[0]), 1.0), normal(b[1], 2.0)).mean()  # noqa: E731
    return train(loss)


# ---- autograd ----


@case
def gradient_penalty() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0].clone().requires_grad_()
        slope = torch.autograd.grad(m(x).sum(), x, create_graph=True)[0]
        return mse(m, b) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    return train(loss)


@more
def second_derivatives() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0][:, :1].clone().requires_grad_()
        u = m(torch.cat([x, b[0][:, 1:]], 1)).sum(1)
        first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
        return (second + u[:, None]).square().mean()

    return train(loss)


@more
def adversarial_example_inside_the_loss() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        x = b[0].clone().requires_grad_()
        gradient = torch.autograd.grad(mse(m, (x, b[1])), x)[0]
        return mse(m, ((x + 0.1 * gradient.sign()).detach(), b[1]))

    return train(loss)


@more
def inner_step_of_meta_learning() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        weights = dict(m.named_parameters())
        inner = F.mse_loss(torch.func.functional_call(m, weights, (b[0][:4],)), b[1][:4])
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients)}
        return F.mse_loss(torch.func.functional_call(m, moved, (b[0][4:],)), b[1][4:])

    return train(loss)


@case
def custom_autograd_function() -> Made:
    class Clipped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.limit = limit
            return x.clamp(-limit, limit)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return gradient * (x.abs() < 2 * ctx.limit), None

    options = {"limit": 0.5}
    return train(
        lambda m, b: F.mse_loss(Clipped.apply(m(b[0]), options["limit"]), b[1]), at(3, options.update, limit=0.1)
    )


@case
def custom_autograd_function_that_counts() -> Made:
    calls = {"forward": 0, "backward": 0}

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            calls["forward"] += 1
            return x * 2.0

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            calls["backward"] += 1
            return gradient * 2.0

    return train(lambda m, b: Counted.apply(mse(m, b)), state=lambda: dict(calls))


@more
def straight_through_rounding() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.a(x))
            return self.b(h + (torch.round(h * 4) / 4 - h).detach())

    return train(model=Model())


@case
def checkpointed_layers() -> Made:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = checkpoint(lambda x: torch.tanh(self.a(x)), x, use_reentrant=False)
            return self.b(h)

    return train(model=Model())


@case
def checkpointing_switched_on_later() -> Made:
    class Model(Net):
        gradient_checkpointing = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            run = lambda x: torch.tanh(self.a(x))  # noqa: E731
            return self.b(checkpoint(run, x, use_reentrant=False) if self.gradient_checkpointing else run(x))

    model = Model()
    return train(model=model, change=at(3, setattr, model, "gradient_checkpointing", True))


@case
def checkpointed_forward_that_counts() -> Made:
    """In eager the second run of the forward counts too."""
    calls = [0]

    class Model(Net):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return torch.tanh(self.a(x))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(checkpoint(self.inner, x, use_reentrant=False))

    return train(model=Model(), state=lambda: calls[0])


@more
def checkpointed_sequence() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    return train(lambda m, b: F.mse_loss(checkpoint_sequential(m, 2, b[0], use_reentrant=False), b[1]), model=model)


@more
def per_sample_functions() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        weights = dict(m.named_parameters())
        each = lambda x, y: (torch.func.functional_call(m, weights, (x,)) - y).square().mean()  # noqa: E731
        return torch.vmap(each)(*b).mean()

    return train(loss)


@more
def detached_branch() -> Made:
    return train(lambda m, b: F.mse_loss(m(b[0]), m(b[0].flip(0)).detach() + b[1]))


# ---- layers and operators ----


@more
def attention_with_a_mask() -> Made:
    model = nn.MultiheadAttention(6, 2, batch_first=True)

    def loss(m: Any, b: Any) -> torch.Tensor:
        padding = torch.arange(b[0].shape[1])[None] >= b[1][:, None]
        return (m(b[0], b[0], b[0], key_padding_mask=padding)[0].mean(1)[:, :3] - b[2]).square().mean()

    return train(loss, model=model, batches=padded())


@more
def transformer_layer() -> Made:
    layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
    return train(lambda m, b: (m(b[0]).mean(1)[:, :3] - b[2]).square().mean(), model=layer, batches=padded())


@more
def recurrent_layer() -> Made:
    model = nn.ModuleDict({"rnn": nn.LSTM(6, 8, batch_first=True), "out": nn.Linear(8, 3)})
    return train(lambda m, b: F.mse_loss(m["out"](m["rnn"](b[0])[0][:, -1]), b[2]), model=model, batches=padded())


@more
def recurrent_cell_in_a_loop() -> Made:
    model = nn.ModuleDict({"cell": nn.GRUCell(6, 8), "out": nn.Linear(8, 3)})

    def loss(m: Any, b: Any) -> torch.Tensor:
        h = torch.zeros(4, 8)
        for t in range(b[0].shape[1]):
            h = m["cell"](b[0][:, t], h)
        return F.mse_loss(m["out"](h), b[2])

    return train(loss, model=model, batches=padded())


@case
def embedding_with_sparse_gradients() -> Made:
    model = nn.Embedding(11, 6, sparse=True)
    return train(lambda m, b: m(b).square().mean(), model=model, batches=tokens(), optimizer=sgd)


@more
def embedding_bag() -> Made:
    model = nn.EmbeddingBag(11, 3)
    return train(lambda m, b: m(b).square().sum(), model=model, batches=tokens())


@more
def sequence_loss() -> Made:
    model = nn.Linear(6, 5)

    def loss(m: Any, b: Any) -> torch.Tensor:
        scores = m(b[0]).log_softmax(-1).transpose(0, 1)
        targets = torch.tensor([[1, 2], [3, 1], [2, 4], [4, 3]])
        return F.ctc_loss(scores, targets, torch.full((4,), 7), torch.full((4,), 2))

    return train(loss, model=model, batches=padded())


@more
def scattered_messages() -> Made:
    edges = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 0]])

    def loss(m: Any, b: Any) -> torch.Tensor:
        messages = m.a(b[0])[edges[0]]
        return F.mse_loss(m.b(torch.tanh(torch.zeros(8, 16).index_add(0, edges[1], messages))), b[1])

    return train(loss)


@more
def fourier_transform() -> Made:
    return train(lambda m, b: torch.fft.rfft(m(b[0])).abs().mean() + mse(m, b))


@more
def views_written_in_place() -> Made:
    def loss(m: Any, b: Any) -> torch.Tensor:
        out = m(b[0]) * 1.0
        out[:, 0].mul_(2.0)
        out[1:, 1] += 1.0
        return F.mse_loss(out, b[1])

    return train(loss)


@more
def formatted_shapes() -> Made:
    names: list[str] = []

    def loss(m: Any, b: Any) -> torch.Tensor:
        names.append(f"{tuple(b[0].shape)} {b[0].dtype}")
        return mse(m, b) / math.sqrt(b[0].shape[-1])

    return train(loss, state=lambda: names)
