"""The table of the zoo: every case by name."""

from __future__ import annotations

from tests.zoo import hf, plain, several_modules
from tests.zoo.case import Built, Case

__all__ = ["ZOO", "Built", "Case"]

CASES = (
    Case("bert", hf.bert, "hf", notes="masked language model, padded rows"),
    Case("bert_eager", hf.bert_eager_attention, "hf", notes="attention written out in Python"),
    Case("roberta", hf.roberta, "hf", notes="positions from the padding"),
    Case("gpt2", hf.gpt2, "hf", notes="tied head, causal"),
    Case(
        "llama", hf.llama, "hf", notes="grouped heads; with dropout dk, dv are summed in another order", bitwise=False
    ),
    Case("opt", hf.opt, "hf", notes="layerdrop 0: a random number per layer is drawn and compared"),
    Case("t5", hf.t5, "hf", notes="encoder and decoder, relative positions"),
    Case("vit", hf.vit, "hf", notes="images"),
    Case("mlp", plain.mlp, "plain"),
    Case("bn_cnn", plain.bn_cnn, "plain", notes="running statistics, in-place relu"),
    Case(
        "bn_cumulative",
        plain.bn_cumulative,
        "plain",
        notes="momentum=None: statistics move by the count that is read, with a rounding more",
        bitwise=False,
    ),
    Case("transformer", plain.transformer, "plain", notes="nn.Transformer, causal target mask"),
    Case("lstm", plain.lstm, "plain", notes="two layers, dropout between them inside the operator"),
    Case("lora", plain.lora, "plain", notes="frozen base, low-rank trained matrices"),
    Case("bf16_weights", plain.bf16_weights, "plain", notes="weights in bfloat16"),
    Case("tied_frozen", plain.tied_frozen, "plain", notes="tied, frozen and unused parameters"),
    Case("inplace_buffers", plain.inplace_buffers, "plain", notes="writes to views and buffers"),
    Case("wgan_gp", several_modules.wgan_gp, "plain", notes="second derivative; two steps on shared modules"),
    Case("teacher_student", several_modules.teacher_student, "plain", notes="EMA teacher in the loss closure"),
)
ZOO: dict[str, Case] = {case.name: case for case in CASES}
