"""A trained model for other programs: a folder that `transformers` opens, or one safetensors.

In: a Trained and a place. Out: the files, and how to open them. Models of this package's own whose mathematics a class of
transformers has are written as that class: a GPT as GPT-2, a ResNet with the usual stem as its ResNet. Both are run side by side
before anything is written.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wholestep.errors import BadOption, WholestepError
from wholestep.passes.amp import PRECISIONS
from wholestep.train import hf_models, outside
from wholestep.train.checkpoint import model_tensors
from wholestep.train.checkpoint_files import save_tensors
from wholestep.train.models.configs import LAYERS
from wholestep.train.models.gpt import GPT
from wholestep.train.models.resnet import ResNet
from wholestep.train.saved import refuse_taken
from wholestep.train.trained import Trained

LARGEST_DIFFERENCE = 1e-4
"""Between logits of a model and of the class it is written as: both round, in another order."""
WEIGHTS = "model.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how to open it."""

    path: Path
    form: str
    """In words."""
    open_with: list[str]
    """Lines of Python."""


def export(trained: Trained, out: Path, *, precision: str | None = None) -> Exported:
    """Write `trained` to `out`: a new folder, or a new file that ends with .safetensors."""
    refuse_taken(out)
    dtype = None if precision is None else PRECISIONS[precision]
    if out.suffix == ".safetensors":
        return _written(out, lambda place: _one_file(trained, place, dtype), _plain(out, trained))
    model, why = _of_transformers(trained)
    if model is None:

        def fill(place: Path) -> None:
            place.mkdir()
            _one_file(trained, place / WEIGHTS, dtype)
            if hasattr(trained.model, "config"):
                for name, content in outside.files(trained.model, trained.tokens, trained.images).items():
                    (place / name).write_bytes(content)

        return _written(out, fill, _plain(out, trained, why))
    return _written(out, lambda place: _folder(model, trained, place, dtype), _opened(out, trained, model))


def _written(out: Path, write: Any, exported: Exported) -> Exported:
    """All of it, or nothing."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        held = Path(tempfile.mkdtemp(prefix=".export-", dir=out.parent))
    except OSError as error:
        raise BadOption(f"{out} cannot be written: {error.strerror or error}", hint="name another place") from None
    try:
        write(held / out.name)
        if out.is_dir():
            out.rmdir()
        os.rename(held / out.name, out)
    except OSError as error:
        raise BadOption(f"{out} cannot be written: {error.strerror or error}", hint="name another place") from None
    finally:
        shutil.rmtree(held, ignore_errors=True)
    return exported


def _one_file(trained: Trained, path: Path, dtype: torch.dtype | None) -> None:
    tensors, aliases = model_tensors(trained.model)
    cast = {name: value.to(dtype) if dtype and value.is_floating_point() else value for name, value in tensors.items()}
    save_tensors(cast, path, {"format": "pt", **aliases})


def _folder(model: Any, trained: Trained, place: Path, dtype: torch.dtype | None) -> None:
    if dtype is not None:
        model = model.to(dtype)
    with hf_models.quiet():
        model.save_pretrained(place)
    for name, content in outside.files(model, trained.tokens, trained.images).items():
        (place / name).write_bytes(content)


def _opened(out: Path, trained: Trained, model: Any) -> Exported:
    task = "causal" if trained.family is None or trained.family.task == "next" else trained.family.task
    auto = hf_models.TASKS[task][0]
    lines = [f"transformers.{auto}.from_pretrained({str(out)!r})"]
    if trained.tokens is not None and trained.tokens.files():
        lines.append(f"transformers.AutoTokenizer.from_pretrained({str(out)!r})")
    if trained.images is not None:
        lines.append(f"transformers.AutoImageProcessor.from_pretrained({str(out)!r})")
    return Exported(out, f"a folder of transformers, {type(model).__name__}", lines)


def _plain(out: Path, trained: Trained, why: str | None = None) -> Exported:
    path = out if out.suffix == ".safetensors" else out / WEIGHTS
    form = "one safetensors" + (f": {why}" if why else "")
    return Exported(out, form, [f"safetensors.torch.load_file({str(path)!r})"])


# ---- models of this package as classes of transformers ----


def _of_transformers(trained: Trained) -> tuple[Any, str | None]:
    """(the model as one of transformers, None where it is none; why)."""
    model, family = trained.model, trained.family
    if family is None:
        return None, "the model is the user's own"
    if family.task in hf_models.TASKS and not isinstance(model, ResNet):
        if "use_cache" in model.config.to_dict():  # off in training; whoever opens it will want to write with it
            model.config.use_cache = True
        return model.cpu(), None
    if not hf_models.installed():
        return None, "the package transformers is not installed"
    if isinstance(model, GPT):
        made, example = (
            _gpt2(model, trained),
            torch.arange(min(model.config.context, 16)).remainder(model.config.vocab_size),
        )
        return _checked(model.cpu(), made, example[None]), None
    if isinstance(model, ResNet) and model.config.stem == "large":
        shape = (2, model.config.channels, model.config.image_size, model.config.image_size)
        return _checked(model.cpu(), _resnet(model), torch.linspace(-2, 2, steps=_product(shape)).reshape(shape)), None
    if isinstance(model, ResNet):
        return None, "transformers has no ResNet with a small stem; --set stem=large trains one that it has"
    return None, f"transformers has no {type(model).__name__}"


def _product(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _checked(model: nn.Module, made: Any, example: Tensor) -> Any:
    """`made`, found to compute what `model` does."""
    with torch.no_grad():
        difference = float((model.eval()(example) - made.eval()(example).logits).abs().max())
    if not difference <= LARGEST_DIFFERENCE:
        what = f"the model and its export as {type(made).__name__} differ by {difference:.1e}"
        raise WholestepError(what, hint="please report it; export to a name that ends with .safetensors meanwhile")
    return made


def _gpt2(model: GPT, trained: Trained) -> Any:
    """GPT-2 with the exact GELU. Its linear layers are stored transposed."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config, end = model.config, None if trained.tokens is None else trained.tokens.end_id
    made = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.context, n_embd=config.width, n_layer=config.layers,
            n_head=config.heads, n_inner=4 * config.width, activation_function="gelu", resid_pdrop=config.dropout,
            embd_pdrop=config.dropout, attn_pdrop=config.dropout, tie_word_embeddings=config.tied, bos_token_id=end,
            eos_token_id=end,
        )
    )  # fmt: skip
    state = {"transformer.wte.weight": model.token.weight, "transformer.wpe.weight": model.position.weight}
    state |= {f"transformer.ln_f.{part}": getattr(model.norm, part) for part in ("weight", "bias")}
    state["lm_head.weight"] = model.head.weight
    names = {
        "ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "qkv", "attn.c_proj": "out", "mlp.c_fc": "up", "mlp.c_proj": "down"
    }  # fmt: skip
    for number, block in enumerate(model.blocks):
        for theirs, ours in names.items():
            layer = getattr(block, ours)
            weight = layer.weight.T if isinstance(layer, nn.Linear) else layer.weight
            state[f"transformer.h.{number}.{theirs}.weight"] = weight
            state[f"transformer.h.{number}.{theirs}.bias"] = layer.bias
    made.load_state_dict({name: value.detach().clone() for name, value in state.items()}, strict=True)
    return made


def _resnet(model: ResNet) -> Any:
    """Its ResNet, stage by stage."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = model.config
    growth, depths = (1 if config.depth == 18 else 4), LAYERS[config.depth]
    made = ResNetForImageClassification(
        ResNetConfig(
            num_channels=config.channels, embedding_size=config.width, depths=list(depths), num_labels=config.classes,
            hidden_sizes=[config.width * growth * 2**stage for stage in range(4)],
            layer_type="basic" if config.depth == 18 else "bottleneck",
        )
    )  # fmt: skip
    state = dict(_convolution("resnet.embedder.embedder", model.stem[0], model.stem[1]))
    blocks = iter(model.blocks)
    for stage, depth in enumerate(depths):
        for number in range(depth):
            block, prefix = next(blocks), f"resnet.encoder.stages.{stage}.layers.{number}"
            for part in range(1, 3 if config.depth == 18 else 4):
                pair = getattr(block, f"conv{part}"), getattr(block, f"norm{part}")
                state |= _convolution(f"{prefix}.layer.{part - 1}", *pair)
            if isinstance(block.shortcut, nn.Sequential):
                state |= _convolution(f"{prefix}.shortcut", block.shortcut[0], block.shortcut[1])
    state |= {"classifier.1.weight": model.head.weight, "classifier.1.bias": model.head.bias}
    made.load_state_dict({name: value.detach().clone() for name, value in state.items()}, strict=True)
    made.config.image_size = config.image_size
    return made


def _convolution(prefix: str, convolution: Any, norm: Any) -> dict[str, Tensor]:
    found = {f"{prefix}.convolution.weight": convolution.weight}
    return found | {f"{prefix}.normalization.{name}": value for name, value in norm.state_dict().items()}
