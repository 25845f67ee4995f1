"""What experts compute with: products by groups of rows, and what each row's expert has."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable


def expert_rows(table: torch.Tensor, offsets: torch.Tensor, plan: Any) -> torch.Tensor:
    """``[n, ...]``: for every row what its expert has in ``table[experts, ...]``."""
    if table.is_meta:
        return table.new_empty(plan.rows, *table.shape[1:])
    return _ExpertRows.apply(table, offsets, plan.rows)


class _ExpertRows(torch.autograd.Function):
    """Backward adds up by segments: no atomics, the same sum every time."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(counts := torch.diff(offsets.long(), prepend=offsets.new_zeros(1)))
        return table.repeat_interleave(counts, 0, output_size=rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (counts,) = ctx.saved_tensors
        # in float32 at least: a sum of many rows in half precision stops growing
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        summed = torch.segment_reduce(wide, "sum", lengths=counts, axis=0, unsafe=True)
        return summed.to(grad.dtype), None, None


#: Widths that torch's kernel of products by groups takes are multiples of so many numbers.
ALIGNED = 8


def grouped_product(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """``x[n, k]`` by groups of rows, which end at ``offsets[e]``, times ``weight[e, k, m]``:
    ``[n, m]``. Under autocast it computes in autocast's dtype, as ``linear`` does."""
    x, weight = (_autocast(t) for t in (x, weight))
    aligned = all(size % ALIGNED == 0 and size for size in weight.shape[1:])
    if x.is_cuda and x.dtype is torch.bfloat16 and aligned and len(x) and len(weight):
        return torch._grouped_mm(x, weight, offs=offsets)
    return _GroupedProduct.apply(x, weight, offsets)


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """What autocast makes of an operand of a product: it leaves double precision alone."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return x
    eligible = x.is_floating_point() and x.dtype is not torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if eligible else x


class _GroupedProduct(torch.autograd.Function):
    """One product for each group that has rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> Any:
        ctx.save_for_backward(x, weight, offsets)
        out = x.new_empty(x.shape[0], weight.shape[2])
        spans = _spans(offsets)
        for i, start, stop in spans:
            torch.mm(x[start:stop], weight[i], out=out[start:stop])
        out[spans[-1][2] if spans else 0 :].zero_()  # rows of no group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, offsets = ctx.saved_tensors
        wanted, to_x, to_weight = _wanted(ctx), None, None
        spans = _spans(offsets)
        if wanted[0]:
            to_x = torch.empty_like(x)
            for i, start, stop in spans:
                torch.mm(grad[start:stop], weight[i].T, out=to_x[start:stop])
            to_x[spans[-1][2] if spans else 0 :].zero_()  # rows of no group
        if wanted[1]:
            to_weight = torch.empty_like(weight)
            given = {i: slice(start, stop) for i, start, stop in spans}
            for i in range(len(weight)):
                if i in given:
                    torch.mm(x[given[i]].T, grad[given[i]], out=to_weight[i])
                else:
                    to_weight[i].zero_()
        return to_x, to_weight, None


def _wanted(ctx: Any) -> list[bool]:
    """For which inputs this backward computes gradients: one of a part of the graph may leave out
    some that others need."""
    return [
        needs and _goes_on(to)
        for needs, (to, _) in zip(ctx.needs_input_grad, ctx.next_functions, strict=True)
    ]


def _goes_on(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient `torch.autograd.grad` returns
        return True


def _spans(offsets: torch.Tensor) -> list[tuple[int, int, int]]:
    """(group, start, stop) of the groups that have rows."""
    if isinstance(offsets, FakeTensor) or offsets.is_meta:
        return []
    ends = offsets.tolist()
    spans = zip([0, *ends], ends, strict=False)
    return [(i, start, stop) for i, (start, stop) in enumerate(spans) if start < stop]
