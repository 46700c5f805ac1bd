"""What Triton's interpreter needs to stand for a GPU."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import triton

if TYPE_CHECKING:
    from collections.abc import Iterator


def patch_loop_bounds() -> None:
    """Before 3.9 a loop's bound is made by `int()` of a one-element array, which numpy 2.4
    refuses."""
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        return
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched


@contextmanager
def products_rounded_once() -> Iterator[None]:
    """In the block an element of a product does not depend on where it stands in its tile: numpy's
    library adds in an order of its own at a tile's edges, on some processors."""
    product = np.matmul

    def rounded(a: Any, b: Any, dtype: Any) -> Any:
        return product(a, b, dtype=np.float64).astype(dtype)

    with patch("triton.runtime.interpreter.np.matmul", rounded):
        yield
