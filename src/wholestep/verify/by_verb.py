"""Verify by verb: a schedule beside the model as it was written; where they differ, the verb that is to blame.

In: a recipe, and how a part of it is verified. Out: the Report of `wholestep.verify` over train steps, eval mode and awkward
batches that are made of the first one: every id 0, every id the last, rows that are all padding, a batch of one row more than the
half. A recipe is a list, so the wrong verb is found by bisection over its beginnings.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from wholestep.capture.batch import flatten, unflatten
from wholestep.errors import BadBatch, WholestepError, WholestepWarning
from wholestep.schedule import Recipe
from wholestep.verify.report import Report


def verify_by_verb(
    verify: Callable[..., Report], model: nn.Module, batches: Any, recipe: Recipe, *, each: bool, edge_batches: Any,
    accumulate: int = 1,
) -> Report:  # fmt: skip
    """`verify(recipe, edge_batches)` of all lines, or after each; the first that is wrong is named."""
    listed = batches if isinstance(batches, list) else [batches]
    edges = awkward(listed[0], model, accumulate) if edge_batches is None and listed else edge_batches or ()

    def checked(count: int) -> Report:
        with warnings.catch_warnings():
            if count < len(recipe):  # what is said about a part is said about a recipe that nobody wrote
                warnings.simplefilter("ignore", WholestepWarning)
            return verify(Recipe(recipe.lines[:count], recipe.expects, recipe.source), edges)

    def unless_incomplete(count: int) -> Report | None:
        """None where lines make sense only with later ones: a weight that is cut before its bias is."""
        try:
            return checked(count)
        except WholestepError:
            if count == len(recipe):
                raise
            return None

    if each:
        report = checked(0)
        for count in range(1, len(recipe) + 1 if report.ok else 1):
            report = unless_incomplete(count) or report
            if not report.ok:
                return _blamed(report, recipe, count)
        return report
    report = checked(len(recipe))
    if report.ok or not len(recipe) or not checked(0).ok:  # the last: it is not the recipe
        return report
    good, bad, failed = 0, len(recipe), {len(recipe): report}
    while bad - good > 1:
        middle = (good + bad) // 2
        found = unless_incomplete(middle)
        if found is None or found.ok:
            good = middle
        else:
            bad, failed[middle] = middle, found
    return _blamed(failed[bad], recipe, bad)


def _blamed(report: Report, recipe: Recipe, count: int) -> Report:
    line = recipe.place(recipe.lines[count - 1])
    if report.first_departure is not None:
        report.first_departure = dataclasses.replace(report.first_departure, guilty_verb=line)
    report.note(f"wrong from {line} on; without it the step is equal to the model as it was written")
    return report


# ---- awkward batches ----


def awkward(batch: Any, model: nn.Module, accumulate: int = 1) -> list[Any]:
    """Batches like the given one in which mistakes at the borders show: first and last ids, padding, an odd number of rows in
    each of its micro-batches."""
    try:
        tensors, spec = flatten(batch)
    except BadBatch:  # a structure of the user's own
        return []
    rows = {t.shape[0] for t in tensors if t.dim() > 0}
    found = []
    ids = [i for i, t in enumerate(tensors) if t.dtype in (torch.int64, torch.int32) and t.dim() >= 2]
    sizes = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    last = max(sizes, default=0) - 1
    if ids and last >= 0:
        fitting = [i for i in ids if int(tensors[i].max()) <= last]
        for value in (0, last):
            found.append([_filled(t, value) if i in fitting else t for i, t in enumerate(tensors)])
    if ids and len(rows) == 1 and max(rows) > 1:
        masks = [i for i, name in enumerate(spec.names) if "mask" in str(name) and tensors[i].dim() == 2]
        if masks:
            found.append([_last_row_padded(t) if i in masks else t for i, t in enumerate(tensors)])
    if len(rows) == 1 and max(rows) // accumulate > 2:
        odd = (max(rows) // accumulate // 2 + 1) * accumulate
        found.append([t[:odd] if t.dim() > 0 else t for t in tensors])
    return [unflatten(list(changed), spec) for changed in found]


def _filled(tensor: torch.Tensor, value: int) -> torch.Tensor:
    """Ids that stand for nothing (-100) stay."""
    return torch.where(tensor < 0, tensor, torch.full_like(tensor, value))


def _last_row_padded(mask: torch.Tensor) -> torch.Tensor:
    """All but the first place of the last row: a row without any is no number in many models."""
    changed = mask.clone()
    changed[-1, 1:] = 0
    return changed
