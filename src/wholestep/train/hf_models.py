"""Hugging Face models from their configuration alone: nothing is downloaded, weights are drawn or read from a local folder.

In: `hf:<model_type>` or a folder with a config.json, and changed fields. Out: the configuration, which of four tasks the model
is trained on (next word, masked word, continuation, image class), and the model itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wholestep.errors import BadOption, did_you_mean

TASKS = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
"""Task -> the class that builds its models, and the table of the model types that have one."""
Heads = Mapping[str, Mapping[str, Any]]
"""Task -> model type -> the class, or classes, with a head for it."""
PLAIN_IMAGE_SIZE = 64
"""For image models whose configuration names no size: they take any."""
_NOT_FOR_SET = {"transformers_version", "_name_or_path", "architectures", "model_type", "label2id", "id2label", "dtype"}
_COUNTS_FROM_PADDING = {
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "roberta-prelayernorm", "longformer", "mpnet",
    "xmod", "ibert",
}  # fmt: skip
"""Positions start after the padding id in these, so that many of the last ones can never be used."""


@dataclasses.dataclass(frozen=True, slots=True)
class HFModel:
    """A model type or a folder, before any field is changed."""

    model_type: str
    folder: Path | None
    task: str
    config: Any

    @property
    def fields(self) -> dict[str, Any]:
        """What `--set` may change: name -> value."""
        known = {name: value for name, value in self.config.to_dict().items() if name not in _NOT_FOR_SET}
        known |= {alias: getattr(self.config, alias, None) for alias in self.config.attribute_map}
        return known | ({"num_labels": self.config.num_labels} if self.task == "image" else {})

    @property
    def where(self) -> str:
        return f"the fields of transformers.{getattr(self.config, 'title', type(self.config).__name__)}"


def find(model: str, *, say: str | None = None) -> HFModel:
    """`hf:<model_type>`, or a folder with a config.json. `say`: what the user typed, for messages."""
    hf = transformers(say or model)
    if model.startswith("hf:"):
        model_type = model.removeprefix("hf:")
        if model_type not in hf.CONFIG_MAPPING:
            raise unknown_type(model_type, list(hf.CONFIG_MAPPING))
        config = _one_line(model, lambda: hf.AutoConfig.for_model(model_type))
        return found(say or model, model_type, None, config, _heads())
    folder = folder_with_config(model)
    config = _one_line(model, lambda: hf.AutoConfig.from_pretrained(folder, local_files_only=True))
    return found(model, config.model_type, folder, config, _heads())


def installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def transformers(model: str) -> Any:
    """The package, or one line how to get it."""
    if not installed():
        raise BadOption(
            f"{model} needs the package transformers, which is not installed", hint="pip install 'wholestep[hf]'"
        )
    import transformers

    return transformers


def folder_with_config(model: str) -> Path:
    folder = Path(model).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise BadOption(f"MODEL {model!r} is a folder without a config.json", hint="name a folder that holds one")
    return folder


def unknown_type_in(folder: str, model_type: Any) -> BadOption:
    """For a config.json of no type that transformers has."""
    what = f"MODEL {folder!r}: its config.json says model_type {model_type!r}, which transformers does not know"
    return BadOption(what, hint="update transformers, or name another folder")


def unknown_type(model_type: str, known: list[str]) -> BadOption:
    # A name on the hub often begins with its type: gpt2-medium, bert-base-uncased.
    begins = sorted((name for name in known if model_type.startswith(name)), key=len)[-1:]
    hint = "for example hf:bert, hf:gpt2, hf:llama, hf:t5, hf:vit"
    hint = did_you_mean(begins[0] if begins else model_type, known, hint, shown="hf:{}")
    return BadOption(
        f"hf:{model_type}: transformers knows no such model type", hint=hint + " (a type, not a name on the hub)"
    )


def found(said: str, model_type: str, folder: Path | None, config: Any, heads: Heads) -> HFModel:
    """The model of that configuration, with the head that it is trained with."""
    task = _task(model_type, config, heads)
    if task is None:
        hint = "text models and image classifiers can be trained here; any other by package.module:callable"
        raise BadOption(
            f"{said}: transformers has no head for {model_type!r} that the data here could train", hint=hint
        )
    return HFModel(model_type, folder, task, config)


def _heads() -> Heads:
    from transformers.models.auto import modeling_auto

    return {task: getattr(modeling_auto, names) for task, (_, names) in TASKS.items()}


def _task(model_type: str, config: Any, tables: Heads) -> str | None:
    """By the architecture a folder names; else by type, where an encoder that could also write is trained as an encoder."""
    for architecture in getattr(config, "architectures", None) or ():
        for task, table in tables.items():
            classes = table.get(model_type, ())
            if architecture in ((classes,) if isinstance(classes, str) else classes):
                return task
    has = {task for task, table in tables.items() if model_type in table}
    if "seq2seq" in has and getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    if has >= {"causal", "masked"}:
        return "causal" if getattr(config, "is_decoder", False) else "masked"
    return next((task for task in TASKS if task in has), None)


def configure(found: HFModel, changes: Mapping[str, Any], *, said: str) -> Any:
    """The configuration with `changes`; a value its class refuses is one line."""
    hf = transformers(said)
    changes = dict(changes)
    if "use_cache" in found.fields:  # keys and values kept for generation are dead weight in training
        changes.setdefault("use_cache", False)
    size = changes.get("vocab_size")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # ids that a smaller vocabulary no longer has
        value = getattr(found.config, name, None)
        if isinstance(size, int) and isinstance(value, int) and value >= size:
            changes.setdefault(name, None)
    if found.folder is None:
        config = _one_line(said, lambda: hf.AutoConfig.for_model(found.model_type, **changes))
    else:
        folder = found.folder
        config = _one_line(said, lambda: hf.AutoConfig.from_pretrained(folder, local_files_only=True, **changes))
    if found.task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def dropout_fields(fields: Mapping[str, Any]) -> list[str]:
    """Every probability with "drop" in its name; those that drop whole layers or paths are another matter."""
    return [
        name
        for name, value in fields.items()
        if "drop" in name and "layer" not in name and "path" not in name and type(value) in (int, float)
    ]


def spread_dropout(found: HFModel, wishes: dict[str, Any]) -> dict[str, Any]:
    """`dropout=p`, for a model that has several or calls it otherwise, is all of them; one set by its own name wins."""
    fields = found.fields
    if "dropout" not in wishes or "dropout" in fields:
        return wishes
    rest = {key: value for key, value in wishes.items() if key != "dropout"}
    return dict.fromkeys(dropout_fields(fields), wishes["dropout"]) | rest


def context(config: Any) -> int | None:
    """The longest sequence the model can read; None when there is no limit."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        return None
    if config.model_type in _COUNTS_FROM_PADDING:
        longest -= 1 + (getattr(config, "pad_token_id", None) or 0)
    return longest


def image_shape(config: Any) -> tuple[int, int]:
    """(pixels per side, channels)."""
    seen = getattr(config, "vision_config", None) or config  # of a model that also reads
    size = getattr(seen, "image_size", None) or PLAIN_IMAGE_SIZE
    if isinstance(size, (list, tuple)):
        size = size[0]
    return int(size), int(getattr(seen, "num_channels", None) or 3)


def build(found: HFModel, config: Any, *, said: str, init: str | None) -> Any:
    """The model, in training mode: weights drawn, or read from the folder `init`."""
    auto = getattr(transformers(said), TASKS[found.task][0])
    if init:
        return _named_loss(_read(auto, init, config).train(), found)
    try:
        return _named_loss(auto.from_config(config, attn_implementation="sdpa").train(), found)
    except Exception as error:
        if "scaled_dot_product_attention" not in str(error) and "sdpa" not in str(error):
            raise _told(said, error) from error
    # This type has no such attention.
    return _named_loss(_one_line(said, lambda: auto.from_config(config, attn_implementation="eager")).train(), found)


def _named_loss(model: Any, found: HFModel) -> Any:
    """GPT-2's class name does not tell the library which loss it has; told, it need not warn about guessing."""
    if found.task == "causal" and getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"
    return model


def _read(auto: Any, folder: str, config: Any) -> Any:
    """The model with the weights in `folder`, all of them: one that is missing, left over or of another shape is an error."""
    import torch

    try:
        with quiet():
            model, told = auto.from_pretrained(
                folder, config=config, local_files_only=True, use_safetensors=True, dtype=torch.float32,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except Exception as error:  # each class of the library refuses in its own way
        raise _told(f"--init {folder}", error) from error
    other = [f"{name[0]} is {tuple(name[1])} there, {tuple(name[2])} in the model" for name in told["mismatched_keys"]]
    other += [f"{name} is not there" for name in sorted(told["missing_keys"])]
    other += [f"{name} is not in the model" for name in sorted(told["unexpected_keys"])]
    if other:
        more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
        raise BadOption(
            f"--init {folder} does not fit the model: {other[0]}{more}", hint="build the model it was saved from"
        )
    return model


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what the library logs, and its bars: what is wrong is told by us, as an error."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def _one_line(said: str, call: Any) -> Any:
    """`call()`, with whatever a configuration or a model class raises told in one line."""
    try:
        return call()
    except BadOption:
        raise
    except Exception as error:  # each class of the library refuses in its own way
        raise _told(said, error) from error


def _told(said: str, error: Exception) -> BadOption:
    text = " ".join(str(error).split()) or type(error).__name__
    return BadOption(f"{said}: {text[:300]}", hint="change it by --set")
