"""The families a model can belong to, behind one face: what `--set` may change, how it is built, what a batch looks like.

In: the name of a family (`gpt`, `resnet`, `rgcn`, `hf:<model_type>` or a folder). Out: a Family. A family knows models, not data:
which tokens, images or graph it is given is decided in `build.py`. Torch is loaded when a model is built or its loss is asked for.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wholestep.errors import BadOption
from wholestep.train import hf_models, hf_sources
from wholestep.train.models.configs import GPTConfig, ResNetConfig, RGCNConfig

if TYPE_CHECKING:
    from torch import nn

    Loss = Callable[[Any, Any], Any] | None


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
    find_loss: Callable[[], Loss]
    """The loss of (model, batch); None for a model that computes its own."""
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
    def loss_fn(self) -> Loss:
        return self.find_loss()

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


def find_by_sources(name: str, *, said: str) -> Family | None:
    """The same without loading torch, to ask what may be set and how long a sequence is; None where that takes the package."""
    if name in ("gpt", "resnet", "rgcn"):
        return find_family(name, said=said)
    found = hf_sources.find(name, say=said)
    if found is None:
        return None
    family = _hugging_face(found, said)
    return dataclasses.replace(
        family, configure=lambda c: hf_sources.configure(found, hf_models.spread_dropout(found, c))
    )


def _gpt() -> Family:
    fields = _defaults(GPTConfig) | {"vocab_size": 0}
    return _own("next", GPTConfig, fields, "gpt", ("GPT", "next_token_loss"), lambda config: config.context, "context")


def _resnet() -> Family:
    return _own("image", ResNetConfig, _defaults(ResNetConfig), "resnet", ("ResNet", "class_loss"))


def _rgcn() -> Family:
    return _own("graph", RGCNConfig, _defaults(RGCNConfig), "rgcn", ("RGCN", "kind_loss"))


def _own(
    task: str, config: Any, fields: dict[str, Any], module: str, names: tuple[str, str],
    context: Callable[[Any], int | None] = lambda config: None, longer: str = "",
) -> Family:  # fmt: skip
    """One of this package's own: class and loss of these names, in the module of that name."""

    def load(name: str) -> Any:
        return getattr(importlib.import_module(f"wholestep.train.models.{module}"), name)

    return Family(
        task=task, fields=fields, where=", ".join(fields), typed=True, find_loss=lambda: load(names[1]),
        configure=lambda changes: config(**changes), build=lambda made, init: load(names[0])(made), context=context,
        longer=longer,
    )  # fmt: skip


def _hugging_face(found: hf_models.HFModel, said: str) -> Family:
    fields = found.fields
    longer = next((name for name in ("max_position_embeddings", "n_positions") if name in fields), "")
    return Family(
        task=found.task,
        fields=fields | ({"dropout": 0.0} if hf_models.dropout_fields(fields) and "dropout" not in fields else {}),
        where=found.where,
        typed=False,
        find_loss=lambda: None,
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
