"""Run a model's forward pass in parts that are recomputed, so that a step fits into memory.

Only the outputs of a part are kept; the backward pass computes the part again, with the same
dropout. The loss sees all rows together, as in GradCache (Gao et al. 2021), so the gradient of a
contrastive loss is that of the whole batch, up to rounding.
"""

from collections.abc import Callable, Mapping
from functools import partial, wraps
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel


class ForwardSplitter:
    """Splits forward passes of a module's transformers models; the first passes are not split."""

    def __init__(self, module: nn.Module) -> None:
        """Store the module; its models are unchanged until the first `halve`."""
        self._module, self._parts, self._largest_batch = module, 1, 0
        self._is_running_part = False

    def halve(self) -> bool:
        """Run each forward pass in twice as many parts; return False if parts cannot be smaller."""
        if self._parts == 1:
            # The size of a batch that failed in its first pass is unknown.
            self._largest_batch = 2
            for model in self._module.modules():
                if isinstance(model, PreTrainedModel):
                    model.forward = self._wrap(model.forward)
        elif self._parts >= self._largest_batch:
            return False
        self._parts *= 2
        return any(isinstance(model, PreTrainedModel) for model in self._module.modules())

    @property
    def parts(self) -> int:
        """Number of parts of a forward pass."""
        return self._parts

    def _wrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run_split(*args: Any, **kwargs: Any) -> Any:
            rows = next((len(tensor) for tensor in _iter_tensors((args, kwargs))), 1)
            # Within a part, nested models are not split, also when the part is recomputed.
            if rows == 1 or self._is_running_part or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            self._largest_batch = max(self._largest_batch, rows)
            size = ceil(rows / self._parts)
            run_part = partial(self._run_part, forward)
            parts = [slice(start, start + size) for start in range(0, rows, size)]
            outputs = [
                checkpoint(run_part, *_take_rows((args, kwargs), rows, part), use_reentrant=False) for part in parts
            ]
            return _concatenate(outputs)

        return run_split

    def _run_part(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        was_running, self._is_running_part = self._is_running_part, True
        try:
            return forward(*args, **kwargs)
        finally:
            self._is_running_part = was_running


def _iter_tensors(value: Any) -> Any:
    """Yield the tensors with rows in nested arguments."""
    if isinstance(value, Tensor):
        if value.ndim:
            yield value
    elif isinstance(value, Mapping):
        yield from _iter_tensors(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _iter_tensors(element)


def _take_rows(value: Any, rows: int, part: slice) -> Any:
    """Return nested arguments with the rows of a part; tensors of another length are kept whole."""
    if isinstance(value, Tensor):
        return value[part] if value.ndim and len(value) == rows else value
    if isinstance(value, dict):
        return {name: _take_rows(element, rows, part) for name, element in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_take_rows(element, rows, part) for element in value)
    return value


def _concatenate(outputs: list[Any]) -> Any:
    """Concatenate the outputs of parts by rows; drop outputs without rows, such as a cache."""
    first = outputs[0]
    if isinstance(first, Tensor):
        return torch.cat(outputs)
    if isinstance(first, Mapping):  # a transformers `ModelOutput`
        fields = {name: _concatenate([output[name] for output in outputs]) for name in first}
        return type(first)(**fields)
    if isinstance(first, tuple):
        return tuple(_concatenate(list(elements)) for elements in zip(*outputs, strict=True))
    return None
