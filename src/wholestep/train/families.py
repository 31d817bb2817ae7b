"""The families a model can belong to, behind one face: what `--set` may change, how it is built, what a batch looks like.

In: the name of a family (`gpt`, `resnet`, `rgcn`, `hf:<model_type>` or a folder). Out: a Family. A family knows models, not data:
which tokens, images or graph it is given is decided in `build.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from wholestep.errors import BadOption
from wholestep.train import hf_models
from wholestep.train.models.gpt import GPT, GPTConfig, next_token_loss
from wholestep.train.models.resnet import ResNet, ResNetConfig, class_loss
from wholestep.train.models.rgcn import RGCN, RGCNConfig, kind_loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How to make models of one kind."""

    task: str
    """`next` (own GPT), `causal`, `masked`, `seq2seq`, `image`, or `graph`."""
    fields: dict[str, Any]
    """What `--set` may change, with defaults."""
    where: str
    """Those fields in words, for a message."""
    typed: bool
    """Are the defaults also the types? transformers checks its own."""
    loss_fn: Callable[[Any, Any], Any] | None
    configure: Callable[[dict[str, Any]], Any]
    """Changed fields -> the configuration."""
    build: Callable[[Any, str | None], nn.Module]
    """(configuration, the folder of transformers whose weights to read) -> the model."""
    context: Callable[[Any], int | None]
    """configuration -> the longest sequence."""
    longer: str
    """The field that makes it longer."""
    folder: Path | None = None
    """Where the model lies, when it is one on disk."""

    @property
    def reads_images(self) -> bool:
        return self.task == "image"

    @property
    def reads_graphs(self) -> bool:
        return self.task == "graph"


def find_family(name: str, *, said: str) -> Family:
    """`said` is what the user typed, for messages."""
    if name == "gpt":
        return _gpt()
    if name == "resnet":
        return _resnet()
    if name == "rgcn":
        return _rgcn()
    return _hugging_face(hf_models.find(name, say=said), said)


def _gpt() -> Family:
    fields = _defaults(GPTConfig) | {"vocab_size": 0}
    return Family(
        task="next", fields=fields, where=", ".join(fields), typed=True, loss_fn=next_token_loss,
        configure=lambda changes: GPTConfig(**changes), build=lambda config, init: GPT(config),
        context=lambda config: config.context, longer="context",
    )  # fmt: skip


def _resnet() -> Family:
    fields = _defaults(ResNetConfig)
    return Family(
        task="image", fields=fields, where=", ".join(fields), typed=True, loss_fn=class_loss,
        configure=lambda changes: ResNetConfig(**changes), build=lambda config, init: ResNet(config),
        context=lambda config: None, longer="",
    )  # fmt: skip


def _rgcn() -> Family:
    fields = _defaults(RGCNConfig)
    return Family(
        task="graph", fields=fields, where=", ".join(fields), typed=True, loss_fn=kind_loss,
        configure=lambda changes: RGCNConfig(**changes), build=lambda config, init: RGCN(config),
        context=lambda config: None, longer="",
    )  # fmt: skip


def _hugging_face(found: hf_models.HFModel, said: str) -> Family:
    fields = found.fields
    longer = next((name for name in ("max_position_embeddings", "n_positions") if name in fields), "")
    return Family(
        task=found.task,
        fields=fields | ({"dropout": 0.0} if hf_models.dropout_fields(fields) and "dropout" not in fields else {}),
        where=found.where,
        typed=False,
        loss_fn=None,
        configure=lambda changes: hf_models.configure(found, hf_models.spread_dropout(found, changes), said=said),
        build=lambda config, init: hf_models.build(found, config, said=said, init=init),
        context=hf_models.context,
        longer=longer,
        folder=found.folder,
    )


def _defaults(config: type) -> dict[str, Any]:
    return {
        field.name: field.default for field in dataclasses.fields(config) if field.default is not dataclasses.MISSING
    }


def image_shape(config: Any) -> tuple[int, int]:
    """(pixels per side, channels) a model wants."""
    if isinstance(config, ResNetConfig):
        return config.image_size, config.channels
    return hf_models.image_shape(config)


def vocabulary_of(config: Any, said: str) -> int:
    """How many ids a text model of transformers can read."""
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        raise BadOption(f"{said} has no vocab_size of its own", hint="models that join several are not built here")
    return size


def classes_of(config: Any) -> int:
    """How many classes an image model tells apart."""
    return int(config.classes if isinstance(config, ResNetConfig) else config.num_labels)
