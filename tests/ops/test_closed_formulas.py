"""The FLOPs of captured training steps against formulas written by hand, each term on its own line.

N: tokens of the batch, B rows of T; C: width; F: inner width of the perceptron; V: vocabulary; L: layers. The models have the
widths, heads, lengths and vocabularies of the published ones, and fewer layers: every layer is one more equal term.
"""

from __future__ import annotations

import pytest
import torch
from tests.cost.captured import captured

from wholestep.cost.node_costs import NodeCost, node_costs, total_flops
from wholestep.ops.flops import TENSOR_KINDS
from wholestep.train.models.gpt import GPT, GPTConfig, next_token_loss
from wholestep.train.models.resnet import ResNet, ResNetConfig, class_loss

pytestmark = pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")
TIMES = 3
"""A forward, and as much again for the gradients of the inputs and of the weights."""
EXECUTED, MODEL = 1 + 5 / 2, 1 + 2
"""Attention: the backward of two products is four, and the kernel makes one of the two again."""


def close(counted: float, formula: float) -> bool:
    return abs(counted - formula) <= 0.005 * formula


def model_flops(costs: tuple[NodeCost, ...]) -> int:
    return sum(cost.model_flops for cost in costs if cost.kind in TENSOR_KINDS)


def tokens(rows: int, length: int, vocabulary: int, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.randint(0, vocabulary, (rows, length)) for name in names}


def test_gpt_of_gpt2_mediums_width() -> None:
    b, t, c, v, layers = 1, 1024, 1024, 50257, 2
    n = b * t
    model = GPT(GPTConfig(vocab_size=v, width=c, layers=layers, heads=16, context=t))
    costs = node_costs(captured(model, next_token_loss, tokens(b, t, v, "input_ids", "targets")))
    layer = 2 * n * c * 3 * c  # query, key and value
    layer += 2 * n * c * c  # out of attention
    layer += 2 * n * c * 4 * c  # up
    layer += 2 * n * 4 * c * c  # down
    head = 2 * n * c * v
    products = TIMES * (layers * layer + head)
    mixing = layers * b * 4 * t * t * c / 2  # scores and mixing are 2 T^2 C each; causal halves them
    assert total_flops(costs, ["matmul"]) == products
    assert total_flops(costs, ["attention"]) == EXECUTED * mixing
    assert model_flops(costs) == products + MODEL * mixing
    # the rule of thumb, 6 FLOPs per parameter and token, where the embedding of positions is no matrix product
    parameters = sum(p.numel() for p in model.parameters()) - model.position.weight.numel()
    assert close(products, 6 * parameters * n)


def test_hugging_face_gpt2_is_seen_as_causal() -> None:
    transformers = pytest.importorskip("transformers")
    b, t, c, v, layers = 2, 64, 128, 500, 2
    n = b * t
    config = transformers.GPT2Config(
        vocab_size=v, n_embd=c, n_layer=layers, n_head=4, n_positions=t, use_cache=False, bos_token_id=0, eos_token_id=1
    )
    ids = torch.randint(0, v, (b, t))
    costs = node_costs(captured(transformers.GPT2LMHeadModel(config), None, {"input_ids": ids, "labels": ids}))
    assert total_flops(costs, ["matmul"]) == TIMES * (layers * 24 * n * c * c + 2 * n * c * v)
    assert total_flops(costs, ["attention"]) == EXECUTED * layers * b * 4 * t * t * c / 2


def test_bert_of_bert_larges_width() -> None:
    transformers = pytest.importorskip("transformers")
    b, t, c, f, v, layers = 1, 512, 1024, 4096, 30522, 2
    n = b * t
    config = transformers.BertConfig(
        vocab_size=v, hidden_size=c, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=f
    )
    batch = tokens(b, t, v, "input_ids", "labels")
    costs = node_costs(captured(transformers.BertForMaskedLM(config), None, batch))
    layer = 4 * 2 * n * c * c  # query, key, value, out
    layer += 2 * 2 * n * c * f  # up, down
    head = 2 * n * c * c + 2 * n * c * v  # transform, decode
    mixing = layers * b * 4 * t * t * c  # every token sees every other
    assert total_flops(costs, ["matmul"]) == TIMES * (layers * layer + head)
    assert total_flops(costs, ["attention"]) == EXECUTED * mixing


def test_llama_with_grouped_heads() -> None:
    transformers = pytest.importorskip("transformers")
    b, t, c, f, v, layers, groups = 2, 64, 128, 384, 500, 2, 4
    n = b * t
    config = transformers.LlamaConfig(
        vocab_size=v, hidden_size=c, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8 // groups,
        intermediate_size=f, max_position_embeddings=t, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(0, v, (b, t))
    costs = node_costs(captured(transformers.LlamaForCausalLM(config), None, {"input_ids": ids, "labels": ids}))
    layer = 2 * 2 * n * c * c  # query, out
    layer += 2 * 2 * n * c * c // groups  # key, value
    layer += 3 * 2 * n * c * f  # gate, up, down
    products = TIMES * (layers * layer + 2 * n * c * v)
    assert close(total_flops(costs, ["matmul"]), products)  # and the angles of the rotary positions
    assert total_flops(costs, ["attention"]) == EXECUTED * layers * b * 4 * t * t * c / 2


def resnet50_convolutions(side: int) -> tuple[int, int]:
    """(multiply-adds of all convolutions of one image, those of the first), place by place."""
    place = (side // 2) ** 2
    first = place * 64 * 3 * 49
    place //= 4  # the pooling of the stem
    total, inside = first, 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            before = place
            if stage and not block:
                place //= 4  # the 3x3 has the stride
            total += before * inside * width  # 1x1
            total += place * width * width * 9  # 3x3
            total += place * width * 4 * width  # 1x1
            if not block:
                total += place * inside * 4 * width  # shortcut
            inside = 4 * width
    return total, first


def test_resnet50() -> None:
    side, classes = 224, 1000
    total, first = resnet50_convolutions(side)
    assert close(total + 2048 * classes, 4.09e9)  # as published
    model = ResNet(ResNetConfig(depth=50, image_size=side, channels=3, classes=classes, stem="large"))
    batch = {"pixel_values": torch.randn(1, 3, side, side), "labels": torch.randint(0, classes, (1,))}
    costs = node_costs(captured(model, class_loss, batch))
    # nobody asks for the gradient of the image
    assert total_flops(costs, ["convolution"]) == 2 * (TIMES * total - first)
    assert total_flops(costs, ["matmul"]) == 2 * TIMES * 2048 * classes
    forward = total_flops(costs, TENSOR_KINDS, phases=["forward"])
    assert close(forward, 8.18e9)


def test_an_lstm_is_its_weight_matrices_times_tokens() -> None:
    rows, length, inside, hidden = 4, 6, 10, 16
    model = torch.nn.LSTM(inside, hidden, num_layers=2)
    costs = node_costs(captured(model, lambda m, x: m(x)[0].pow(2).mean(), torch.randn(length, rows, inside)))
    first = 2 * length * rows * 4 * hidden * inside
    others = 2 * length * rows * 4 * hidden * hidden * 3  # the first layer's recurrence, both matrices of the second
    # no gradient for the input; none for the initial state, nor for a recurrent weight beyond what autograd skips
    assert close(total_flops(costs, ["matmul"]), TIMES * (first + others) - first - _initial_states(rows, hidden))


def _initial_states(rows: int, hidden: int) -> int:
    """The gradient of the two layers' initial states, which nobody asks for."""
    return 2 * 2 * rows * 4 * hidden * hidden
