"""FLOPs of single operators against arithmetic by hand, and of whole models against torch's own counter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.cost.captured import captured, operator, traced
from tests.zoo.models import ZOO
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import wholestep.ops
from wholestep import compat
from wholestep.cost.node_costs import node_costs, total_flops
from wholestep.ops.amounts import evaluate
from wholestep.ops.flops import KINDS, TENSOR_KINDS, Flops, defaulted, flops
from wholestep.ops.record import FACTS, flops_of

pytestmark = pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")
assert wholestep.ops
R = torch.randn


def cost(name, function, *arguments) -> Flops:
    return flops(operator(name, function, *arguments))


@pytest.mark.parametrize(
    ("name", "function", "arguments", "count"),
    [
        ("aten::mm", torch.mm, (R(3, 4), R(4, 5)), 2 * 3 * 4 * 5),
        ("aten::addmm", torch.addmm, (R(5), R(3, 4), R(4, 5)), 2 * 3 * 4 * 5),
        ("aten::bmm", torch.bmm, (R(6, 3, 4), R(6, 4, 5)), 6 * 2 * 3 * 4 * 5),
        ("aten::baddbmm", torch.baddbmm, (R(6, 3, 5), R(6, 3, 4), R(6, 4, 5)), 6 * 2 * 3 * 4 * 5),
        ("aten::mv", torch.mv, (R(3, 4), R(4)), 2 * 3 * 4),
        ("aten::dot", torch.dot, (R(7), R(7)), 2 * 7),
    ],
)
def test_matrix_products(name, function, arguments, count) -> None:
    found = cost(name, function, *arguments)
    assert (found.kind, found.count, found.model, found.found) == ("matmul", count, count, "formula")


def grouped(*operands):
    return torch.ops.aten._grouped_mm(*operands)


def test_groups_cut_along_rows_or_along_the_sum_are_one_whole_product() -> None:
    a, b, offsets = R(32, 16).bfloat16(), R(4, 16, 64).bfloat16(), torch.tensor([8, 16, 24, 32], dtype=torch.int32)
    assert cost("aten::_grouped_mm", grouped, a, b, offsets).count == 2 * 32 * 16 * 64
    assert (
        cost("aten::_grouped_mm", grouped, R(16, 32).bfloat16(), R(32, 64).bfloat16(), offsets).count
        == 2 * 16 * 32 * 64
    )
    assert cost("aten::_grouped_mm", grouped, R(4, 8, 16).bfloat16(), b).count == 4 * 2 * 8 * 16 * 64


# ---- convolutions ----


@pytest.mark.parametrize(("groups", "transposed"), [(1, False), (3, False), (1, True), (3, True)])
def test_convolution_forward_and_backward(groups, transposed) -> None:
    inside, out = (6, 9)
    weight = R(*((inside, out // groups) if transposed else (out, inside // groups)), 3, 3, requires_grad=True)
    image = R(2, inside, 8, 8, requires_grad=True)
    call = F.conv_transpose2d if transposed else F.conv2d

    def both(x, w):
        return torch.autograd.grad(call(x, w, stride=2, padding=1, groups=groups).sum(), (x, w))

    forward = cost("aten::convolution", both, image, weight)
    places = 8 * 8 if transposed else 4 * 4
    assert forward.kind == "convolution"
    assert forward.count == 2 * 2 * places * inside * (out // groups) * 9
    assert cost("aten::convolution_backward", both, image, weight).count == 2 * forward.count


def test_a_gradient_that_nobody_asks_for_costs_nothing() -> None:
    image, weight = R(2, 6, 8, 8), R(9, 6, 3, 3, requires_grad=True)

    def only_weight(x, w):
        return torch.autograd.grad(F.conv2d(x, w).sum(), w)

    forward = cost("aten::convolution", only_weight, image, weight).count
    assert cost("aten::convolution_backward", only_weight, image, weight).count == forward == 2 * 2 * 36 * 9 * 6 * 9


def test_torch_counts_the_weight_gradient_of_groups_as_if_they_were_none() -> None:
    """The one place where we differ from torch's counter: it leaves `groups` out of that product."""
    image, weight = R(2, 6, 8, 8), R(9, 2, 3, 3, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        F.conv2d(image, weight, groups=3).sum().backward()
    ours = cost("aten::convolution", lambda x, w: F.conv2d(x, w, groups=3), image, weight).count
    assert counter.get_total_flops() == ours + 3 * ours


# ---- attention ----


def heads(rows=2, number=4, queries=6, keys=6, width=8, value=8, key_heads=None):
    key_heads = key_heads or number
    return R(rows, number, queries, width), R(rows, key_heads, keys, width), R(rows, key_heads, keys, value)


def own_attention(causal):
    def both(q, k, v):
        out, logsumexp, seed, offset = torch.ops.ws.attention(q, k, v, None, causal, 1.0, 0.0, None)
        return torch.ops.ws.attention_backward(out, q, k, v, None, out, logsumexp, seed, offset, causal, 1.0, 0.0, None)

    return both


def test_attention_is_what_torch_counts() -> None:
    q, k, v = heads(keys=10)
    forward, backward = (cost(f"ws::attention{suffix}", own_attention(False), q, k, v) for suffix in ("", "_backward"))
    assert forward.kind == backward.kind == "attention"
    assert forward.count == forward.model == sdpa_flop_count(q.shape, k.shape, v.shape)
    assert backward.count == sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)
    assert backward.model == 2 * forward.count  # without the scores recomputed


def test_causal_attention_is_half_the_square() -> None:
    square = heads()
    for suffix in ("", "_backward"):
        full, causal = (cost(f"ws::attention{suffix}", own_attention(c), *square) for c in (False, True))
        assert 2 * causal.count == full.count and 2 * causal.model == full.model
    # more queries than keys: those beyond the square see every key; more keys: those beyond are seen by nobody
    pair = 2 * (8 + 8) * 2 * 4
    assert cost("ws::attention", own_attention(True), *heads(queries=10, keys=6)).count == pair * (6 * 6 // 2 + 4 * 6)
    assert cost("ws::attention", own_attention(True), *heads(queries=6, keys=10)).count == pair * (6 * 6 // 2)


def test_grouped_heads_share_keys_and_compute_as_much() -> None:
    assert cost("ws::attention", own_attention(False), *heads(key_heads=2)).count == 2 * 4 * 6 * 6 * 2 * (8 + 8)


@pytest.mark.parametrize("causal", [False, True])
def test_torchs_own_cpu_attention(causal) -> None:
    q, k, v = (t.requires_grad_() for t in heads(width=8))

    def both(q, k, v):
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=causal).sum(), (q, k, v))

    ours = cost("ws::attention", own_attention(causal), q, k, v)
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert cost(name, both, q, k, v).count == ours.count
    assert cost(name + "_backward", both, q, k, v).model == 2 * ours.count


# ---- everything else ----


@pytest.mark.parametrize(
    ("name", "function", "arguments", "kind", "count"),
    [
        ("aten::add", lambda x: x + x, (R(3, 4),), "elementwise", 12),
        ("aten::mul", lambda x, y: x * y, (R(3, 1), R(1, 4)), "elementwise", 12),
        ("aten::exp", torch.exp, (R(3, 4),), "elementwise", 12),
        ("aten::gelu", F.gelu, (R(3, 4),), "elementwise", 5 * 12),
        ("aten::pow", lambda x: x.pow(3), (R(3, 4),), "elementwise", 2 * 12),
        ("aten::sum", lambda x: x.sum(0), (R(3, 4),), "reduction", 12),
        ("aten::var", lambda x: x.var(0), (R(3, 4),), "reduction", 4 * 12),
        ("aten::_softmax", lambda x: x.softmax(-1), (R(3, 4),), "reduction", 5 * 12),
        ("aten::native_layer_norm", lambda x: F.layer_norm(x, (4,)), (R(3, 4),), "reduction", 8 * 12),
        ("aten::max", lambda x: x.max(0).values, (R(3, 4),), "reduction", 12),
        ("aten::max_pool2d_with_indices", lambda x: F.max_pool2d(x, 2), (R(1, 1, 4, 4),), "reduction", 4 * 4),
        ("aten::embedding", lambda i, w: F.embedding(i, w), (torch.zeros(5, dtype=torch.long), R(7, 3)), "movement", 0),
        ("aten::t", lambda x: x.t(), (R(3, 4),), "movement", 0),
        ("aten::clone", lambda x: x.clone(), (R(3, 4),), "movement", 0),
        ("aten::_to_copy", lambda x: x.double(), (R(3, 4),), "movement", 0),
        ("aten::cat", lambda x: torch.cat([x, x]), (R(3, 4),), "movement", 0),
        ("aten::index_put", lambda x, i: x.index_put((i,), x[i]), (R(3, 4), torch.tensor([1])), "reduction", 0),
        ("aten::index_add", lambda x, i: x.index_add(0, i, x[i]), (R(3, 4), torch.tensor([1])), "reduction", 4),
        ("ws::dropout", lambda x, k: torch.ops.ws.dropout(x, 0.1, k), (R(3, 4), torch.tensor(1)), "elementwise", 23 * 12),
        ("aten::_fft_c2c", lambda x: torch.fft.fft(x), (torch.randn(2, 16, dtype=torch.complex64),), "other", 5 * 32 * 4),
    ],
)  # fmt: skip
def test_other_kinds(name, function, arguments, kind, count) -> None:
    found = cost(name, function, *arguments)
    assert (found.kind, found.count) == (kind, count)


def test_updates_count_per_parameter() -> None:
    model = torch.nn.Linear(4, 3)
    count, batch = sum(p.numel() for p in model.parameters()), R(2, 4)
    made = {
        "adamw": torch.optim.AdamW(model.parameters()), "amsgrad": torch.optim.AdamW(model.parameters(), amsgrad=True),
        "sgd": torch.optim.SGD(model.parameters(), lr=0.1), "momentum": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    }  # fmt: skip
    per_element = {"adamw": 14, "amsgrad": 15, "sgd": 4, "momentum": 7}
    for name, optimizer in made.items():
        costs = node_costs(captured(model, lambda m, x: m(x).sum(), batch, optimizer))
        assert total_flops(costs, ["optimizer"]) == per_element[name] * count, name
    clipped = node_costs(captured(model, lambda m, x: m(x).sum(), batch, made["sgd"], clip_norm=1.0))
    assert total_flops(clipped, ["optimizer"]) == (4 + 1 + 2) * count


def test_an_unknown_operator_is_named_and_not_free() -> None:
    nodes = traced(torch.linalg.cholesky, torch.eye(5))
    assert defaulted(nodes) == ["aten::_linalg_check_errors", "aten::linalg_cholesky_ex"]
    found = next(f for f in map(flops, nodes) if f.found == "default")
    assert (found.kind, found.count) == ("other", 25)


def test_one_formula_per_operator() -> None:
    with pytest.raises(AssertionError, match="aten::mm: kind is said twice"):
        flops_of("aten::mm", kind="matmul")(lambda call: 0)
    assert {facts["kind"] for facts in FACTS.values() if "kind" in facts} <= set(KINDS)


def test_the_table_names_operators_that_exist() -> None:
    if ".".join(torch.__version__.split(".")[:2]) != compat.TESTED_TORCH[-1]:
        pytest.skip("names are checked against the newest tested torch")
    names = [name.split(".")[0].split("::") for name in FACTS]
    assert not [op for library, op in names if not hasattr(getattr(torch.ops, library), op)]


# ---- against torch's counter ----

WITHOUT_FUSED_ATTENTION = [
    "mlp", "bn_cnn", "lora", "bf16_weights", "tied_frozen", "inplace_buffers", "teacher_student", "lstm", "bert_eager",
]  # fmt: skip
"""Not wgan_gp: torch's counter cannot follow autograd.grad inside a loss."""


@pytest.mark.parametrize("name", WITHOUT_FUSED_ATTENTION)
def test_whole_steps_equal_torchs_counter(name) -> None:
    """Forward and backward in eager, counted by torch, against the captured step: the same to the last FLOP."""
    built = ZOO[name].build()
    for part in filter(None, (built, built.partner)):
        optimizer = part.make_optimizer("sgd")
        graph = captured(part.model, part.loss_fn, part.batches[0], optimizer)
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        with compat.without_onednn(), FlopCounterMode(display=False) as counter:
            torch.autograd.grad(part.loss_fn(part.model, part.batches[0]), trained, allow_unused=True)
        assert total_flops(node_costs(graph), TENSOR_KINDS) == counter.get_total_flops() > 0


# ---- symbolic sizes ----


@pytest.mark.slow
def test_a_symbolic_step_costs_what_the_static_ones_do() -> None:
    from wholestep.train.models.gpt import GPT, GPTConfig, next_token_loss

    model = GPT(GPTConfig(vocab_size=50, width=16, layers=1, heads=2, context=32, dropout=0.1))

    def batch(rows):
        return {"input_ids": torch.zeros(rows, 8, dtype=torch.long), "targets": torch.zeros(rows, 8, dtype=torch.long)}

    graph = captured(model, next_token_loss, batch(4), dynamic=True)
    sizes = [s for p in graph.placeholders for s in p.meta["val"].shape if isinstance(s, torch.SymInt)]
    env = sizes[0].node.shape_env
    guards = len(env.guards)
    costs = node_costs(graph)
    assert len(env.guards) == guards, "counting added a guard"
    symbols = {symbol.name for c in costs for symbol in getattr(c.flops, "free_symbols", ())}
    assert symbols
    hints = {str(size): compat.traced_size(size) for size in sizes}
    static = node_costs(captured(model, next_token_loss, batch(4)))
    for kind in ("matmul", "attention", "elementwise", "optimizer"):
        assert evaluate(total_flops(costs, [kind]), hints) == total_flops(static, [kind]), kind
    with pytest.raises(KeyError, match=sorted(symbols)[0]):
        evaluate(total_flops(costs), {})


def test_symbolic_operators_give_expressions() -> None:
    (node,) = traced(lambda x, y: x @ y, R(6, 4), R(4, 5), symbolic=True)[-1:]
    count = flops(node).count
    values = {symbol.name: 10 for symbol in count.free_symbols}
    assert len(values) == 3 and evaluate(count, values) == 2 * 10**3
