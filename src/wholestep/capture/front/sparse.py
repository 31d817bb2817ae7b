"""Sparse matrices in a loss: Dynamo sees an object that holds their parts, which are dense tensors, and knows their product.

In: a sparse tensor (COO or CSR) that the loss reads from the batch, a closure or a module, or makes by torch.sparse_coo_tensor.
Out: while it is captured, a `Sparse`. What a graph convolution does with such a matrix is there; anything else is told as
an attribute that is missing, and the step takes the next rung.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import BuiltinVariable, ConstantVariable, UserFunctionVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from wholestep.capture.front.assumed import assuming


class Sparse(NamedTuple):
    """A sparse matrix by its parts, while it is traced. A tuple: Dynamo replays what is written to any other object."""

    crow: Tensor | None
    places: Tensor
    entries: Tensor
    rows: int
    columns: int
    coalesced: bool
    transposed: bool = False

    @property
    def is_sparse(self) -> bool:
        return self.crow is None  # as torch has it: of COO alone

    @property
    def requires_grad(self) -> bool:
        return self.entries.requires_grad

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.columns, self.rows) if self.transposed else (self.rows, self.columns))

    @property
    def layout(self) -> torch.layout:
        return torch.sparse_coo if self.crow is None else torch.sparse_csr

    @property
    def dtype(self) -> torch.dtype:
        return self.entries.dtype

    @property
    def device(self) -> torch.device:
        return self.entries.device

    @property
    def T(self) -> Sparse:
        return self.t()

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return 2

    def t(self) -> Sparse:
        return Sparse(
            self.crow, self.places, self.entries, self.rows, self.columns, self.coalesced, not self.transposed
        )

    def coalesce(self) -> Sparse:
        if self.crow is None and not self.coalesced:
            raise NotImplementedError("coalesce() of a sparse matrix inside of the loss; coalesce it before")
        return self

    def indices(self) -> Tensor:
        return self.places.flip(0) if self.transposed else self.places

    def values(self) -> Tensor:
        return self.entries

    def mm(self, x: Tensor) -> Tensor:
        return product(self, x)

    def matmul(self, x: Tensor) -> Tensor:
        return product(self, x)


def product(matrix: Sparse, x: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise NotImplementedError("the product of two sparse matrices inside of the loss")
    if matrix.shape[1] != x.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({matrix.shape} and {x.shape})")
    dense = (x.unsqueeze(1) if x.dim() == 1 else x).contiguous()
    made = torch.ops.ws.sparse_mm(
        matrix.crow,
        matrix.places,
        matrix.entries,
        dense,
        matrix.rows,
        matrix.columns,
        matrix.coalesced,
        matrix.transposed,
    )
    return made.squeeze(1) if x.dim() == 1 else made


def make_coo(
    indices: Tensor, values: Tensor, size: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False,
    check_invariants: Any = None, is_coalesced: Any = None,
) -> Sparse:  # fmt: skip
    """In the place of torch.sparse_coo_tensor inside of a loss."""
    if len(size) != 2:
        raise NotImplementedError("a sparse tensor that is no matrix")
    found = values.to(dtype=dtype or values.dtype, device=device or values.device)
    return Sparse(None, indices.to(found.device), found, size[0], size[1], bool(is_coalesced))


# ---- what Dynamo is told ----


PARTS = "_wholestep_parts"
"""Attribute of a sparse tensor that holds its parts: guards look at objects that last, and `tensor._values()` does not."""


def attach_parts(tensor: Tensor) -> None:
    """(crow or None, index, values, coalesced, a tensor with as many entries as there are rows, one as there are columns).

    Sizes come as those of tensors, which may vary from step to step as those of a batch may.
    """
    if tensor.layout is torch.sparse_coo:
        # what coalescing leaves has gaps in memory where entries were added up
        found = (None, tensor._indices().contiguous(), tensor._values(), tensor.is_coalesced())
    else:
        # `.data`: Dynamo follows a view to what it is a view of
        found = (tensor.crow_indices().data, tensor.col_indices().data, tensor.values().data, True)
    sizes = (
        torch.empty(size, dtype=torch.uint8, device=tensor.device) for size in tensor.shape
    )  # never written, or read
    setattr(tensor, PARTS, (*found, *sizes))
    _attached.__dict__.setdefault("tensors", []).append(tensor)


def detach_parts() -> None:
    """The user's tensors as they were: what is attached would be saved with them."""
    for tensor in _attached.__dict__.pop("tensors", ()):
        if hasattr(tensor, PARTS):
            delattr(tensor, PARTS)


_attached = threading.local()


def _from_parts(parts: tuple) -> Sparse:
    crow, index, values, coalesced, rows, columns = parts
    return Sparse(crow, index, values, rows.shape[0], columns.shape[0], coalesced)


def is_matrix(value: Any) -> bool:
    """Whether it is a sparse matrix of ours: COO or CSR, its entries numbers, its values not trained."""
    if not isinstance(value, Tensor) or value.layout not in (torch.sparse_coo, torch.sparse_csr):
        return False
    return value.dim() == 2 and not value.requires_grad and (value.layout is torch.sparse_csr or value.dense_dim() == 0)


def _wrap_tensor(self: VariableBuilder, value: Any) -> Any:
    if not getattr(assuming, "on", False) or not is_matrix(value):
        return _plain_wrap(self, value)
    name = self.source.name() if callable(self.source.name) else self.source.name
    assuming.sparse.add(name)
    attach_parts(value)
    self.install_guards(GuardBuilder.TYPE_MATCH)
    parts = VariableBuilder(self.tx, AttrSource(self.source, PARTS))(getattr(value, PARTS))
    made = self.tx.inline_user_function_return(UserFunctionVariable(_from_parts), [parts], {})
    # the source it will be given is the tensor's, at whose type Sparse's properties are not to be found (torch 2.11)
    made.cls_source = AttrSource(self.tx.import_source(__name__), Sparse.__name__)
    return made


_plain_wrap = VariableBuilder.wrap_tensor
VariableBuilder.wrap_tensor = _wrap_tensor


def _takes_sparse(args: Any, kwargs: Any) -> bool:
    """Whether the first of two arguments is a sparse matrix."""
    if not getattr(assuming, "on", False) or len(args) != 2 or kwargs:
        return False
    first = args[0].realize()
    return Sparse in (getattr(first, "value_type", None), getattr(first, "tuple_cls", None))  # torch 2.13, and before


def _multiply(plain: Callable[..., Any] | None) -> Callable[..., Any]:
    """Dynamo's handler of a product by a function of torch's; None leaves the call to the default."""

    def handle(function: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if _takes_sparse(args, kwargs):
            return tx.inline_user_function_return(UserFunctionVariable(product), list(args), {})
        return None if plain is None else plain(function, tx, *args, **kwargs)

    return handle


def _call_builtin(self: BuiltinVariable, tx: Any, args: Any, kwargs: Any) -> Any:
    if self.fn is operator.matmul and _takes_sparse(args, kwargs):
        return tx.inline_user_function_return(UserFunctionVariable(product), list(args), {})
    if self.fn is isinstance and _takes_sparse(args, kwargs):
        return ConstantVariable.create(issubclass(Tensor, args[1].as_python_constant()))
    return _plain_builtin(self, tx, args, kwargs)


_handlers = TorchInGraphFunctionVariable._get_handlers()
for _function in (torch.mm, torch.matmul, torch.sparse.mm, torch.spmm):
    _handlers[_function] = _multiply(_handlers.get(_function))
_plain_builtin = BuiltinVariable.call_function
BuiltinVariable.call_function = _call_builtin
