"""Hugging Face models of the zoo, built from tiny configs: nothing is downloaded. Dropout is on everywhere."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.case import NUM_BATCHES, Built

VOCAB, WIDTH, HEADS, LAYERS, ROWS, TOKENS = 101, 32, 4, 2, 3, 12
IGNORED = -100


def _ids(generator: torch.Generator, rows: int = ROWS, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, tokens), generator=generator)


def _text_batches(*, masked: bool = False, shifted: bool = False, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """`masked`: rows of several lengths, with an attention mask. `shifted`: labels are the ids (a causal model)."""
    batches = []
    for index in range(NUM_BATCHES):
        generator = torch.Generator().manual_seed(seed + index)
        ids = _ids(generator)
        labels = ids.clone() if shifted else _ids(generator)
        batch = {"input_ids": ids, "labels": labels}
        if masked:
            lengths = torch.randint(3, TOKENS + 1, (ROWS, 1), generator=generator)
            mask = (torch.arange(TOKENS)[None, :] < lengths).long()
            batch |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, IGNORED)}
        batches.append(batch)
    return batches


def _text_edges(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    ids, labels = batch["input_ids"], batch["labels"]
    one_label = torch.full_like(labels, IGNORED)
    one_label[0, 2] = 7
    edges = [
        batch | {"input_ids": torch.zeros_like(ids), "labels": torch.zeros_like(labels)},
        batch | {"input_ids": torch.full_like(ids, VOCAB - 1), "labels": torch.full_like(labels, VOCAB - 1)},
        batch | {"labels": one_label},
        batch | {"input_ids": torch.full_like(ids, 5)},
    ]
    if "attention_mask" in batch:
        padded_row = batch["attention_mask"].clone()
        padded_row[-1] = 0
        full = torch.ones_like(padded_row)
        silent = labels.clone()
        silent[-1] = IGNORED
        edges += [batch | {"attention_mask": full}, batch | {"attention_mask": padded_row, "labels": silent}]
    return edges


def _text(model: torch.nn.Module, **options: Any) -> Built:
    batches = _text_batches(**options)
    return Built(model.train(), batches, edge_batches=_text_edges(batches[0]))


def _bert_sizes() -> dict[str, Any]:
    return dict(vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                intermediate_size=2 * WIDTH, max_position_embeddings=32)  # fmt: skip


def bert(attention: str = "sdpa") -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**_bert_sizes(), attn_implementation=attention)
    return _text(transformers.BertForMaskedLM(config), masked=True)


def bert_eager_attention() -> Built:
    return bert("eager")


def roberta() -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.RobertaConfig(**_bert_sizes(), pad_token_id=1, attn_implementation="sdpa")
    return _text(transformers.RobertaForMaskedLM(config), masked=True)


def gpt2() -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=32, bos_token_id=0, eos_token_id=1,
        use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return _text(transformers.GPT2LMHeadModel(config), shifted=True)


def llama() -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2, intermediate_size=3 * WIDTH, max_position_embeddings=32,
        attention_dropout=0.1, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    return _text(transformers.LlamaForCausalLM(config), shifted=True)


def opt() -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=2 * WIDTH,
        max_position_embeddings=32, word_embed_proj_dim=WIDTH, layerdrop=0.0, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    return _text(transformers.OPTForCausalLM(config), shifted=True)


def t5() -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=2 * WIDTH, num_layers=LAYERS, num_heads=HEADS,
        dropout_rate=0.1, decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return _text(transformers.T5ForConditionalGeneration(config), masked=True)


def vit() -> Built:
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=2 * WIDTH,
        image_size=16, patch_size=4, num_labels=10, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
        attn_implementation="sdpa",
    )  # fmt: skip
    batches = []
    for index in range(NUM_BATCHES):
        generator = torch.Generator().manual_seed(index)
        images = torch.randn(ROWS, 3, 16, 16, generator=generator)
        batches.append({"pixel_values": images, "labels": torch.randint(0, 10, (ROWS,), generator=generator)})
    first = batches[0]
    edges = [
        first | {"pixel_values": torch.zeros_like(first["pixel_values"])},
        first | {"pixel_values": first["pixel_values"] * 1e3, "labels": torch.full_like(first["labels"], 9)},
    ]
    return Built(transformers.ViTForImageClassification(config).train(), batches, edge_batches=edges)
