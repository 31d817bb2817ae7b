"""Fine-tuning with Hugging Face's Trainer, its training step captured: `wholestep.hf.Trainer` instead of the stock one.

A tiny BERT (from its config: nothing is downloaded) learns to tell good reviews from bad ones, made of random words.
Rows of different lengths are padded per batch; the Trainer does what it always does: accumulation over four
micro-batches, a schedule with warm-up, evaluation, saving. A second Trainer then resumes from the checkpoint half way
and must end at the same weights.

    python examples/hf_trainer.py --steps 20

Needs `pip install 'wholestep[hf]'`.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch

import wholestep

GOOD = ["splendid", "warm", "clever", "bright", "moving"]
BAD = ["dull", "cold", "clumsy", "grey", "endless"]
PLAIN = ["the", "play", "was", "and", "its", "plot", "quite", "in", "parts", "with", "a", "hero", "who", "speaks"]
ACCUMULATE = 4


def reviews(count: int, seed: int) -> list[tuple[str, int]]:
    """[CLS], then 4 to 16 words with two opinions of one kind among them, and which kind it is."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        label = draw.randrange(2)
        words = draw.choices(PLAIN, k=draw.randrange(2, 15)) + draw.choices(GOOD if label else BAD, k=2)
        draw.shuffle(words)
        rows.append((" ".join(["[CLS]", *words]), label))
    return rows


def make_tokenizer() -> Any:
    """One token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", *GOOD, *BAD, *PLAIN]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def make_model(vocabulary: int) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, num_labels=2,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    # Its loss is a mean over the micro-batch and ignores the number of items in the whole batch that the Trainer hands
    # over; said here, the Trainer divides by the number of micro-batches, and the loss in the log is the mean.
    model.accepts_loss_kwargs = False
    return model


def make_trainer(folder: Path, steps: int, backend: str) -> Any:
    """All of it is Hugging Face's own, but for the class and its last argument."""
    from transformers import DataCollatorWithPadding, TrainingArguments

    tokenizer = make_tokenizer()
    train, evaluation = (
        [{**tokenizer(text, return_token_type_ids=False), "labels": label} for text, label in reviews(count, seed)]
        for count, seed in ((512, 1), (64, 2))
    )
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=8, per_device_eval_batch_size=64,
        gradient_accumulation_steps=ACCUMULATE, learning_rate=1e-2, lr_scheduler_type="linear", warmup_steps=max(steps // 10, 1),
        eval_strategy="steps", eval_steps=max(steps // 2, 1), save_steps=max(steps // 2, 1), logging_steps=max(steps // 4, 1),
        use_cpu=True, report_to="none", disable_tqdm=True, seed=0,
    )  # fmt: skip

    def measure(predicted: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(predicted.predictions.argmax(-1) == predicted.label_ids))}

    return wholestep.hf.Trainer(
        model=make_model(len(tokenizer)), args=arguments, train_dataset=train, eval_dataset=evaluation,
        data_collator=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=4), compute_metrics=measure,
        wholestep={"backend": backend},
    )  # fmt: skip


def compare(one: Any, other: Any) -> float:
    """The largest difference between the weights of two models."""
    pairs = zip(one.state_dict().values(), other.state_dict().values())
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", choices=["inductor", "interpret"], default="interpret")
    given = parser.parse_args()
    try:
        import accelerate  # noqa: F401
        import transformers
    except ImportError:
        print("this example needs Hugging Face's libraries: pip install 'wholestep[hf]'")
        return 0
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer = make_trainer(folder, given.steps, given.backend)
        before = trainer.evaluate()["eval_accuracy"]
        trainer.train()
        after = trainer.evaluate()["eval_accuracy"]
        print(trainer.step.explain())
        print(f"accuracy {before:.3f} -> {after:.3f} after {given.steps} updates of {ACCUMULATE} micro-batches")
        halfway = folder / f"checkpoint-{max(given.steps // 2, 1)}"
        resumed = make_trainer(folder / "resumed", given.steps, given.backend)
        resumed.train(resume_from_checkpoint=str(halfway))
        gap = compare(trainer.model, resumed.model)
    print(
        f"resumed from {halfway.name}: the weights at the end differ by {gap:.1e} from those of the run that went through"
    )
    return 0 if after >= before and gap < 1e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
