"""Sizes of this package's own models, found possible. No torch: what is wrong with them is told before it is loaded."""

from __future__ import annotations

import dataclasses

from wholestep.data.python_kinds import FILES, KINDS, RELATIONS
from wholestep.errors import BadOption

LAYERS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
STEMS = ("small", "large")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT."""

    vocab_size: int
    width: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 128
    """The longest sequence: one learned position each."""
    dropout: float = 0.0
    tied: bool = True
    """The head is the transposed token embedding."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "context"):
            if getattr(self, name) < 1:
                raise BadOption(f"{name}={getattr(self, name)}", hint="use 1 or more")
        if self.width % self.heads:
            raise BadOption(f"width={self.width} does not divide into heads={self.heads}", hint="use a multiple")
        if not 0 <= self.dropout < 1:
            raise BadOption(f"dropout={self.dropout}", hint="use 0 or more and less than 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Sizes of a ResNet."""

    depth: int = 18
    width: int = 64
    """Channels of the first stage; every stage doubles them."""
    image_size: int = 32
    channels: int = 1
    classes: int = 10
    stem: str = "small"

    def __post_init__(self) -> None:
        if self.depth not in LAYERS:
            raise BadOption(f"depth={self.depth}", hint=f"use {' or '.join(map(str, LAYERS))}")
        if self.stem not in STEMS:
            raise BadOption(f"stem={self.stem!r}", hint=f"use {' or '.join(STEMS)}")
        for name, least in (("width", 1), ("image_size", 8), ("channels", 1), ("classes", 2)):
            if getattr(self, name) < least:
                raise BadOption(f"{name}={getattr(self, name)}", hint=f"use {least} or more")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RGCNConfig:
    """Sizes of an R-GCN."""

    width: int = 32
    bases: int = 0
    """Matrices that those of the relations are mixed from; 0: each relation has its own."""
    dropout: float = 0.0
    classes: int = len(KINDS)
    relations: int = 2 * len(RELATIONS)
    nodes: int = 0
    """0: as many as the graph has."""
    files: int = FILES
    """Files of the library that the graph is read from."""

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("bases", 0), ("classes", 2), ("relations", 1), ("nodes", 0), ("files", 1)):
            if getattr(self, name) < least:
                raise BadOption(f"{name}={getattr(self, name)}", hint=f"use {least} or more")
        if not 0 <= self.dropout < 1:
            raise BadOption(f"dropout={self.dropout}", hint="use 0 or more, and less than 1")
