"""What is refused before torch is loaded would not have worked."""

from __future__ import annotations

import pytest

import wholestep
from wholestep.plan.host import transient_bytes
from wholestep.train.families import find_by_sources
from wholestep.train.job import make_job
from wholestep.train.look_ahead import _least_kept

SMALL = {
    "gpt-1m": ("layers=2", "width=32", "tokenizer=bytes"),
    "resnet-18": ("width=8", "image_size=16"),
    "resnet-50": ("width=4", "image_size=32"),
    "hf:gpt2": ("n_layer=2", "n_embd=32", "n_head=2", "vocab_size=300", "tokenizer=bytes"),
    "hf:albert": (
        "num_hidden_layers=3",
        "hidden_size=32",
        "num_attention_heads=2",
        "vocab_size=300",
        "tokenizer=bytes",
    ),
}


SLOW = ("resnet-50", "hf:albert")


@pytest.mark.parametrize("model", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in SMALL])
def test_a_step_keeps_more_than_what_it_is_said_to_keep(model: str) -> None:
    job = make_job(model, sets=SMALL[model], batch=4, seq=None if "resnet" in model else 32, device="cpu")
    step = wholestep.compile(
        job.model, job.loss_fn, job.optimizer, job.batches.batch(0), backend="interpret", check="off", verbose=False
    )
    family = find_by_sources(job.settings["family"], said=model)
    assert family is not None and step.graph is not None
    least = 4 * 4 * job.settings.get("seq", 1) * _least_kept(family.configure(job.settings["config"]))
    assert 0 < least < transient_bytes(step.graph, "inductor")
