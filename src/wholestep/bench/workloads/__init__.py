"""The workloads of the benchmark: one row each, from TBD's domains and from what came after it.

In: nothing. Out: WORKLOADS, a table that reads as the list of what there is: `smoke` sizes take seconds on two CPU cores, `gpu`
sizes are meant for one large GPU. Nothing is built, and torch is not imported, until a row's `build` is called.
"""

from __future__ import annotations

from wholestep.bench.workload import Workload, later

DIGITS = "real: handwritten digits, enlarged"
PLAYS = "real: nine plays by Shakespeare"
SENTENCES = "synthetic: sentences and the same ones backwards through a dictionary, padded"
_BYTES = {"tokens": "bytes", "vocabulary": 260, "precision": "fp32"}
_PIECES = {"tokens": "bpe", "vocabulary": 8192, "precision": "bf16"}
_NO_DROPOUT = {"dropout": 0.0}
_ENDS = {"bos_token_id": 1, "eos_token_id": 2}

# fmt: off
_ROWS = (
    Workload(
        name="resnet-50", domain="image classification", unit="images", data=DIGITS, tbd="ResNet-50",
        summary="ResNet-50 (He et al., 2015) at 224 pixels, SGD with momentum", build=later("images.build_resnet"),
        smoke={
            "depth": 50, "width": 4, "stem": "small", "image": 16, "classes": 10, "batch": 8, "lr": 0.05, "precision": "fp32",
        },
        gpu={
            # a tenth of the usual rate: without a warm-up the usual one makes losses that depend on the last bit
            "depth": 50, "width": 64, "stem": "large", "image": 224, "classes": 1000, "batch": 256, "lr": 0.01, "precision": "bf16",
        },
    ),
    Workload(
        name="inception-v3", domain="image classification", unit="images", data=DIGITS, tbd="Inception-v3",
        summary="Inception-v3 (Szegedy et al., 2015) at 299 pixels with its second head", build=later("images.build_inception"),
        smoke={
            "image": 75, "width": 1 / 16, "repeats": (1, 1, 1), "second_head": False, "dropout": 0.0, "classes": 10, "batch": 8,
            "lr": 0.05, "precision": "fp32",
        },
        gpu={
            "image": 299, "width": 1.0, "repeats": (3, 4, 2), "second_head": True, "dropout": 0.5, "classes": 1000, "batch": 128,
            "lr": 0.05, "precision": "bf16",
        },
    ),
    Workload(
        name="vit-base", domain="image classification", unit="images", data=DIGITS,
        summary="ViT-B/16 (Dosovitskiy et al., 2020) at 224 pixels, AdamW", build=later("images.build_vit"),
        smoke={
            "image": 16, "patch": 4, "width": 32, "layers": 2, "heads": 4, "classes": 10, "batch": 16, "lr": 3e-3,
            "precision": "fp32",
        },
        gpu={
            "image": 224, "patch": 16, "width": 768, "layers": 12, "heads": 12, "classes": 1000, "batch": 128, "lr": 5e-4,
            "precision": "bf16",
        },
    ),
    Workload(
        name="retinanet", domain="object detection", unit="images", data="real: handwritten digits, several to a picture",
        summary="RetinaNet (Lin et al., 2017) on ResNet-50; anchors are matched to boxes inside the step", tbd="Faster R-CNN",
        build=later("detection.build_detection"),
        smoke={
            "depth": 18, "backbone_width": 8, "image": 64, "width": 8, "looks": 1, "classes": 10, "most": 3, "batch": 4, "lr": 2e-3,
            "precision": "fp32",
        },
        gpu={
            "depth": 50, "backbone_width": 64, "image": 512, "width": 256, "looks": 4, "classes": 80, "most": 12, "batch": 16,
            "lr": 1e-4, "precision": "bf16",
        },
    ),
    Workload(
        name="transformer", domain="machine translation", unit="tokens", data=SENTENCES, tbd="Transformer",
        summary="Transformer, big (Vaswani et al., 2017), on nn.Transformer; units are source tokens, padding included",
        build=later("translation.build_transformer"),
        smoke={
            "words": 64, "width": 32, "layers": 1, "heads": 4, "length": 10, "dropout": 0.0, "batch": 16, "lr": 3e-3,
            "precision": "fp32",
        },
        gpu={
            "words": 32000, "width": 1024, "layers": 6, "heads": 16, "length": 64, "dropout": 0.1, "batch": 128, "lr": 2e-4,
            "precision": "bf16",
        },
    ),
    Workload(
        name="seq2seq", domain="machine translation", unit="tokens", data=SENTENCES, tbd="Seq2Seq",
        summary="LSTMs with attention (Luong et al., 2015; no input feeding); units are source tokens, padding included",
        build=later("translation.build_recurrent"),
        smoke={"words": 64, "width": 32, "layers": 1, "length": 6, "dropout": 0.0, "batch": 16, "lr": 1e-2, "precision": "fp32"},
        gpu={
            "words": 17000, "width": 512, "layers": 2, "length": 25, "dropout": 0.2, "batch": 128, "lr": 1e-3, "precision": "fp32",
        },
    ),
    Workload(
        name="deep-speech-2", domain="speech recognition", unit="seconds of audio", tbd="Deep Speech 2",
        data="synthetic: spectrograms in which every character has its own spectrum",
        summary="Deep Speech 2 (Amodei et al., 2015) on clips of 4 s: convolutions, bidirectional GRUs, CTC as one operator",
        build=later("speech.build_speech"),
        smoke={"bins": 48, "frames": 16, "channels": 4, "width": 16, "layers": 1, "batch": 8, "lr": 3e-3, "precision": "fp32"},
        gpu={"bins": 161, "frames": 400, "channels": 32, "width": 800, "layers": 3, "batch": 64, "lr": 3e-4, "precision": "fp32"},
    ),
    Workload(
        name="wgan-gp", domain="adversarial networks", unit="images", data=DIGITS, tbd="WGAN-GP",
        summary="WGAN-GP (Gulrajani et al., 2017), residual, at 64 pixels: five critic steps with second derivatives, then one",
        build=later("adversarial.build_wgan"),
        smoke={"image": 8, "width": 8, "blocks": 1, "batch": 8, "lr": 1e-3, "precision": "fp32"},
        gpu={"image": 64, "width": 64, "blocks": 4, "batch": 64, "lr": 1e-4, "precision": "fp32"},
    ),
    Workload(
        name="actor-critic", domain="reinforcement learning", unit="frames", tbd="A3C",
        data="synthetic: a game of catching a ball, played on the device",
        summary="synchronous advantage actor-critic with the Atari network; games are played by the plain module in all systems",
        build=later("reinforcement.build_actor_critic"),
        smoke={"copies": 32, "cells": 7, "pixels": 36, "width": 8, "lr": 2e-3, "precision": "fp32"},
        gpu={"copies": 512, "cells": 12, "pixels": 84, "width": 32, "lr": 5e-4, "precision": "fp32"},
    ),
    Workload(
        name="neumf", domain="recommendation", unit="samples", tbd="NCF",
        data="synthetic: clicks decided by hidden tastes, in the sizes of MovieLens-20M",
        summary="NeuMF (He et al., 2017), Adam over whole tables", build=later("recommendation.build_neumf"),
        smoke={"users": 500, "items": 200, "factors": 8, "layers": (32, 16, 8), "batch": 256, "lr": 1e-2, "precision": "fp32"},
        gpu={
            "users": 138_493, "items": 26_744, "factors": 64, "layers": (256, 256, 128, 64), "batch": 1_048_576, "lr": 2e-3,
            "precision": "fp32",
        },
    ),
    Workload(
        name="dlrm", domain="recommendation", unit="samples",
        data="synthetic: clicks decided by dense features and hidden tastes, in the shape of Criteo's logs",
        summary="DLRM (Naumov et al., 2019): 26 tables, products of pairs, SGD", build=later("recommendation.build_dlrm"),
        smoke={
            "tables": 6, "rows": 200, "ids": 2, "bottom": (32, 8), "top": (32, 16), "batch": 128, "lr": 0.5, "precision": "fp32",
        },
        gpu={
            "tables": 26, "rows": 100_000, "ids": 2, "bottom": (512, 256, 128), "top": (1024, 1024, 512, 256), "batch": 65_536,
            "lr": 0.1, "precision": "bf16",
        },
    ),
    Workload(
        name="bert-large", domain="language modelling", unit="tokens", data=PLAYS, tbd="BERT", needs=("transformers", "tokenizers"),
        summary="BERT large (Devlin et al., 2018) of Hugging Face, guessing masked words",
        build=later("language.build_language_model"),
        smoke={
            "preset": "bert-large", "batch": 8, "seq": 32, "lr": 3e-3, **_BYTES,
            "config": {
                "vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
                "max_position_embeddings": 32, **_NO_DROPOUT,
            },
        },
        gpu={"preset": "bert-large", "batch": 32, "seq": 512, "lr": 1e-4, "config": {}, **_PIECES},
    ),
    Workload(
        name="gpt2-medium", domain="language modelling", unit="tokens", data=PLAYS, needs=("transformers", "tokenizers"),
        summary="GPT-2 medium (Radford et al., 2019) of Hugging Face", build=later("language.build_language_model"),
        smoke={
            "preset": "gpt2-medium", "batch": 8, "seq": 32, "lr": 3e-3, **_BYTES,
            "config": {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **_ENDS, **_NO_DROPOUT},
        },
        gpu={"preset": "gpt2-medium", "batch": 16, "seq": 1024, "lr": 3e-4, "config": {}, **_PIECES},
    ),
    Workload(
        name="llama-1b", domain="language modelling", unit="tokens", data=PLAYS, needs=("transformers", "tokenizers"),
        summary="a Llama of 1.2B (Llama 3.2's sizes) of Hugging Face", build=later("language.build_language_model"),
        smoke={
            "preset": "llama-1b", "batch": 8, "seq": 32, "lr": 3e-3, **_BYTES,
            "config": {
                "vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                "intermediate_size": 96, "max_position_embeddings": 32,
            },
        },
        gpu={"preset": "llama-1b", "batch": 8, "seq": 2048, "lr": 3e-4, "config": {}, **_PIECES},
    ),
    Workload(
        name="lstm", domain="language modelling", unit="tokens", data=PLAYS, needs=("tokenizers",),
        summary="an LSTM language model (Zaremba et al., 2014, the medium size): two layers of 650, windows of 35",
        build=later("language.build_lstm"),
        smoke={
            "tokens": "bytes", "vocabulary": 256, "width": 32, "layers": 1, "dropout": 0.0, "batch": 16, "seq": 8, "lr": 2e-2,
            "precision": "fp32",
        },
        gpu={"width": 650, "layers": 2, "dropout": 0.5, "batch": 256, "seq": 35, "lr": 2e-3, **_PIECES, "precision": "fp32"},
    ),
    Workload(
        name="mixture-gpt", domain="language modelling", unit="tokens", data=PLAYS, needs=("tokenizers",),
        summary="a GPT with eight experts in every second layer; two per token, fixed room per expert (Lepikhin et al., 2020)",
        build=later("mixture.build_mixture"),
        smoke={
            "tokens": "bytes", "vocabulary": 256, "width": 32, "layers": 2, "heads": 4, "experts": 4, "batch": 8, "seq": 32,
            "lr": 3e-3, "precision": "fp32",
        },
        gpu={"width": 1024, "layers": 12, "heads": 16, "experts": 8, "batch": 8, "seq": 1024, "lr": 3e-4, **_PIECES},
    ),
    Workload(
        name="dit-base", domain="diffusion", unit="images", data=DIGITS,
        summary="DiT-B/2 (Peebles and Xie, 2022) on pixels, predicting the noise", build=later("diffusion.build_dit"),
        smoke={"image": 8, "patch": 2, "width": 32, "layers": 2, "heads": 4, "batch": 16, "lr": 3e-3, "precision": "fp32"},
        gpu={"image": 32, "patch": 2, "width": 768, "layers": 12, "heads": 12, "batch": 128, "lr": 1e-4, "precision": "bf16"},
    ),
    Workload(
        name="unet", domain="diffusion", unit="images", data=DIGITS,
        summary="the U-Net of DDPM (Ho et al., 2020) at 32 pixels, predicting the noise", build=later("diffusion.build_unet"),
        smoke={
            "image": 8, "width": 8, "growth": (1, 2), "blocks": 1, "looks": 1, "groups": 4, "dropout": 0.0, "batch": 8, "lr": 3e-3,
            "precision": "fp32",
        },
        gpu={
            "image": 32, "width": 128, "growth": (1, 2, 2, 2), "blocks": 2, "looks": 1, "groups": 32, "dropout": 0.1, "batch": 256,
            "lr": 2e-4, "precision": "bf16",
        },
    ),
    Workload(
        name="r-gcn", domain="relational graphs", unit="links",
        data="synthetic: a graph whose relations lead from one hidden kind of node to another",
        summary="R-GCN (Schlichtkrull et al., 2017) on the whole graph: gather and index_add; for Wholestep a message function",
        build=later("relational.build_rgcn"), rewritten=later("relational.build_rgcn_by_tables"),
        smoke={
            "nodes": 200, "relations": 4, "links": 600, "kinds": 5, "width": 16, "known": 100, "lr": 1e-2, "precision": "fp32",
        },
        gpu={
            "nodes": 200_000, "relations": 16, "links": 250_000, "kinds": 32, "width": 64, "known": 20_000, "lr": 1e-2,
            "precision": "fp32",
        },
    ),
)
# fmt: on

WORKLOADS: dict[str, Workload] = {row.name: row for row in _ROWS}
