"""Hugging Face families that hear, read and see at once, or look ahead: speech, several modalities, time series."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.zoo.families_text import DECODER, ENCODER, PAIR, SPECIAL
from tests.zoo.family import (
    HEADS,
    IGNORED,
    LABELS,
    LAYERS,
    PIXELS,
    ROWS,
    TOKENS,
    VOCAB,
    WIDTH,
    Batch,
    Family,
    classes,
    ids,
    images,
    lengths_mask,
)
from torch import nn

SAMPLES, FRAMES, MELS, CHANNELS, PAST, AHEAD = 800, 40, 16, 3, 24, 6
WAVES: dict[str, Any] = dict(
    hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=2 * WIDTH, layerdrop=0.0,
    conv_dim=[16, 16, 16], conv_kernel=[8, 4, 4], conv_stride=[4, 4, 2], num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4, vocab_size=20, pad_token_id=0, apply_spec_augment=False, ctc_loss_reduction="mean",
    ctc_zero_infinity=True,
)  # fmt: skip
"""The model's own masking of its features draws from numpy in the forward pass: off."""
TOWER: dict[str, Any] = dict(
    hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=2 * WIDTH
)
SEEING = TOWER | dict(image_size=PIXELS, patch_size=8)
READING = TOWER | dict(vocab_size=VOCAB, max_position_embeddings=32, **SPECIAL)
PATCHES = (PIXELS // 8) ** 2
IMAGE_TOKEN = VOCAB - 1
SERIES: dict[str, Any] = dict(
    prediction_length=AHEAD, context_length=12, lags_sequence=[1, 2, 3], num_time_features=2, d_model=16, encoder_layers=1,
    decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
    encoder_layerdrop=0.0, decoder_layerdrop=0.0, num_static_categorical_features=1, cardinality=[4],
    embedding_dimension=[3], use_cache=False,
)  # fmt: skip


def waves(source: torch.Generator) -> torch.Tensor:
    return torch.randn(ROWS, SAMPLES, generator=source)


def spoken(source: torch.Generator) -> Batch:
    """Sound, and what was said; the second row is shorter, and so is its text."""
    labels = torch.randint(1, 20, (ROWS, 5), generator=source)
    labels[1, 4:] = IGNORED
    mask = torch.ones(ROWS, SAMPLES, dtype=torch.long)
    mask[1, SAMPLES - 100 :] = 0
    return {"input_values": waves(source), "attention_mask": mask, "labels": labels}


def classified_sound(source: torch.Generator) -> Batch:
    return {"input_values": waves(source), "labels": classes(source)}


def listener(name: str, sizes: dict[str, Any]) -> Family:
    return Family(f"{name}Config", sizes, f"{name}ForCTC", spoken)


def features(source: torch.Generator) -> Batch:
    """Mel features, channels before time, and their text."""
    return {"input_features": torch.randn(ROWS, MELS, FRAMES, generator=source), "labels": ids(source, 8)}


def features_by_time(source: torch.Generator) -> Batch:
    """Mel features, time before channels, and their text."""
    mask = lengths_mask(source, FRAMES)
    found = torch.randn(ROWS, FRAMES, MELS, generator=source)
    return {"input_features": found, "attention_mask": mask, "labels": ids(source, 8)}


def classified_spectrum(source: torch.Generator) -> Batch:
    return {"input_values": torch.randn(ROWS, FRAMES, MELS, generator=source), "labels": classes(source)}


def pairs(source: torch.Generator) -> Batch:
    """Texts and their images, told apart from the others of the batch."""
    found = ids(source)
    found[:, -1] = 2
    return {
        "input_ids": found,
        "attention_mask": torch.ones_like(found),
        "pixel_values": images(source),
        "return_loss": True,
    }


def image_and_text(source: torch.Generator) -> Batch:
    """An image at the head of the text, which is continued."""
    found = ids(source, TOKENS).clamp(max=IMAGE_TOKEN - 1)
    found = torch.cat([found[:, :1], torch.full((ROWS, PATCHES), IMAGE_TOKEN), found[:, 1:]], dim=1)
    return {
        "input_ids": found, "attention_mask": torch.ones_like(found), "pixel_values": images(source),
        "labels": found.masked_fill(found == IMAGE_TOKEN, IGNORED),
    }  # fmt: skip


def captions(source: torch.Generator) -> Batch:
    found = ids(source)
    return {"input_ids": found, "pixel_values": images(source), "labels": found.clone()}


def questions(source: torch.Generator) -> Batch:
    """A question about an image, and how good each answer is."""
    return {
        "input_ids": ids(source), "attention_mask": lengths_mask(source), "pixel_values": images(source),
        "labels": torch.rand(ROWS, LABELS, generator=source),
    }  # fmt: skip


def fused(source: torch.Generator) -> Batch:
    return {
        "input_ids": ids(source),
        "pixel_values": images(source),
        "target": torch.randn(ROWS, WIDTH, generator=source),
    }


def fused_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    found = model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"])
    return F.mse_loss(found.multimodal_embeddings[:, 0], batch["target"])


def look(source: torch.Generator) -> Batch:
    return {"pixel_values": images(source), "labels": ids(source, 8)}


def past_and_future(source: torch.Generator) -> Batch:
    return {
        "past_values": torch.randn(ROWS, PAST, CHANNELS, generator=source),
        "future_values": torch.randn(ROWS, AHEAD, CHANNELS, generator=source),
    }  # fmt: skip


def one_series(source: torch.Generator) -> Batch:
    """One value per moment, with the time of day and which series it is."""
    past = 12 + 3
    return {
        "past_values": torch.randn(ROWS, past, generator=source).abs(),
        "past_time_features": torch.randn(ROWS, past, 2, generator=source),
        "past_observed_mask": (torch.rand(ROWS, past, generator=source) < 0.9).float(),
        "static_categorical_features": torch.randint(0, 4, (ROWS, 1), generator=source),
        "future_values": torch.randn(ROWS, AHEAD, generator=source).abs(),
        "future_time_features": torch.randn(ROWS, AHEAD, 2, generator=source),
    }  # fmt: skip


def acted(source: torch.Generator) -> Batch:
    """States, actions and rewards of a game."""
    steps = 6
    return {
        "states": torch.randn(ROWS, steps, 5, generator=source), "actions": torch.randn(ROWS, steps, 3, generator=source),
        "rewards": torch.randn(ROWS, steps, 1, generator=source), "returns_to_go": torch.randn(ROWS, steps, 1, generator=source),
        "timesteps": torch.arange(steps).repeat(ROWS, 1), "attention_mask": torch.ones(ROWS, steps),
    }  # fmt: skip


def acting_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(**batch).action_preds, batch["actions"])


SPEECH: dict[str, Family] = {
    "wav2vec2": listener("Wav2Vec2", WAVES),
    "hubert": listener("Hubert", WAVES),
    "wavlm": listener("WavLM", WAVES | dict(num_buckets=16, max_bucket_distance=32)),
    "unispeech": listener("UniSpeech", WAVES),
    "data2vec_audio": listener("Data2VecAudio", WAVES | dict(conv_pos_kernel_size=5, num_conv_pos_embeddings=2)),
    "wav2vec2_conformer": listener("Wav2Vec2Conformer", WAVES | dict(conv_depthwise_kernel_size=5)),
    "sew": Family("SEWConfig", WAVES | dict(
        squeeze_factor=2, num_labels=LABELS, classifier_proj_size=16
    ), "SEWForSequenceClassification", classified_sound),
    "sew_d": listener("SEWD", WAVES | dict(squeeze_factor=2, position_buckets=8, max_position_embeddings=64)),
    "whisper": Family("WhisperConfig", PAIR | dict(
        num_mel_bins=MELS, max_source_positions=FRAMES // 2, max_target_positions=32,
    ), "WhisperForConditionalGeneration", features),
    "speech_to_text": Family("Speech2TextConfig", PAIR | dict(
        input_feat_per_channel=MELS, input_channels=1, conv_channels=16, max_source_positions=64, max_target_positions=32,
    ), "Speech2TextForConditionalGeneration", features_by_time),
    "ast": Family("ASTConfig", TOWER | dict(
        patch_size=8, frequency_stride=8, time_stride=8, max_length=FRAMES, num_mel_bins=MELS, num_labels=LABELS,
    ), "ASTForAudioClassification", classified_spectrum),
}  # fmt: skip

SEVERAL: dict[str, Family] = {
    "clip": Family("CLIPConfig", dict(text_config=READING, vision_config=SEEING, projection_dim=16), "CLIPModel", pairs),
    "siglip": Family("SiglipConfig", dict(
        text_config=READING | dict(projection_size=WIDTH), vision_config=SEEING
    ), "SiglipModel", pairs),
    "blip": Family("BlipConfig", dict(
        text_config=READING | dict(encoder_hidden_size=WIDTH, sep_token_id=2), vision_config=SEEING, projection_dim=16,
        image_text_hidden_size=16,
    ), "BlipForConditionalGeneration", captions),
    "git": Family("GitConfig", dict(DECODER, vision_config=SEEING), "GitForCausalLM", captions),
    "llava": Family("LlavaConfig", dict(image_token_index=IMAGE_TOKEN, vision_feature_layer=-2),
        "LlavaForConditionalGeneration", image_and_text, parts={
            "text_config": ("LlamaConfig", DECODER), "vision_config": ("CLIPVisionConfig", SEEING),
        }),
    "paligemma": Family("PaliGemmaConfig", dict(image_token_index=IMAGE_TOKEN, projection_dim=WIDTH),
        "PaliGemmaForConditionalGeneration", image_and_text, parts={
            "text_config": ("GemmaConfig", DECODER | dict(head_dim=8, num_key_value_heads=2)),
            "vision_config": ("SiglipVisionConfig", SEEING | dict(projection_dim=WIDTH)),
        }),
    "vilt": Family("ViltConfig", SEEING | dict(
        vocab_size=VOCAB, max_position_embeddings=32, num_labels=LABELS, max_image_length=-1,
    ), "ViltForQuestionAnswering", questions),
    "flava": Family("FlavaConfig", dict(
        text_config=READING, image_config=SEEING, multimodal_config=TOWER, hidden_size=WIDTH, projection_dim=16,
    ), "FlavaModel", fused, fused_loss),
    "vision_encoder_decoder": Family("VisionEncoderDecoderConfig", dict(
        encoder=SEEING | dict(model_type="vit"),
        decoder=ENCODER | dict(model_type="bert", is_decoder=True, add_cross_attention=True),
        decoder_start_token_id=1, pad_token_id=0,
    ), "VisionEncoderDecoderModel", look),
}  # fmt: skip

SERIES_MODELS: dict[str, Family] = {
    "patchtst": Family("PatchTSTConfig", dict(
        num_input_channels=CHANNELS, context_length=PAST, prediction_length=AHEAD, patch_length=4, patch_stride=4,
        d_model=16, num_attention_heads=2, num_hidden_layers=LAYERS, ffn_dim=32, loss="mse",
    ), "PatchTSTForPrediction", past_and_future),
    "patchtsmixer": Family("PatchTSMixerConfig", dict(
        num_input_channels=CHANNELS, context_length=PAST, prediction_length=AHEAD, patch_length=4, patch_stride=4,
        d_model=16, num_layers=LAYERS, loss="mse",
    ), "PatchTSMixerForPrediction", past_and_future),
    "time_series_transformer": Family(
        "TimeSeriesTransformerConfig", SERIES, "TimeSeriesTransformerForPrediction", one_series
    ),
    "informer": Family("InformerConfig", SERIES | dict(attention_type="prob"), "InformerForPrediction", one_series),
    "autoformer": Family("AutoformerConfig", SERIES | dict(
        label_length=6, moving_average=5, autocorrelation_factor=2
    ), "AutoformerForPrediction", one_series),
    "decision_transformer": Family("DecisionTransformerConfig", dict(
        state_dim=5, act_dim=3, hidden_size=WIDTH, max_ep_len=16, n_layer=LAYERS, n_head=HEADS, n_positions=64,
        use_cache=False,
    ), "DecisionTransformerModel", acted, acting_loss),
}  # fmt: skip

SIGNALS: dict[str, Family] = SPEECH | SEVERAL | SERIES_MODELS
