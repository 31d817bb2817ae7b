"""All cases, and which of them cannot be one captured graph."""

from __future__ import annotations

from collections.abc import Sequence

from tests.trust import (
    burned_in,
    carried,
    code_changed,
    data,
    hooks,
    interrupted,
    left_behind,
    loops,
    optimizers,
    outside,
    python_values,
    randomness,
    refusals,
    stale_cache,
    structure,
    values_read,
)
from tests.trust.case import CASES, Case

__all__ = ["CASES", "FILES", "LOUD", "chosen"]

FILES = (
    burned_in, values_read, code_changed, outside, structure, left_behind, carried, optimizers, hooks, randomness, data,
    python_values, loops, interrupted, stale_cache, refusals,
)  # fmt: skip

LOUD: dict[str, str] = {
    "step_patched_on_the_instance": "step",
    "step_patched_later": "step",
    "step_patched_on_the_class": "step",
    "zero_grad_patched": "",
    "optimizer_of_ones_own": "Sign",
    "subclass_that_looks_ahead": "Lookahead",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "radam": "RAdam",
    "adafactor": "Adafactor",
    "hook_before_the_update": "hook",
    "hook_after_the_update": "hook",
    "hook_after_the_update_added_later": "hook",
    "hook_for_all_optimizers": "hook",
    "post_accumulate_hook_clips": "hook",
    "post_accumulate_hook_added_later": "hook",
    "optimizer_in_the_backward": "hook",
    "file_read": "",
    "json_file_read_by_path": "",
    "file_exists": "",
    "file_written": "",
    "numpy_generator": "",
    "numpy_random_state": "",
    "numpy_confusion_matrix": "",
    "assignment_by_scipy": "",
    "fixed_point_until_it_settles": "",
    "embedding_with_sparse_gradients": "",
    "dispatch_mode_in_the_loss": "",
    "thread_inside_the_loss": "",
    "backward_inside_the_loss": "backward",
    "update_inside_the_loss": "",
    "part_that_disables_compilers": "disable",
    "data_parallel": "DataParallel",
    "parameter_outside_the_modules": "parameter",
}
"""Name -> words of the reason that must be told (any reason where there are none)."""


def chosen(names: Sequence[str]) -> list[Case]:
    """The cases of these names and classes; all of them for no name."""
    known = {*CASES, *(case.kind for case in CASES.values())}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no case or class is named {', '.join(unknown)}")
    return [case for case in CASES.values() if not names or case.name in names or case.kind in names]
