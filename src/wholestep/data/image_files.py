"""Images on disk, one folder per class: which there are, and the pixels of one.

In: a folder. Out: its files with their classes, and whether each is held out. No torch: a folder that is no such thing is told
before it is loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wholestep.data.sources import SPLITS, list_files
from wholestep.errors import BadOption

HELD_OUT_EVERY = 10
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
    if len(classes) < 2:
        raise BadOption(
            f"data {str(folder)!r} has one class, {classes[0]!r}: nothing to tell apart", hint=f"give {IMAGES_WANTED}"
        )
    if split:
        return paths, named, [SPLITS[name.split("/")[0]] == out for name in paths]
    return paths, named, _every_tenth(named)


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
            f"{path} is no image that Pillow can read: {type(error).__name__}", hint="remove it, or use --glob"
        ) from None
    return drawn[None] if channels == 1 else np.ascontiguousarray(drawn.transpose(2, 0, 1))
