from __future__ import annotations

import pytest
import torch

from mhaprune.data import Vocabulary
from mhaprune.settings.refusals import one_line


def raised_by(*arguments: object) -> str:
    with pytest.raises((TypeError, RuntimeError)) as error:
        torch.ones(*arguments)  # type: ignore[call-overload]
    return one_line(error.value)


def test_an_unexpected_error_says_where_it_is_and_not_in_which_library() -> None:
    line = raised_by.__code__.co_firstlineno + 2
    assert raised_by("two").endswith(f", in settings/test_refusals.py line {line} (HYDRA_FULL_ERROR=1 shows all)")
    with pytest.raises(TypeError) as inside:
        Vocabulary(("1",)).decode(3)  # type: ignore[arg-type]
    assert ", in mhaprune/data.py line " in one_line(inside.value)


def test_a_refused_value_needs_no_place() -> None:
    with pytest.raises(ValueError, match="symbol") as refused:
        Vocabulary(("1",)).encode(["2"])
    assert "line" not in one_line(refused.value)
