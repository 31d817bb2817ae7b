"""Hugging Face families that read text: decoders, experts, state spaces, encoders, encoder-decoders, long attention."""

from __future__ import annotations

from typing import Any

import torch
from tests.zoo.family import (
    HEADS,
    LABELS,
    LAYERS,
    ROWS,
    TOKENS,
    VOCAB,
    WIDTH,
    Family,
    MakeBatch,
    answers,
    causal,
    classified_text,
    classified_tokens,
    ids,
    masked,
    masked_of,
    padded_causal,
    seq2seq,
    seq2seq_of,
)

SPECIAL: dict[str, Any] = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
ENCODER: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=2 * WIDTH,
    max_position_embeddings=64, **SPECIAL,
)  # fmt: skip
DECODER = ENCODER | dict(use_cache=False)
GROUPED = DECODER | dict(num_key_value_heads=HEADS // 2)
"""Decoders whose heads share keys and values."""
EXPERTS = GROUPED | dict(num_experts_per_tok=2)
GPT: dict[str, Any] = dict(
    vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=64, use_cache=False, **SPECIAL
)
PAIR: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_attention_heads=HEADS,
    decoder_attention_heads=HEADS, encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH, max_position_embeddings=64,
    encoder_layerdrop=0.0, decoder_layerdrop=0.0, use_cache=False, decoder_start_token_id=2, **SPECIAL,
)  # fmt: skip
T5: dict[str, Any] = dict(
    vocab_size=VOCAB, d_model=WIDTH, d_kv=WIDTH // HEADS, d_ff=2 * WIDTH, num_layers=LAYERS, num_heads=HEADS,
    decoder_start_token_id=0, use_cache=False, pad_token_id=0, eos_token_id=1,
)  # fmt: skip
SCANNED: dict[str, Any] = dict(mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=4)
"""State spaces beside attention."""
LATENT = EXPERTS | dict(
    num_key_value_heads=HEADS, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    moe_intermediate_size=WIDTH, n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
DISENTANGLED: dict[str, Any] = dict(
    relative_attention=True,
    pos_att_type=["p2c", "c2p"],
    position_buckets=8,
    share_att_key=True,
    norm_rel_ebd="layer_norm",
)


def decoder(name: str, sizes: dict[str, Any], batch: MakeBatch = causal) -> Family:
    return Family(f"{name}Config", sizes, f"{name}ForCausalLM", batch)


def encoder(name: str, more: dict[str, Any] | None = None, batch: MakeBatch = masked) -> Family:
    return Family(f"{name}Config", ENCODER | (more or {}), f"{name}ForMaskedLM", batch)


def classifier(name: str, more: dict[str, Any] | None = None, batch: MakeBatch = classified_text) -> Family:
    return Family(
        f"{name}Config", ENCODER | dict(num_labels=LABELS) | (more or {}), f"{name}ForSequenceClassification", batch
    )


def tagger(name: str, more: dict[str, Any] | None = None) -> Family:
    sizes = ENCODER | dict(num_labels=LABELS) | (more or {})
    return Family(f"{name}Config", sizes, f"{name}ForTokenClassification", classified_tokens)


def reader(name: str, more: dict[str, Any] | None = None) -> Family:
    return Family(f"{name}Config", ENCODER | (more or {}), f"{name}ForQuestionAnswering", answers)


def pair(name: str, sizes: dict[str, Any] = PAIR, batch: MakeBatch = seq2seq) -> Family:
    return Family(f"{name}Config", sizes, f"{name}ForConditionalGeneration", batch)


def unpadded(source: torch.Generator) -> dict[str, Any]:
    """Some words hidden, all rows full."""
    return {key: value for key, value in masked(source).items() if key != "attention_mask"}


def added_mask(source: torch.Generator) -> dict[str, Any]:
    """The mask as it is added to attention scores: landmarks attend to words, so a mask of words by words does not fit."""
    batch = masked(source)
    hidden = batch["attention_mask"][:, None, None, :] == 0
    return batch | {"attention_mask": torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)}


def replaced_words(source: torch.Generator) -> dict[str, Any]:
    """Which words are not the original ones."""
    labels = torch.randint(0, 2, (ROWS, TOKENS), generator=source)
    return {"input_ids": ids(source), "labels": labels}


DECODERS: dict[str, Family] = {
    "llama": decoder("Llama", GROUPED, padded_causal),
    "mistral": decoder("Mistral", GROUPED | dict(sliding_window=8)),
    "granite": decoder("Granite", GROUPED),
    "qwen2": decoder("Qwen2", GROUPED),
    "qwen3": decoder("Qwen3", GROUPED | dict(head_dim=8)),
    "gemma": decoder("Gemma", GROUPED | dict(head_dim=8)),
    "gemma2": decoder("Gemma2", GROUPED | dict(head_dim=8, sliding_window=8)),
    "gemma3": Family("Gemma3TextConfig", GROUPED | dict(head_dim=8, sliding_window=8), "Gemma3ForCausalLM", causal),
    "phi": decoder("Phi", DECODER),
    "phi3": decoder("Phi3", GROUPED),
    "stablelm": decoder("StableLm", GROUPED),
    "cohere": decoder("Cohere", GROUPED),
    "cohere2": decoder("Cohere2", GROUPED | dict(sliding_window=8)),
    "olmo": decoder("Olmo", GROUPED),
    "olmo2": decoder("Olmo2", GROUPED),
    "starcoder2": decoder("Starcoder2", GROUPED),
    "persimmon": decoder("Persimmon", DECODER),
    "nemotron": decoder("Nemotron", GROUPED),
    "glm": decoder("Glm", GROUPED | dict(head_dim=8)),
    "smollm3": decoder("SmolLM3", GROUPED),
    "glm4": decoder("Glm4", GROUPED | dict(head_dim=8, partial_rotary_factor=0.5)),
    "lfm2": decoder("Lfm2", GROUPED | dict(layer_types=["conv", "full_attention"], conv_L_cache=3, block_multiple_of=8)),
    "falcon_h1": decoder("FalconH1", GROUPED | SCANNED | dict(mamba_d_ssm=64, mamba_n_groups=1)),
    "bamba": decoder("Bamba", GROUPED | SCANNED | dict(mamba_n_groups=1, attn_layer_indices=[1])),
    "granite_moe_hybrid": decoder("GraniteMoeHybrid", EXPERTS | SCANNED | dict(
        num_local_experts=4, shared_intermediate_size=WIDTH, layer_types=["mamba", "attention"], output_router_logits=True,
    )),
    "ernie4_5_moe": decoder("Ernie4_5_Moe", GROUPED | dict(
        moe_num_experts=4, moe_k=2, moe_intermediate_size=WIDTH, moe_layer_start_index=1, head_dim=8,
    )),
    "hunyuan_moe": decoder("HunYuanMoEV1", GROUPED | dict(num_experts=4, moe_topk=2, head_dim=8)),
    "llama4": Family("Llama4TextConfig", EXPERTS | dict(
        num_local_experts=2, num_experts_per_tok=1, intermediate_size_mlp=2 * WIDTH, head_dim=8, attention_chunk_size=8,
    ), "Llama4ForCausalLM", causal),
    "gpt2": Family("GPT2Config", GPT, "GPT2LMHeadModel", padded_causal),
    "gpt_neo": decoder("GPTNeo", dict(
        vocab_size=VOCAB, hidden_size=WIDTH, num_layers=LAYERS, num_heads=HEADS, max_position_embeddings=64, window_size=8,
        attention_types=[[["global", "local"], 1]], use_cache=False, **SPECIAL,
    )),
    "gpt_neox": decoder("GPTNeoX", DECODER),
    "gpt_bigcode": decoder("GPTBigCode", GPT),
    "gptj": decoder("GPTJ", GPT | dict(rotary_dim=4)),
    "codegen": decoder("CodeGen", GPT | dict(rotary_dim=4, n_ctx=64)),
    "bloom": decoder("Bloom", dict(
        vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False, **SPECIAL
    )),
    "mpt": decoder("Mpt", dict(
        vocab_size=VOCAB, d_model=WIDTH, n_layers=LAYERS, n_heads=HEADS, expansion_ratio=2, max_seq_len=64, use_cache=False,
        **SPECIAL,
    )),
    "falcon": decoder("Falcon", DECODER),
    "opt": decoder("OPT", dict(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, ffn_dim=2 * WIDTH,
        max_position_embeddings=64, word_embed_proj_dim=WIDTH, layerdrop=0.0, use_cache=False, **SPECIAL,
    ), padded_causal),
    "xglm": decoder("XGLM", dict(
        vocab_size=VOCAB, d_model=WIDTH, num_layers=LAYERS, attention_heads=HEADS, ffn_dim=2 * WIDTH,
        max_position_embeddings=64, layerdrop=0.0, use_cache=False, **SPECIAL,
    )),
    "biogpt": decoder("BioGpt", DECODER | dict(layerdrop=0.0)),
    "ctrl": Family("CTRLConfig", GPT | dict(dff=2 * WIDTH), "CTRLLMHeadModel", causal),
    "openai_gpt": Family("OpenAIGPTConfig", GPT, "OpenAIGPTLMHeadModel", causal),
    "xlnet": Family("XLNetConfig", dict(
        vocab_size=VOCAB, d_model=WIDTH, n_layer=LAYERS, n_head=HEADS, d_inner=2 * WIDTH, use_mems_train=False, **SPECIAL,
    ), "XLNetLMHeadModel", causal),
}  # fmt: skip

MIXTURES: dict[str, Family] = {
    "mixtral": decoder("Mixtral", EXPERTS | dict(num_local_experts=4, output_router_logits=True)),
    "granitemoe": decoder("GraniteMoe", EXPERTS | dict(num_local_experts=4, output_router_logits=True)),
    "qwen2_moe": decoder("Qwen2Moe", EXPERTS | dict(
        num_experts=4, moe_intermediate_size=WIDTH, shared_expert_intermediate_size=WIDTH, output_router_logits=True,
    )),
    "qwen3_moe": decoder("Qwen3Moe", EXPERTS | dict(num_experts=4, moe_intermediate_size=WIDTH, head_dim=8)),
    "deepseek_v2": decoder("DeepseekV2", LATENT),
    "deepseek_v3": decoder("DeepseekV3", LATENT),
    "gpt_oss": decoder("GptOss", EXPERTS | dict(num_local_experts=4, head_dim=8, sliding_window=8)),
    "olmoe": decoder("Olmoe", EXPERTS | dict(num_experts=4)),
    "phimoe": decoder("Phimoe", EXPERTS | dict(num_local_experts=4)),
    "jamba": decoder("Jamba", EXPERTS | dict(
        num_experts=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False,
    )),
    "switch_transformers": pair("SwitchTransformers", T5 | dict(
        num_experts=4, num_decoder_layers=LAYERS, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    )),
}  # fmt: skip

STATE_SPACES: dict[str, Family] = {
    "mamba": decoder("Mamba", dict(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8, use_cache=False, **SPECIAL
    )),
    "mamba2": decoder("Mamba2", dict(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8, num_heads=8, head_dim=8, n_groups=2,
        chunk_size=8, use_cache=False, **SPECIAL,
    )),
    "falcon_mamba": decoder("FalconMamba", dict(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8, use_cache=False, **SPECIAL
    )),
    "rwkv": decoder("Rwkv", dict(
        vocab_size=VOCAB, hidden_size=WIDTH, attention_hidden_size=WIDTH, num_hidden_layers=LAYERS, context_length=32,
        use_cache=False, **SPECIAL,
    )),
    "recurrent_gemma": decoder("RecurrentGemma", GROUPED | dict(
        lru_width=WIDTH, attention_window_size=8, block_types=("recurrent", "attention"),
    )),
}  # fmt: skip

ENCODERS: dict[str, Family] = {
    "bert": encoder("Bert"),
    "roberta": classifier("Roberta"),
    "xlm_roberta": tagger("XLMRoberta"),
    "camembert": reader("Camembert"),
    "distilbert": Family("DistilBertConfig", dict(
        vocab_size=VOCAB, dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=2 * WIDTH, max_position_embeddings=64,
        pad_token_id=0,
    ), "DistilBertForQuestionAnswering", answers),
    "albert": classifier("Albert", dict(embedding_size=16)),
    "electra": Family("ElectraConfig", ENCODER | dict(embedding_size=16), "ElectraForPreTraining", replaced_words),
    "mpnet": encoder("MPNet"),
    "deberta": encoder("Deberta", dict(relative_attention=True, pos_att_type=["p2c", "c2p"], max_relative_positions=16)),
    "deberta_v2": encoder("DebertaV2", DISENTANGLED),
    "deberta_v2_classifier": classifier("DebertaV2", DISENTANGLED),
    "squeezebert": classifier("SqueezeBert", dict(embedding_size=WIDTH)),
    "mobilebert": tagger("MobileBert", dict(
        embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16, num_feedforward_networks=2,
    )),
    "rembert": encoder("RemBert", dict(input_embedding_size=16, output_embedding_size=16)),
    "convbert": reader("ConvBert", dict(embedding_size=16, conv_kernel_size=5, head_ratio=2)),
    "roformer": encoder("RoFormer", dict(embedding_size=WIDTH)),
    "megatron_bert": encoder("MegatronBert"),
    "modernbert": encoder("ModernBert", dict(
        local_attention=8, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2,
    )),
    "esm": encoder("Esm", dict(mask_token_id=2, position_embedding_type="rotary")),
    "xlm": Family("XLMConfig", dict(
        vocab_size=VOCAB, emb_dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, max_position_embeddings=64, n_langs=1, bos_index=1,
        eos_index=2, pad_index=0, unk_index=3, mask_index=4, use_cache=False, pad_token_id=0,
    ), "XLMWithLMHeadModel", masked),
    "canine": Family("CanineConfig", ENCODER | dict(
        num_labels=LABELS, downsampling_rate=2, upsampling_kernel_size=3, num_hash_functions=2, num_hash_buckets=64,
        local_transformer_stride=8, type_vocab_size=2,
    ), "CanineForSequenceClassification", classified_text),
}  # fmt: skip

LONG: dict[str, Family] = {
    "longformer": encoder("Longformer", dict(attention_window=[8, 8]), masked_of(16)),
    "big_bird": encoder("BigBird", dict(
        attention_type="block_sparse", block_size=4, num_random_blocks=1, max_position_embeddings=64,
    ), masked_of(32)),
    "led": pair("LED", {
        name: size for name, size in PAIR.items() if name != "max_position_embeddings"
    } | dict(attention_window=[8, 8], max_encoder_position_embeddings=64, max_decoder_position_embeddings=64), seq2seq_of(16)),
    "reformer": Family("ReformerConfig", dict(
        vocab_size=VOCAB, hidden_size=WIDTH, num_attention_heads=2, attention_head_size=16, feed_forward_size=64,
        attn_layers=["local", "lsh"], axial_pos_shape=[4, 4], axial_pos_embds_dim=[8, 24], local_attn_chunk_length=4,
        lsh_attn_chunk_length=4, num_buckets=2, num_hashes=1, is_decoder=False, max_position_embeddings=64, hash_seed=0,
        use_cache=False, **SPECIAL,
    ), "ReformerForMaskedLM", masked_of(16)),
    "yoso": encoder("Yoso", dict(use_expectation=True, num_hash=4)),
    "nystromformer": encoder("Nystromformer", dict(num_landmarks=4, segment_means_seq_len=TOKENS), added_mask),
    "fnet": Family("FNetConfig", dict(
        vocab_size=VOCAB, hidden_size=WIDTH, num_hidden_layers=LAYERS, intermediate_size=2 * WIDTH,
        max_position_embeddings=64, **SPECIAL,
    ), "FNetForMaskedLM", unpadded),
    "funnel": Family("FunnelConfig", dict(
        vocab_size=VOCAB, block_sizes=[1, 1], num_decoder_layers=1, d_model=WIDTH, n_head=HEADS, d_head=8, d_inner=64,
    ), "FunnelForMaskedLM", masked),
    "longt5": pair("LongT5", T5 | dict(
        local_radius=4, global_block_size=4, encoder_attention_type="transient-global"
    ), seq2seq_of(16)),
    "bigbird_pegasus": pair("BigBirdPegasus", PAIR | dict(block_size=4, num_random_blocks=1), seq2seq_of(32)),
}  # fmt: skip

PAIRS: dict[str, Family] = {
    "t5": pair("T5", T5),
    "mt5": pair("MT5", T5),
    "umt5": pair("UMT5", T5),
    "bart": pair("Bart"),
    "mbart": pair("MBart"),
    "pegasus": pair("Pegasus"),
    "marian": Family("MarianConfig", PAIR, "MarianMTModel", seq2seq),
    "blenderbot": pair("Blenderbot"),
    "m2m_100": pair("M2M100"),
    "prophetnet": pair("ProphetNet", dict(
        vocab_size=VOCAB, hidden_size=WIDTH, num_encoder_layers=LAYERS, num_decoder_layers=LAYERS,
        num_encoder_attention_heads=HEADS, num_decoder_attention_heads=HEADS, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=64, num_buckets=8, relative_max_distance=16, decoder_start_token_id=1, use_cache=False,
        **SPECIAL,
    )),
}  # fmt: skip

TEXT: dict[str, Family] = DECODERS | MIXTURES | STATE_SPACES | ENCODERS | LONG | PAIRS
