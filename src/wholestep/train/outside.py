"""What other programs need to open a model: config.json, tokenizer, and how images are prepared, as `transformers` reads them.

In: a model, its tokens or what is known of its images. Out: name -> content of files that lie beside the weights.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from wholestep.data.tokens import Tokens
from wholestep.train.saved import CONFIG_FILE

_BILINEAR = 2
"""As Pillow numbers it."""


def files(model: nn.Module, tokens: Tokens | None, images: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Of a checkpoint or an export."""
    found = {CONFIG_FILE: _text(config_of(model, images))}
    if tokens is not None:
        found |= tokens.files()
    if images is not None:
        found["preprocessor_config.json"] = _text(_preprocessor(model, images))
    return found


def config_of(model: Any, images: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """config.json: of a model of transformers its own, with the names of the classes; of ours the fields of its configuration."""
    config = model.config
    if not hasattr(config, "to_diff_dict"):
        names = {} if images is None else {"class_names": list(images["classes"])}
        return {"model_type": f"wholestep-{type(model).__name__.lower()}", **dataclasses.asdict(config), **names}
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    if images is not None:
        config.id2label = {number: name for number, name in enumerate(images["classes"])}
        config.label2id = {name: number for number, name in enumerate(images["classes"])}
    return json.loads(json.dumps(config.to_diff_dict(), default=lambda value: str(value).removeprefix("torch.")))


def _preprocessor(model: Any, images: Mapping[str, Any]) -> dict[str, Any]:
    """The same pixels from Hugging Face's image processors."""
    from wholestep.train.families import image_shape

    size, channels = image_shape(model.config)
    return {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "size": {"height": size, "width": size},
        "resample": _BILINEAR, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": list(images["mean"]), "image_std": list(images["std"]), "do_convert_rgb": channels == 3,
    }  # fmt: skip


def _text(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()
