"""The defaults, written down: by structure, and without any effect on what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.zoo import hf
from tests.zoo.case import Built
from tests.zoo.models import ZOO
from torch import nn

import wholestep
from wholestep.schedule import Recipe
from wholestep.schedule.changes import Edited
from wholestep.schedule.recipes import attention_globs, heads, layer_globs

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::wholestep.errors.WholestepWarning")


def albert() -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=hf.VOCAB, embedding_size=16, hidden_size=hf.WIDTH, num_hidden_layers=2, num_attention_heads=hf.HEADS,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    return hf._text(transformers.AlbertForMaskedLM(config), masked=True)


def gpt_neo() -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=hf.VOCAB, hidden_size=hf.WIDTH, num_layers=2, num_heads=hf.HEADS, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=32, window_size=8, use_cache=False, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return hf._text(transformers.GPTNeoForCausalLM(config), shifted=True)


def qwen() -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=hf.VOCAB, hidden_size=hf.WIDTH, num_hidden_layers=2, num_attention_heads=hf.HEADS, num_key_value_heads=2,
        intermediate_size=64, max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return hf._text(transformers.Qwen2ForCausalLM(config), shifted=True)


def wide_resnet() -> Built:
    from wholestep.train.models.resnet import ResNet, ResNetConfig

    torch.manual_seed(0)
    model = ResNet(ResNetConfig(depth=18, width=16, image_size=16, channels=3))
    batches = [(torch.randn(3, 3, 16, 16), torch.randint(0, 10, (3,))) for _ in range(5)]

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Built(model, batches, loss_fn=loss)


MORE: dict[str, Callable[[], Built]] = {"albert": albert, "gpt_neo": gpt_neo, "qwen": qwen, "wide_resnet": wide_resnet}
BUILDS: dict[str, Callable[[], Built]] = {name: case.build for name, case in ZOO.items()} | MORE
QUICK = ("mlp", "bn_cnn", "gpt2")


def programs(build: Callable[[], Built], recipe: Callable[[Any], Any]) -> list[str | None]:
    """Of the steps of a case, compiled with the recipe of each model."""
    found = []
    built: Built | None = build()
    while built is not None:
        step = wholestep.compile(
            built.model, built.loss_fn, built.make_optimizer("sgd"), built.batches[0], backend="interpret", verbose=False,
            check="off", recipe=recipe(built.model),
        )  # fmt: skip
        found.append(step.program)
        built = built.partner
    return found


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.zoo) for n in BUILDS])
def test_the_defaults_written_down_change_no_node(name: str) -> None:
    plain = programs(BUILDS[name], lambda model: None)
    assert programs(BUILDS[name], lambda model: Recipe()) == plain
    assert programs(BUILDS[name], wholestep.recipes.auto) == plain


def test_layers_attentions_and_heads_are_found_by_structure() -> None:
    gpt2 = hf.gpt2().model
    assert layer_globs(gpt2) == ["transformer.h.*"] and heads(gpt2) == ["lm_head"]
    assert attention_globs(gpt2) == ["transformer.h.*.attn"]
    t5 = ZOO["t5"].build().model
    assert layer_globs(t5) == ["encoder.block.*", "decoder.block.*"]
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    assert layer_globs(plain) == [] and attention_globs(plain) == []


def test_an_edited_default_is_a_wish() -> None:
    model = hf.llama().model
    sch = wholestep.recipes.auto(model)
    text = sch.text()
    assert '{ recompute = "model.layers.*", ratio = "auto" },' in text and sch.diff() == "no difference"
    assert sch.build() is model and all(not isinstance(module, Edited) for module in model.modules())


def test_several_modules_have_names_in_front() -> None:
    models = {"one": nn.Sequential(nn.Linear(2, 2)), "other": nn.Linear(2, 2)}
    sch = wholestep.schedule(models)
    sch["one.0"].recompute()
    assert list(sch["one.*"].modules) == ["one.0"]
