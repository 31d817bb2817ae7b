"""A Hugging Face Trainer whose forward, loss and backward are one captured step.

In: what `transformers.Trainer` takes, and `wholestep={...}` with options of `wholestep.compile`. Out: a Trainer. Only
`training_step` is another: a Step without optimizer computes the loss and adds to `p.grad`. Accumulation, clipping, update,
schedule, evaluation, logging, saving and resuming are the Trainer's own, so they behave as documented there.

What differs between steps is a tensor of the batch and so an input of the graph: the number of items over which a
token-weighted loss is averaged, and the number of micro-batches by which any other loss is divided. Autocast for `bf16=True`
is the one that accelerate puts around the model's forward; it is traced with it, so that the loss functions of the Trainer
stay outside it, as they do in eager training. With `fp16=True` the loss is multiplied by the scale of accelerate's GradScaler,
one more tensor of the batch; unscaling, skipping an update and changing the scale are its own.

`wholestep={"memory": "12GiB"}` plans forward and backward for a budget. The optimizer is the Trainer's: its state, made at the
first update, comes on top.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from wholestep import api
from wholestep.errors import (
    BadOption,
    NotBuiltYet,
    UnsupportedModel,
    UnsupportedOptimizer,
    WholestepWarning,
)
from wholestep.runtime.step import Step

STATE_FILE = "wholestep_step.json"
"""In a checkpoint: seed and count of the Step, from which dropout draws."""
OPTIONS = ("backend", "check", "cuda_graph", "dump", "dynamic", "memory", "passes", "plan", "recipe", "seed", "verbose")
_ARGUMENT_INSTEAD = {
    "precision": "bf16=True or fp16=True", "accumulate": "gradient_accumulation_steps", "clip_norm": "max_grad_norm",
}  # fmt: skip


def checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of `wholestep.compile` that a Trainer leaves open; any other is an error that names its argument."""
    for name in options or {}:
        if name in _ARGUMENT_INSTEAD:
            raise BadOption(
                f"wholestep={{{name!r}: ...}} is decided by TrainingArguments",
                hint=f"use {_ARGUMENT_INSTEAD[name]} there",
            )
        if name not in OPTIONS:
            raise BadOption(f"wholestep={{{name!r}: ...}}", hint=f"use {', '.join(OPTIONS)}")
    return dict(options or {})


def refuse_unsupported(trainer: Any) -> None:
    """Raise a named error for what a captured step would do differently, warn about what it does in another way."""
    args = trainer.args
    stock = "use transformers.Trainer for it"
    _refuse_several_devices(trainer, stock)
    mixed = trainer.accelerator.mixed_precision
    if mixed not in ("no", "bf16", "fp16"):
        raise NotBuiltYet(f"{mixed} mixed precision is not part of this version", hint="use bf16=True or fp16=True")
    if args.device.type not in ("cpu", "cuda"):
        raise UnsupportedModel(f"training on {args.device.type}", hint=f"use CUDA or the CPU, or {stock}")
    if args.torch_compile:
        raise BadOption("torch_compile=True: the step is compiled by Wholestep", hint=f"leave it out, or {stock}")
    optimizer = str(getattr(args.optim, "value", args.optim))
    if "lomo" in optimizer:
        raise UnsupportedOptimizer(f"optim={optimizer!r} updates inside backward", hint=f"choose another, or {stock}")
    if args.gradient_checkpointing:
        warnings.warn(
            "gradient_checkpointing=True is set aside while the step is captured: activations are kept, not recomputed",
            WholestepWarning, stacklevel=3,
        )  # fmt: skip


def _refuse_several_devices(trainer: Any, stock: str) -> None:
    args = trainer.args
    engines = {
        "DeepSpeed": getattr(trainer, "is_deepspeed_enabled", False),
        "FSDP": getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_fsdp_xla_enabled", False),
        "SageMaker model parallelism": transformers.utils.is_sagemaker_mp_enabled(),
        "a model spread over several devices": getattr(trainer, "is_model_parallel", False),
        "apex": getattr(trainer, "use_apex", False),
    }
    for name, used in engines.items():
        if used:
            raise UnsupportedModel(f"{name} does its work around forward and backward, which are captured", hint=stock)
    if args.world_size > 1:
        raise NotBuiltYet(f"training in {args.world_size} processes is not part of this version", hint=stock)
    if args.n_gpu > 1:
        raise UnsupportedModel(
            f"{args.n_gpu} GPUs are visible, over which the Trainer spreads the model with DataParallel",
            hint=f"set CUDA_VISIBLE_DEVICES=0, or {stock}",
        )


class Trainer(transformers.Trainer):
    """`transformers.Trainer` with a captured training step; `trainer.step` is the Step once training has begun."""

    def __init__(self, *args: Any, wholestep: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self.step_options = checked_options(wholestep)
        self.step: Step | None = None
        self._step_state: dict[str, int] | None = None
        self._divisors: dict[int, torch.Tensor] = {}
        super().__init__(*args, **kwargs)
        refuse_unsupported(self)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Loss and gradients of one micro-batch; the gradients are added to `p.grad`."""
        model.train()
        train_mode = getattr(self.optimizer, "train", None)  # schedule-free optimizers have one
        if callable(train_mode):
            train_mode()
        batch = self._batch(self._prepare_inputs(inputs), num_items_in_batch)
        if self.step is None or self.step.subject.model is not model:
            self.step = self._compiled(model, batch)
        loss = self.step(batch)
        if batch["scale"] is not None:
            loss = loss[1]["unscaled"]
        every = self.args.torch_empty_cache_steps
        if every is not None and self.state.global_step % every == 0 and torch.cuda.is_available():
            torch.cuda.empty_cache()
        return loss.detach()

    def _compiled(self, model: nn.Module, batch: dict[str, Any]) -> Step:
        options = {"seed": self.args.seed, **self.step_options}
        if options.get("memory") is not None and not (self.optimizer is not None and self.optimizer.state):
            text = f"memory={options['memory']!r} is kept by forward and backward; the state of the Trainer's optimizer, made at"
            warnings.warn(f"{text} its first update, comes on top", WholestepWarning, stacklevel=2)
        # Not cached between processes: the loss belongs to this Trainer, and so would its dataset to the key.
        step = api.compile(model, self._captured_loss, None, batch, cache=False, **options)
        step.count = self.state.global_step * self.args.gradient_accumulation_steps
        if self._step_state is not None:
            step.load_state_dict(self._step_state)
        return step

    def _batch(self, inputs: Mapping[str, Any], num_items: Any) -> dict[str, Any]:
        """All that the loss of one micro-batch depends on, as tensors where it changes from step to step."""
        if num_items is not None and not isinstance(num_items, torch.Tensor):
            num_items = torch.tensor(num_items, device=self.args.device)
        scaled = getattr(self, "loss_is_scaled_for_ga", None)  # newer versions let a subclass say it
        if scaled is None:
            scaled = (self.model_accepts_loss_kwargs and num_items is not None) or self.compute_loss_func is not None
        divisor = None
        if not scaled and self.args.gradient_accumulation_steps > 1:
            divisor = self._divisor(self.current_gradient_accumulation_steps)
        return {"inputs": dict(inputs), "num_items": num_items, "divisor": divisor, "scale": self._scale()}

    def _scale(self) -> torch.Tensor | None:
        """The present loss scale of accelerate's GradScaler, which it has in fp16: an input too, for it changes."""
        scaler = self.accelerator.scaler
        if scaler is None or not scaler.is_enabled():
            return None
        scale: torch.Tensor = scaler.scale(torch.ones((), device=self.args.device))
        return scale

    def _divisor(self, count: int) -> torch.Tensor:
        """`count` on the device, put there once; whole, so that dividing by it leaves the dtype of the loss alone."""
        if count not in self._divisors:
            self._divisors[count] = torch.tensor(count, device=self.args.device)
        return self._divisors[count]

    def _captured_loss(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        """The Trainer's own loss. A method, so that what `compute_loss` reads of the Trainer is watched for changes."""
        inputs = dict(batch["inputs"])  # compute_loss may take the labels out
        loss = self.compute_loss(model, inputs, num_items_in_batch=batch["num_items"])
        loss = loss if batch["divisor"] is None else loss / batch["divisor"]
        return loss if batch["scale"] is None else (loss * batch["scale"], {"unscaled": loss.detach()})

    # ---- checkpoints: the Step's place in its random numbers goes where the Trainer puts those of the generators ----

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saving notes class and dtype in the config; left there, the model would look changed and be captured again."""
        config = getattr(self.model, "config", None)
        before = dict(vars(config)) if hasattr(config, "__dict__") else {}
        super().save_model(*args, **kwargs)
        if before and self.is_in_train:
            vars(config).update(before)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.step is not None:
            with open(os.path.join(output_dir, STATE_FILE), "w", encoding="utf-8") as file:
                json.dump(self.step.state_dict(), file)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        path = os.path.join(checkpoint, STATE_FILE) if checkpoint else ""
        if not os.path.isfile(path):
            return
        with open(path, encoding="utf-8") as file:
            self._step_state = json.load(file)
        if self.step is not None:
            self.step.load_state_dict(self._step_state)
