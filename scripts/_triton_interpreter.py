"""Lets the interpreters of older Triton releases run with newer numpy."""

from __future__ import annotations

from typing import Any

import triton


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
