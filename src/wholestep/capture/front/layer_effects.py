"""What stands around a layer while Dynamo traces it, and what a layer does besides computing.

In: Dynamo's translator. Out: values that are equal as long as nothing was changed that another layer's trace would show.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable
from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew, VariableTracker

from wholestep.capture.front.assumed import assuming
from wholestep.capture.front.layer_guards import Identity, Unlike


def surroundings(tx: Any) -> tuple:
    """What torch is set to, the modules around, objects that were changed so far; raises Unlike under a function mode."""
    cast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")]
    if getattr(getattr(tx, "symbolic_torch_function_state", None), "mode_stack", ()):
        raise Unlike  # a mode has its say in every operation
    flags = (torch.is_grad_enabled(), torch.get_default_dtype(), torch._C._get_cudnn_enabled())
    more = (torch.is_inference_mode_enabled(), torch.get_deterministic_debug_mode())
    return (*flags, *more, cast, list(tx.nn_module_stack.items()), _changed_objects(tx))


def effects_of(tx: Any) -> tuple:
    """What a layer may do besides computing: hooks, random numbers of Python's, lines that are written, sparse matrices."""
    effects, written = tx.output.side_effects, tx.output.root_tx.debug_locals
    counted = (effects.tensor_hooks, effects.save_for_backward, tx.output.random_calls, tx.output.nn_modules, written)
    return (*map(len, counted), len(assuming.sparse))


def _changed_objects(tx: Any) -> list[Any]:
    """Objects that were there before the call and have been changed so far, with what they hold; equal while nothing else is."""
    effects = tx.output.side_effects
    items = {id(item): item for item in (*effects.id_to_variable.values(), *effects.store_attr_mutations)}
    seen: set[int] = set()
    return [_held(item, effects, seen) for item in items.values() if _was_changed(item, effects)]


def _was_changed(item: Any, effects: Any) -> bool:
    if item.mutation_type is None or isinstance(item, TensorVariable):
        return item in effects.store_attr_mutations
    return not isinstance(item.mutation_type, AttributeMutationNew | ValueMutationNew) and effects.is_modified(item)


def _held(value: Any, effects: Any, seen: set[int]) -> Any:
    """A variable of Dynamo's: itself, and all that it holds, which may be something else later."""
    if isinstance(value, LazyVariableTracker) and value.is_realized():
        value = value.realize()
    if isinstance(value, ConstantVariable):
        return (type(value.value), value.value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_held(v, effects, seen) for v in value]
    if isinstance(value, dict):
        return [_held(v, effects, seen) for entry in value.items() for v in entry]
    if not isinstance(value, VariableTracker) or id(value) in seen:
        return Identity(value)
    seen.add(id(value))
    attributes = effects.store_attr_mutations.get(value, {})
    inner = [v for name, v in vars(value).items() if name not in ("source", "mutation_type")]
    return (Identity(value), list(attributes), _held([*attributes.values(), *inner], effects, seen))
