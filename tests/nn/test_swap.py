"""convert and restore: what is swapped, what is left and why, and that nothing else about the model changes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.nn.lean_models import Block, Net, saved_bytes
from torch import Tensor, nn

import wholestep
from wholestep.errors import BadOption, UnsupportedModel

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 32,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0, "vocab_size": 64}
NO_DROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **NO_DROP))


def bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config)


def gemma() -> nn.Module:
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GROUPED, head_dim=8))


def phi() -> nn.Module:
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**GROUPED))


def t5() -> nn.Module:
    config = transformers.T5Config(**T5, feed_forward_proj="gated-gelu", decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


# (model, classes that must all be swapped, most that may remain of the bytes kept in bf16)
FAMILIES: dict[str, tuple[Callable[[], nn.Module], set[str], float]] = {
    "llama": (llama, {"Linear", "LlamaRMSNorm", "LlamaMLP"}, 0.54),
    "gpt2": (gpt2, {"Conv1D", "LayerNorm", "NewGELUActivation"}, 0.48),
    "bert": (bert, {"Linear", "LayerNorm", "GELUActivation"}, 0.69),
    "gemma": (gemma, {"Linear", "Gemma2RMSNorm", "Gemma2MLP"}, 0.56),
    "phi": (phi, {"Linear", "Phi3RMSNorm", "Phi3MLP"}, 0.56),
    "t5": (t5, {"Linear", "T5LayerNorm", "NewGELUActivation"}, 0.62),
}


def loss_and_gradients(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_hugging_face_keep_less_and_learn_the_same(family: str) -> None:
    make, classes, fraction = FAMILIES[family]
    plain = make()
    lean = copy.deepcopy(plain)
    report = wholestep.nn.convert(lean)
    assert {type(m).__name__ for m in plain.modules()} >= classes
    assert classes <= {change.was for change in report.swapped}
    assert not [item for item in report.left if item.kind in classes]
    ids = torch.randint(0, 64, (2, 16))
    exact = loss_and_gradients(copy.deepcopy(plain).double(), ids)
    eager, ours = loss_and_gradients(plain, ids), loss_and_gradients(lean, ids)
    assert torch.equal(eager["loss"], ours["loss"]) and list(eager) == list(ours)
    for name, value in exact.items():
        # The norms written in Python add three gradients in another order than autograd does: one rounding.
        near = 2 * (eager[name] - value).abs().max() + 4 * torch.finfo(torch.float32).eps * value.abs().max()
        assert (ours[name] - value).abs().max() <= near, name
    before, after = (saved_bytes(m.bfloat16(), input_ids=ids, labels=ids) for m in (plain, lean))
    assert after <= fraction * before


def test_restore_is_exact_and_copies_can_be_restored_too() -> None:
    for make in (Net, llama):
        model = make()
        classes, attributes = [type(m) for m in model.modules()], [set(m.__dict__) for m in model.modules()]
        keys = list(model.state_dict())
        report = wholestep.nn.convert(model)
        assert list(model.state_dict()) == keys
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model]
        for one in copies:
            assert wholestep.nn.restore(one) == len(report.swapped)
            assert [type(m) for m in one.modules()] == classes
            assert [set(m.__dict__) for m in one.modules()] == attributes


def test_hooks_flags_and_references_survive() -> None:
    model = Block(p=0.2).eval()
    model.norm2.train()
    seen: list[str] = []
    model.norm1.register_forward_hook(lambda m, args, out: seen.append("forward"))
    model.up.weight.register_hook(lambda g: seen.append("weight"))
    held = list(model.modules())
    wholestep.nn.convert(model)
    assert all(a is b for a, b in zip(held, model.modules(), strict=True))
    assert [m.training for m in (model.norm1, model.norm2)] == [False, True]
    model(torch.randn(1, 3, 24)).sum().backward()
    assert seen == ["forward", "weight"]


def test_converting_twice_swaps_nothing_more() -> None:
    model = Net()
    first = wholestep.nn.convert(model)
    again = wholestep.nn.convert(model)
    assert first.swapped and not again.swapped
    assert wholestep.nn.restore(model) == len(first.swapped) and wholestep.nn.restore(model) == 0


@pytest.mark.parametrize(
    ("only", "paths"),
    [
        ("GELU", ["blocks.0.act", "blocks.1.act"]),
        ("blocks.0.norm1", ["blocks.0.norm1"]),
        (["blocks.*.up", "head"], ["blocks.0.up", "blocks.1.up", "head"]),
        ("norm", ["norm"]),
    ],
)
def test_only_chooses_by_class_or_path(only: Any, paths: list[str]) -> None:
    assert [change.path for change in wholestep.nn.convert(Net(), only=only).swapped] == paths


def test_requests_that_make_no_sense_are_refused() -> None:
    with pytest.raises(BadOption, match="only='blocs' matches no module of Net"):
        wholestep.nn.convert(Net(), only="blocs")
    with pytest.raises(BadOption, match=r"takes a torch\.nn\.Module, got dict"):
        wholestep.nn.convert({})  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="only=3"):
        wholestep.nn.convert(Net(), only=3)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match=r"restore takes a torch\.nn\.Module, got int"):
        wholestep.nn.restore(3)  # type: ignore[arg-type]


class OddRMSNorm(nn.Module):
    """Looks like Llama's norm and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class OddMLP(nn.Module):
    """The children of Llama's MLP, used in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)) + 1.0)


class OwnLinear(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def left(module: nn.Module) -> str:
    (item,) = [item for item in wholestep.nn.convert(module).left if item.path == ""]
    assert type(module).__name__ == item.kind
    return item.reason


def test_what_does_not_agree_is_left_and_said() -> None:
    assert "differs by up to" in left(OddRMSNorm())
    assert "differs by up to" in left(OddMLP())
    assert left(OwnLinear(3, 3)) == "OwnLinear has a forward of its own"
    assert left(nn.ReLU()) == "it keeps its output, which the next layer shares already"
    assert left(nn.SiLU(inplace=True)) == "it works in place"
    assert left(nn.Dropout(0.0)).startswith("p is 0")
    assert "meta device" in left(nn.Linear(3, 3, device="meta"))
    patched = nn.Linear(3, 3)
    patched.forward = lambda x: x  # type: ignore[method-assign]
    assert "replaced on the instance" in left(patched)


def test_hooks_inside_a_gated_mlp_are_not_run_by_the_probe() -> None:
    model = llama()
    calls: list[int] = []
    for module in model.modules():
        module.register_forward_hook(lambda *_: calls.append(1))
    report = wholestep.nn.convert(model)
    assert not calls
    assert "its activation has hooks" in {i.reason.split(",")[0] for i in report.left if i.kind == "LlamaMLP"}


def test_the_report_is_short_and_names_what_changes() -> None:
    text = str(wholestep.nn.convert(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Dropout(0.1), nn.ReLU())))
    assert text.splitlines() == [
        "lean layers: 3 swapped, 1 left",
        "  swapped    2 x Linear",
        "  swapped    1 x Dropout (draws other masks than torch from the same seed)",
        "  left       1 x ReLU (3): it keeps its output, which the next layer shares already",
    ]


def test_a_module_wrapped_since_cannot_be_restored_in_silence() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wholestep.nn.convert(model)
    model[0].__class__ = type("FSDPLinear", (type(model[0]),), {})
    with pytest.raises(UnsupportedModel, match="0 was a Linear and has become a FSDPLinear"):
        wholestep.nn.restore(model)
