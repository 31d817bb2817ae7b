"""Images on disk, one folder per class: which there are, and the pixels of one.

In: a folder. Out: its files with their classes, and whether each is held out. No torch: a folder that is no such thing is told
before it is loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wholestep.data.sources import SPLITS, list_files
from wholestep.errors import BadOption, WholestepWarning

HELD_OUT_EVERY = 10
GREY = 8
"""Of 255: what compression makes of grey is no colour."""
IMAGES_WANTED = "a folder with one folder of images per class"


def list_images(folder: Path, glob: str | None) -> tuple[dict[str, Path], list[str], list[bool]]:
    """(files by name, the class of each, whether it is held out)."""
    if not folder.is_dir():
        raise BadOption(f"data {str(folder)!r} is no folder", hint=f"give {IMAGES_WANTED}")
    paths = list_files(folder, glob)
    parts = {SPLITS.get(name.split("/")[0]) for name in paths}
    split = None not in parts and "train" in parts and len(parts) > 1
    out = "held" if "held" in parts else "test"
    if split:
        paths = {name: path for name, path in paths.items() if SPLITS[name.split("/")[0]] in ("train", out)}
    depth = 2 if split else 1
    for name in paths:
        if len(name.split("/")) <= depth:
            hint = f"give {IMAGES_WANTED}" + ("" if glob else ", or take part of it with --glob")
            raise BadOption(f"data {str(folder)!r}: {name} lies in no folder of a class", hint=hint)
    named = [name.split("/")[depth - 1] for name in paths]
    classes = sorted(set(named))
    if glob is None and not split:
        _tell_empty_folders(folder, classes)
    if len(classes) < 2:
        raise BadOption(
            f"data {str(folder)!r} has one class, {classes[0]!r}: nothing to tell apart", hint=f"give {IMAGES_WANTED}"
        )
    if split:
        return paths, named, [SPLITS[name.split("/")[0]] == out for name in paths]
    return paths, named, _every_tenth(named)


def _tell_empty_folders(folder: Path, classes: list[str]) -> None:
    for inside in sorted(folder.iterdir()):
        if inside.is_dir() and inside.name not in classes and not inside.name.startswith("."):
            warnings.warn(f"{inside} holds no image: it is no class", WholestepWarning, stacklevel=2)


def first_in_colour(paths: Mapping[str, Path], named: list[str]) -> Path | None:
    """Of the first image of each class, one that is more than grey; None where all of them are grey."""
    import numpy as np
    from PIL import Image

    first = dict(zip(reversed(named), reversed(list(paths.values()))))
    for path in first.values():
        with Image.open(path) as opened:
            pixels = np.asarray(opened.convert("RGB").resize((64, 64)))
        if (pixels.max(-1) - pixels.min(-1)).max() > GREY:
            return path
    return None


def _every_tenth(named: list[str]) -> list[bool]:
    """Of every class each tenth; of one with two to nine images the last."""
    totals = {name: named.count(name) for name in set(named)}
    seen = dict.fromkeys(totals, 0)
    held = []
    for name in named:
        seen[name] += 1
        few = 2 <= totals[name] < HELD_OUT_EVERY
        held.append(seen[name] == totals[name] if few else seen[name] % HELD_OUT_EVERY == 0)
    return held


def read_image(path: Path, image: int, channels: int) -> Any:
    """One image, [channels, image, image]."""
    import numpy as np
    from PIL import Image

    try:
        with Image.open(path) as opened:
            turned = opened.convert("L" if channels == 1 else "RGB")
            drawn = np.asarray(turned.resize((image, image), Image.Resampling.BILINEAR))
    except Exception as error:  # Pillow's plugins raise what they like
        raise BadOption(
            f"{path} is no image that Pillow can read: {_reason(error)}", hint="remove it, or use --glob"
        ) from None
    return drawn[None] if channels == 1 else np.ascontiguousarray(drawn.transpose(2, 0, 1))


def _reason(error: Exception) -> str:
    """`OSError, image file is truncated`; the name alone where the text tells only the path."""
    text = str(error).partition("\n")[0].rstrip(".")
    return type(error).__name__ + (f", {text}" if text and not text.startswith("cannot identify") else "")
