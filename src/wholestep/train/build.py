"""From settings to the parts of a Job: data, model, held-out and awkward batches, and what there is to show.

In: settings (plain JSON), a Family, a device. Out: Parts, and in it the fields that only the data decides (the digest of the
data, a GPT's vocabulary, the nodes of a graph), so that the settings saved with a run make the same Job again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.data.digits import CLASSES, DigitBatches
from wholestep.data.pygraph import KINDS, PyGraphBatches, read_pygraph
from wholestep.data.texts import TEXTS, Text, read_text
from wholestep.data.tokens import RESERVED, Tokens, make_tokens, read_tokens
from wholestep.data.windows import (
    HELD_OUT_PART,
    Form,
    Masked,
    TextBatches,
    continued_form,
    labelled_form,
    next_token_form,
)
from wholestep.errors import BadOption
from wholestep.train import families, sampling
from wholestep.train.families import Family

TOKENIZER_FILE = "tokenizer.json"
OTHER_DATA = {"digits": "images", "pygraph": "a graph"}
"""Data that is no text, and what it is."""
_WRITES_FROM = 1024
"""Tokens the sample looks back on, for a model without a longest sequence."""
FORMS: dict[str, tuple[Form, int, int]] = {
    "next": (next_token_form, 1, 1), "causal": (labelled_form, 1, 0), "seq2seq": (continued_form, 2, 0),
}  # fmt: skip
"""Task -> form of a batch, and the window as (sequences, and so many tokens more)."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Parts:
    """What a Job is put together from."""

    model: nn.Module
    batches: TextBatches | DigitBatches | PyGraphBatches
    held_out: Sequence[Any]
    edge_batches: Sequence[Any]
    write_sample: Callable[[], str]
    found: dict[str, Any]
    """Settings that the data decided."""


def build(settings: Mapping[str, Any], family: Family, device: torch.device) -> Parts:
    """All that depends on the data or is large."""
    made = _images if family.reads_images else _graphs if family.reads_graphs else _texts
    return made(settings, family, device)


def check_data_fits(data: str, family: Family, said: str) -> None:
    """Text for what reads text, images for what sees them, a graph for what runs over one."""
    is_a = OTHER_DATA.get(data, "text")
    wanted, verb = (
        ("images", "sees")
        if family.reads_images
        else ("a graph", "runs over")
        if family.reads_graphs
        else ("text", "reads")
    )
    if is_a != wanted:
        fitting = [name for name, what in OTHER_DATA.items() if what == wanted]
        hint = f"use {fitting[0]}" if fitting else f"use {', '.join(TEXTS)} or the path of a text file"
        raise BadOption(f"data {data!r} is {is_a}, {said} {verb} {wanted}", hint=hint)


# ---- texts ----


def _texts(settings: Mapping[str, Any], family: Family, device: torch.device) -> Parts:
    said, seq = settings["model"], settings["seq"]
    text = read_text(settings["data"], others=tuple(OTHER_DATA))
    config, tokens = _config_and_tokens(settings, family, text)
    form, window = _form(family, tokens, config, seq, said)
    batches = TextBatches(
        tokens.encode(text.content), name=settings["data"], window=window, seq=seq, batch=settings["batch"],
        seed=settings["seed"], form=form, device=device, text_bytes=len(text.content),
    )  # fmt: skip
    model = _drawn(family, config, settings, device)
    held_out = batches.held_out()
    found: dict[str, Any] = {"data_digest": text.digest}
    if family.task == "next":
        found["config"] = {**settings["config"], "vocab_size": config.vocab_size}
    context = family.context(config) or _WRITES_FROM
    return Parts(
        model=model, batches=batches, held_out=held_out, found=found,
        edge_batches=batches.edges(config.vocab_size, fewest=settings["accumulate"]),
        write_sample=_writer(family, model, tokens, batches, held_out, context, settings["seed"]),
    )  # fmt: skip


def check_sequence(seq: int, family: Family, config: Any, said: str) -> None:
    """A sequence the model can read."""
    longest = family.context(config)
    if longest is not None and seq > longest:
        longer = f" or --set {family.longer}={seq}" if family.longer else ""
        raise BadOption(
            f"--seq {seq}: {said} reads at most {longest} tokens", hint=f"use --seq {longest} or less{longer}"
        )
    if family.task == "causal" and seq < 2:
        raise BadOption(f"--seq {seq}: there is no next token to learn", hint="use --seq 2 or more")


def _config_and_tokens(settings: Mapping[str, Any], family: Family, text: Text) -> tuple[Any, Tokens]:
    """The configuration and the tokens, each as large as the other allows."""
    changes, kind, wanted = dict(settings["config"]), settings["tokenizer"], settings["vocabulary"]
    learnt_from = text.content[: len(text.content) - int(len(text.content) * HELD_OUT_PART)]
    if family.task == "next":
        tokens = make_tokens(kind, learnt_from, wanted)
        changes["vocab_size"] = changes.get("vocab_size") or tokens.size
        config = family.configure(changes)
    else:
        config = family.configure(changes)
        limit = families.vocabulary_of(config, settings["model"])
        if kind == "file":
            assert family.folder is not None
            tokens = read_tokens(family.folder / TOKENIZER_FILE)
        else:
            tokens = make_tokens(kind, learnt_from, min(wanted, max(limit, 256 + len(RESERVED))), reserved=True)
    if tokens.size > config.vocab_size:
        what = f"vocab_size={config.vocab_size} is smaller than the {tokens.size} ids the tokenizer ({kind}) yields"
        raise BadOption(what, hint=f"--set vocab_size={tokens.size} or more")
    return config, tokens


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
    first = 0 if tokens.kind == "file" else len(RESERVED)
    return Masked(mask_id=mask, first_id=first, end_id=tokens.size), seq


def _writer(
    family: Family,
    model: nn.Module,
    tokens: Tokens,
    batches: TextBatches,
    held_out: Sequence[Any],
    context: int,
    seed: int,
) -> Callable[[], str]:
    """What shows a text model at work."""
    if family.task == "masked":
        return lambda: sampling.fill_masks(model, held_out[0] if held_out else batches.batch(0), tokens)
    start = tokens.encode(b"\n\n")  # the start of a paragraph, of a speech
    if not len(start):  # a tokenizer that has no new line
        start = batches.train[:1]
    if family.task == "next":
        logits: sampling.Logits = model
    elif family.task == "causal":
        logits = lambda ids: model(input_ids=ids).logits  # noqa: E731
    else:
        read = (held_out[0] if held_out else batches.batch(0))["input_ids"][:1]
        start = torch.tensor([model.config.decoder_start_token_id])
        logits = lambda ids: model(input_ids=read, decoder_input_ids=ids).logits  # noqa: E731
    return lambda: sampling.write_text(model, logits, tokens, start=start, context=context, seed=seed)


# ---- images ----


def _images(settings: Mapping[str, Any], family: Family, device: torch.device) -> Parts:
    config = family.configure(dict(settings["config"]))
    size, channels = families.image_shape(config)
    if families.classes_of(config) < CLASSES:
        field = "classes" if settings["model"].startswith("resnet") else "num_labels"
        what = f"{settings['model']} tells {families.classes_of(config)} classes apart, digits has {CLASSES}"
        raise BadOption(what, hint=f"--set {field}={CLASSES}")
    batches = DigitBatches(image=size, channels=channels, batch=settings["batch"], seed=settings["seed"], device=device)
    model = _drawn(family, config, settings, device)
    held_out = batches.held_out()
    return Parts(
        model=model, batches=batches, held_out=held_out, found={"data_digest": batches.digest},
        edge_batches=batches.edges(fewest=2 * settings["accumulate"]),
        write_sample=lambda: sampling.name_digits(model, image_logits(model), held_out),
    )  # fmt: skip


def image_logits(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    """Logits of a batch of images, for this package's models and Hugging Face's alike."""

    def of(batch: dict[str, Tensor]) -> Tensor:
        made = model(batch["pixel_values"])
        return made if isinstance(made, Tensor) else made.logits

    return of


# ---- graphs ----


def _graphs(settings: Mapping[str, Any], family: Family, device: torch.device) -> Parts:
    asked = family.configure(dict(settings["config"]))
    batches = PyGraphBatches(read_pygraph(asked.files), device=device)
    sizes = {"nodes": batches.graph.num_nodes, "relations": batches.graph.num_relations}
    for name, least in (*sizes.items(), ("classes", len(KINDS))):
        if getattr(asked, name) not in (0, least):
            what = f"{name}={getattr(asked, name)}: the graph has {least}"
            raise BadOption(what, hint=f"leave it out, or --set {name}={least}")
    config = {**settings["config"], **sizes}
    model = _drawn(family, family.configure(config), settings, device)
    held_out = batches.held_out()
    return Parts(
        model=model, batches=batches, held_out=held_out, found={"data_digest": batches.digest, "config": config},
        edge_batches=batches.edges(),
        write_sample=lambda: sampling.name_kinds(model, held_out, batches.commonest()),
    )  # fmt: skip


# ---- the model ----


def _drawn(family: Family, config: Any, settings: Mapping[str, Any], device: torch.device) -> nn.Module:
    """The model on its device, with weights that depend on the seed alone (and on the device they are drawn on)."""
    torch.manual_seed(settings["seed"])
    if settings["init"]:
        return family.build(config, True).to(device)
    with device:  # eight billion weights are not drawn on the CPU first
        model = family.build(config, False)
    return model.to(device)
