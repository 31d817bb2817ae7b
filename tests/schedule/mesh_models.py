"""Tiny models, a batch of each, and how it is cut: recipes as a person would write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from wholestep.schedule import Schedule

IDS, LENGTH = 64, 8
Made = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def _ids(rows: int = 4) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, IDS, (rows, LENGTH))
    ids[0, 0], ids[-1, -1] = 0, IDS - 1
    return {"input_ids": ids, "labels": ids.clone()}


def bert() -> Made:
    config = hf.BertConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=64, vocab_size=IDS,
                           max_position_embeddings=LENGTH)  # fmt: skip
    mask = torch.ones(4, LENGTH, dtype=torch.int64)
    mask[1, 5:] = 0
    return hf.BertForMaskedLM(config), {**_ids(), "attention_mask": mask}


def gpt2() -> Made:
    config = hf.GPT2Config(
        n_layer=2, n_head=4, n_embd=32, vocab_size=IDS, n_positions=LENGTH, bos_token_id=0, eos_token_id=0
    )
    return hf.GPT2LMHeadModel(config), _ids()


def llama() -> Made:
    config = hf.LlamaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
                            intermediate_size=64, vocab_size=IDS, attention_dropout=0.1)  # fmt: skip
    return hf.LlamaForCausalLM(config), _ids()


def t5() -> Made:
    config = hf.T5Config(num_layers=1, num_decoder_layers=1, num_heads=4, d_model=32, d_kv=8, d_ff=64, vocab_size=IDS,
                         decoder_start_token_id=0, use_cache=False)  # fmt: skip
    return hf.T5ForConditionalGeneration(config), _ids()


def vit() -> Made:
    config = hf.ViTConfig(num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=64, image_size=16,
                          patch_size=8, num_labels=8, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)  # fmt: skip
    return hf.ViTForImageClassification(config), {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.arange(4)}


def mixtral() -> Made:
    config = hf.MixtralConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, hidden_size=32,
                              intermediate_size=64, vocab_size=IDS, num_local_experts=4, attention_dropout=0.1)  # fmt: skip
    return hf.MixtralForCausalLM(config), _ids()


# fmt: off
RECIPES: dict[Callable[[], Made], tuple[tuple[str, str, int], ...]] = {
    bert: (
        ("bert.encoder.layer.*.attention.self.[qkv]*", "weight", 0),
        ("bert.encoder.layer.*.attention.self.[qkv]*", "bias", 0),
        ("bert.encoder.layer.*.attention.output.dense", "weight", 1),
        ("bert.encoder.layer.*.intermediate.dense", "weight", 0),
        ("bert.encoder.layer.*.intermediate.dense", "bias", 0),
        ("bert.encoder.layer.*.output.dense", "weight", 1),
        ("bert.embeddings.word_embeddings", "weight", 0),
    ),
    gpt2: (
        ("transformer.h.*.attn.c_attn", "weight", 1),
        ("transformer.h.*.attn.c_attn", "bias", 0),
        ("transformer.h.*.attn.c_proj", "weight", 0),
        ("transformer.h.*.mlp.c_fc", "weight", 1),
        ("transformer.h.*.mlp.c_fc", "bias", 0),
        ("transformer.h.*.mlp.c_proj", "weight", 0),
        ("transformer.wte", "weight", 0),
    ),
    llama: (
        ("model.layers.*.self_attn.[qkv]_proj", "weight", 0),
        ("model.layers.*.self_attn.o_proj", "weight", 1),
        ("model.layers.*.mlp.gate_proj", "weight", 0),
        ("model.layers.*.mlp.up_proj", "weight", 0),
        ("model.layers.*.mlp.down_proj", "weight", 1),
        ("model.embed_tokens", "weight", 0),
        ("lm_head", "weight", 0),
    ),
    t5: (
        ("*.block.*.layer.*.*Attention.[qkv]", "weight", 0),
        ("*.block.*.layer.*.*Attention.o", "weight", 1),
        ("*.block.*.layer.*.*Attention.relative_attention_bias", "weight", 1),
        ("*.block.*.layer.*.DenseReluDense.wi", "weight", 0),
        ("*.block.*.layer.*.DenseReluDense.wo", "weight", 1),
        ("shared", "weight", 0),
    ),
    vit: (
        ("vit.layers.*.attention.[qkv]_proj", "weight", 0),
        ("vit.layers.*.attention.[qkv]_proj", "bias", 0),
        ("vit.layers.*.attention.o_proj", "weight", 1),
        ("vit.layers.*.mlp.fc1", "weight", 0),
        ("vit.layers.*.mlp.fc1", "bias", 0),
        ("vit.layers.*.mlp.fc2", "weight", 1),
    ),
    mixtral: (
        ("model.layers.*.self_attn.[qkv]_proj", "weight", 0),
        ("model.layers.*.self_attn.o_proj", "weight", 1),
        ("model.layers.*.mlp.experts", "gate_up_proj", 1),
        ("model.layers.*.mlp.experts", "down_proj", 2),
        ("model.embed_tokens", "weight", 0),
        ("lm_head", "weight", 0),
    ),
}
# fmt: on


def cut_model(make: Callable[[], Made]) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Any]:
    """The model in train mode, its batch, and its schedule."""
    torch.manual_seed(0)
    model, batch = make()
    sch = Schedule(model.train())
    for at, name, axis in RECIPES[make]:
        sch[at].shard(name, axis)
    return model, batch, sch
