"""From settings to the parts of a Job: data, model, held-out and awkward batches, and what there is to show.

In: settings (plain JSON), a Family, a device. Out: Parts, and in it the fields that only the data decides (the digest of the
data, a GPT's vocabulary, the nodes of a graph), so that the settings saved with a run make the same Job again.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.data import encoded, token_files
from wholestep.data.digits import CLASSES, DigitBatches
from wholestep.data.images import ImageBatches
from wholestep.data.pygraph import PyGraphBatches, read_pygraph
from wholestep.data.python_kinds import KINDS
from wholestep.data.sources import find_source, hash_files, refuse_changed, refuse_given
from wholestep.data.texts import OTHER_DATA
from wholestep.data.tokens import RESERVED, Bytes, Examples, Numbers, Tokens, make_tokens, read_tokens
from wholestep.data.windows import (
    Form,
    Masked,
    TextBatches,
    continued_form,
    labelled_form,
    next_token_form,
)
from wholestep.errors import BadOption, WholestepWarning
from wholestep.train import families, outside, sampling
from wholestep.train.called import CalledBatches, check_batch
from wholestep.train.checkpoint import load_weights
from wholestep.train.checkpoint_files import FACTS, open_stored
from wholestep.train.families import Family
from wholestep.train.saved import Kept
from wholestep.train.settings import is_function

_WRITES_FROM = 1024
"""Tokens the sample looks back on, for a model without a longest sequence."""
_CLASSES = ("classes", "num_labels")
"""The field that counts them, in this package's models and in those of transformers."""
FORMS: dict[str, tuple[Form, int, int]] = {
    "next": (next_token_form, 1, 1), "causal": (labelled_form, 1, 0), "seq2seq": (continued_form, 2, 0),
}  # fmt: skip
"""Task -> form of a batch, and the window as (sequences, and so many tokens more)."""

AnyBatches = TextBatches | DigitBatches | ImageBatches | PyGraphBatches | CalledBatches


@dataclasses.dataclass(slots=True, kw_only=True)
class Data:
    """What the data of a run comes to, before there is a model."""

    batches: AnyBatches
    config: Any
    """Of the model, as large as the data asks for."""
    found: dict[str, Any]
    """Settings that the data decided."""
    tokens: Tokens | None = None
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Name -> hash of every file."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Parts:
    """What a Job is put together from."""

    model: nn.Module
    batches: AnyBatches
    held_out: Sequence[Any]
    edge_batches: Sequence[Any]
    write_sample: Callable[[], str] | None
    found: dict[str, Any]
    """Settings that the data decided."""
    files: Mapping[str, bytes]
    """Beside the weights: configuration and tokenizer, for other programs."""
    data_files: Mapping[str, str]


def build(settings: Mapping[str, Any], family: Family, device: torch.device, kept: Kept) -> Parts:
    """All that depends on the data or is large."""
    data = find_data(settings, family, device, kept)
    drawn = settings if kept.checkpoint is None else {**settings, "init": False}  # the weights are there already
    model = _drawn(family, data.config, drawn, device)
    batches, held_out = data.batches, data.batches.held_out()
    few = settings["accumulate"]
    edges = (
        batches.edges(data.config.vocab_size, fewest=few) if isinstance(batches, TextBatches)
        else batches.edges(fewest=2 * few) if isinstance(batches, DigitBatches | ImageBatches)
        else batches.edges() if isinstance(batches, PyGraphBatches) else []
    )  # fmt: skip
    return Parts(
        model=model, batches=batches, held_out=held_out, edge_batches=edges, found=data.found, data_files=data.files,
        write_sample=_shown(family, model, data, held_out, settings),
        files=outside.files(model, data.tokens, data.found.get("images")),
    )  # fmt: skip


def find_data(settings: Mapping[str, Any], family: Family, device: torch.device, kept: Kept) -> Data:
    """The data of these settings, found to be what it was; no model is built."""
    if is_function(settings["data"]) or settings["data"] in OTHER_DATA:
        refuse_given(settings["data"], glob=settings.get("glob"), field=settings.get("field"))
    if is_function(settings["data"]) and not family.reads_graphs:
        return _called(settings, family, device, kept)
    made = _images if family.reads_images else _graphs if family.reads_graphs else _texts
    return made(settings, family, device, kept)


# ---- texts ----


def _texts(settings: Mapping[str, Any], family: Family, device: torch.device, kept: Kept) -> Data:
    name, seq, sizes = settings["data"], settings["seq"], {"seq": settings["seq"], "batch": settings["batch"]}
    sizes |= {"seed": settings["seed"]}
    held, documents = None, 1
    if token_files.is_token_file(name):
        path = Path(name).expanduser()
        if settings.get("glob"):
            raise BadOption(f"--glob {settings['glob']}: data {name!r} is one file", hint="leave it out")
        ids, size = token_files.read_ids(path, settings.get("field"))
        files, text_bytes = hash_files({path.name: path}), ids.nbytes
        digest = files[path.name][:12]
        refuse_changed(name, settings["data_digest"], digest, kept.files, files)
        config, tokens = _config_and_tokens(settings, family, None, kept, ids=size)
    else:
        source = find_source(name, glob=settings.get("glob"), field=settings.get("field"), others=tuple(OTHER_DATA))
        files, digest = source.files, source.digest
        refuse_changed(name, settings["data_digest"], digest, kept.files, files)
        config, tokens = _config_and_tokens(settings, family, Examples(source.key, source.to_learn_from), kept)
        made = encoded.encode(source, tokens)
        ids, held, text_bytes, documents = made.train, made.held, made.text_bytes, made.count
    form, window = _form(family, tokens, config, seq, settings["model"])
    batches = TextBatches(
        ids,
        name=name,
        window=window,
        form=form,
        device=device,
        text_bytes=text_bytes,
        held=held,
        documents=documents,
        **sizes,
    )
    found = {"data_digest": digest, **_found(settings, family, config, tokens)}
    return Data(batches=batches, config=config, tokens=tokens, found=found, files=files)


def _found(settings: Mapping[str, Any], family: Family, config: Any, tokens: Tokens) -> dict[str, Any]:
    """What the tokens decided."""
    found: dict[str, Any] = {}
    if family.task == "next":
        found["config"] = {**settings["config"], "vocab_size": config.vocab_size}
    if tokens.kind == "ids":
        found["vocabulary"] = tokens.size
    if settings.get("tokenizer_file"):
        found["tokenizer_digest"] = tokens.key[:12]
    return found


def _called(settings: Mapping[str, Any], family: Family, device: torch.device, kept: Kept) -> Data:
    """Batches that a function of the user's gives."""
    batches = CalledBatches(
        settings["data"], batch=settings["batch"], seq=settings.get("seq"), seed=settings["seed"], device=device
    )
    refuse_changed(settings["data"], settings["data_digest"], batches.digest, None, {})
    found: dict[str, Any] = {"data_digest": batches.digest}
    if family.reads_images:
        check_batch(batches.batch(0), settings["data"], family, 0)
        return Data(batches=batches, config=family.configure(dict(settings["config"])), found=found)
    config, tokens = _config_and_tokens(settings, family, None, kept, ids=0)
    check_batch(batches.batch(0), settings["data"], family, config.vocab_size)
    return Data(batches=batches, config=config, tokens=tokens, found=found | _found(settings, family, config, tokens))


def _config_and_tokens(
    settings: Mapping[str, Any], family: Family, text: Examples | None, kept: Kept, *, ids: int = 0
) -> tuple[Any, Tokens]:
    """The configuration and the tokens, each as large as the other allows. Without a `text` the data has ids, so many."""
    changes, kind, wanted = dict(settings["config"]), settings["tokenizer"], settings["vocabulary"]
    own = family.task == "next"
    config = None if own else family.configure(changes)
    limit = 0 if own else families.vocabulary_of(config, settings["model"])
    if kind == "ids":
        tokens: Tokens = Numbers(ids or changes.get("vocab_size") or limit)
        if not tokens.size:
            raise BadOption(f"{settings['data']} does not say how many ids there are", hint="give --set vocab_size=N")
    elif kind == "file":
        tokens = _read_tokens(settings, family, kept)
    else:
        most = wanted if own else min(wanted, max(limit, 256 + len(RESERVED)))
        tokens = Bytes(0 if own else len(RESERVED)) if text is None else make_tokens(kind, text, most, reserved=not own)
    size = max(tokens.size, ids)
    if own:
        config = family.configure({**changes, "vocab_size": changes.get("vocab_size") or size})
    assert config is not None
    if size > config.vocab_size:
        whose = f"{settings['data']} holds" if ids > tokens.size or kind == "ids" else f"the tokenizer ({kind}) yields"
        what = f"vocab_size={config.vocab_size} is smaller than the {size} ids {whose}"
        raise BadOption(what, hint=f"--set vocab_size={size} or more")
    return config, tokens


def _read_tokens(settings: Mapping[str, Any], family: Family, kept: Kept) -> Tokens:
    """Of a tokenizer.json; a run that has a checkpoint has it there too."""
    named = settings.get("tokenizer_file") or (family.folder and family.folder / "tokenizer.json")
    path = kept.tokenizer or Path(str(named))
    if not path.is_file():
        raise BadOption(f"the tokenizer {path} is gone", hint="put it back, or start a new run")
    tokens = read_tokens(path)
    before = settings.get("tokenizer_digest")
    if before is not None and before != tokens.key[:12]:
        raise BadOption(f"the tokenizer {path} is no longer what it was", hint="put it back, or start a new run")
    return tokens


def _form(family: Family, tokens: Tokens, config: Any, seq: int, said: str) -> tuple[Form, int]:
    """The form of a batch, and the length of a window."""
    if family.task != "masked":
        form, sequences, more = FORMS[family.task]
        return form, sequences * seq + more
    mask = tokens.mask_id
    if mask is None:  # a tokenizer.json without one: the first id it leaves free
        mask = tokens.size
        if mask >= config.vocab_size:
            raise BadOption(
                f"{said}: its tokenizer has no mask, and vocab_size={config.vocab_size} leaves no id free for one",
                hint=f"--set vocab_size={config.vocab_size + 1}",
            )
    first = 0 if tokens.kind in ("file", "ids") else len(RESERVED)
    return Masked(mask_id=mask, first_id=first, end_id=tokens.size), seq


def _shown(
    family: Family, model: nn.Module, data: Data, held_out: Sequence[Any], settings: Mapping[str, Any]
) -> Callable[[], str] | None:
    """What shows the model at work."""
    batches, tokens = data.batches, data.tokens
    if isinstance(batches, PyGraphBatches):
        return lambda: sampling.name_kinds(model, held_out, batches.commonest())
    if isinstance(batches, DigitBatches):
        return lambda: sampling.name_digits(model, image_logits(model), held_out)
    if tokens is None:
        classes = (data.found.get("images") or {}).get("classes")
        return (lambda: sampling.name_classes(model, image_logits(model), held_out, classes)) if held_out else None
    if family.task == "masked":
        return lambda: sampling.fill_masks(model, held_out[0] if held_out else batches.batch(0), tokens)
    read = (held_out[0] if held_out else batches.batch(0)).get("input_ids")
    if tokens.kind == "ids" or read is None:  # numbers say nothing to a reader
        return None
    context = family.context(data.config) or _WRITES_FROM
    writer = sampling.Writer(family.task, model, tokens, context, read=read[:1])
    return lambda: sampling.write_text(writer, seed=settings["seed"])


# ---- images ----


def _images(settings: Mapping[str, Any], family: Family, device: torch.device, kept: Kept) -> Data:
    config = dict(settings["config"])
    field = _CLASSES[1] if family.typed is False else _CLASSES[0]
    size, channels = families.image_shape(family.configure(config))
    sizes: dict[str, Any] = {"image": size, "channels": channels, "batch": settings["batch"], "seed": settings["seed"]}
    if settings["data"] in OTHER_DATA:
        digits = DigitBatches(**sizes, device=device)
        refuse_changed(settings["data"], settings["data_digest"], digits.digest, None, {})
        made, classes, found = digits, CLASSES, {"data_digest": digits.digest}
    else:
        if channels not in (1, 3):
            raise BadOption(
                f"{settings['model']} takes {channels} channels, images have 1 or 3", hint="change it by --set"
            )
        if settings.get("field"):
            raise BadOption(f"--field {settings['field']}: images have no fields", hint="leave it out")
        known, glob = settings.get("images"), settings.get("glob")
        images = ImageBatches(Path(settings["data"]).expanduser(), **sizes, device=device, glob=glob, known=known)
        refuse_changed(settings["data"], settings["data_digest"], images.digest, kept.files, images.files)
        classes = len(images.classes)
        config.setdefault(field, classes)
        fitting = _fitting(
            settings, family, config, field, classes,
            Data(batches=images, config=None, files=images.files,
                 found={"data_digest": images.digest, "images": images.known, "config": config}),
        )  # fmt: skip
        if images.unseen_colours is not None:
            key = "num_channels" if family.typed is False else "channels"
            text = f"{images.unseen_colours} is in colour, and the model sees grey: --set {key}=3 shows it the colours"
            warnings.warn(text, WholestepWarning, stacklevel=2)
        return fitting
    return _fitting(settings, family, config, field, classes, Data(batches=made, config=None, found=found))


def _fitting(
    settings: Mapping[str, Any], family: Family, config: dict[str, Any], field: str, classes: int, data: Data
) -> Data:
    """The same data, with a configuration that tells its classes apart."""
    data.config = family.configure(config)
    if families.classes_of(data.config) < classes:
        what = f"{settings['model']} has {families.classes_of(data.config)} classes, {settings['data']} has {classes}"
        raise BadOption(what, hint=f"--set {field}={classes}")
    return data


def image_logits(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    """Logits of a batch of images, for this package's models and Hugging Face's alike."""

    def of(batch: dict[str, Tensor]) -> Tensor:
        made = model(batch["pixel_values"])
        return made if isinstance(made, Tensor) else made.logits

    return of


# ---- graphs ----


def _graphs(settings: Mapping[str, Any], family: Family, device: torch.device, kept: Kept) -> Data:
    asked = family.configure(dict(settings["config"]))
    batches = PyGraphBatches(read_pygraph(asked.files), device=device)
    refuse_changed(settings["data"], settings["data_digest"], batches.digest, None, {})
    sizes = {"nodes": batches.graph.num_nodes, "relations": batches.graph.num_relations}
    for name, least in (*sizes.items(), ("classes", len(KINDS))):
        if getattr(asked, name) not in (0, least):
            what = f"{name}={getattr(asked, name)}: the graph has {least}"
            raise BadOption(what, hint=f"leave it out, or --set {name}={least}")
    config = {**settings["config"], **sizes}
    found = {"data_digest": batches.digest, "config": config}
    return Data(batches=batches, config=family.configure(config), found=found)


# ---- the model ----


def _drawn(family: Family, config: Any, settings: Mapping[str, Any], device: torch.device) -> nn.Module:
    """The model on its device, with weights that depend on the seed alone (and on the device they are drawn on), or on --init."""
    torch.manual_seed(settings["seed"])
    init = settings["init"]
    if init is True:  # as older runs say it
        init = str(family.folder)
    if init and not os.path.isfile(os.path.join(init, FACTS)):
        if family.typed:
            what = f"--init {init} was not trained as {settings['model']}: it holds no {FACTS}"
            raise BadOption(what, hint="name a run, or leave MODEL out")
        return family.build(config, init).to(device)
    with device:  # eight billion weights are not drawn on the CPU first
        model = family.build(config, None)
    if init:
        load_weights(open_stored(Path(init)), model)
    return model.to(device)
