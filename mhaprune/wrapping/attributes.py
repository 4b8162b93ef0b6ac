"""Put the attributes of a model back as they were before a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

HELD = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)}
"""Names of the dictionaries that every module has, most of them empty: tensors, children, hooks."""


@contextmanager
def without_results(model: nn.Module) -> Iterator[None]:
    """Put back at the end what calls in this context leave in attributes of modules and hangs on a graph, such as
    attention weights. A model with such an attribute cannot be copied."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    lists = [(value, value.copy()) for _, held in before for value in held.values() if type(value) is list]
    try:
        yield
    finally:
        for now, held in before:
            new = [(name, value) for name, value in now.items() if held.get(name, HELD) is not value]
            for name in [name for name, value in new if name not in HELD and _is_result(value)]:
                now.pop(name)
                now |= {name: held[name]} if name in held else {}
        for value, items in lists:
            if _is_result(value):
                value[:] = items


def _is_result(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_leaf
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return any(map(_is_result, parts))
