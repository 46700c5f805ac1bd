"""Weights that a checkpoint holds as integers, handed to an op set that keeps them so.

In blocks (`CodedMatrix`), as GGUF files have them:

    weight[n, k] = factor * scale * (code - offset) + minimum factor * minimum

Scales and minima are small integers, one for each stretch of k; factors are half floats, one for
each span of k. The kinds are those of the blocks of GGUF files; offset, stretch and span belong to
the kind. "int8" has codes q + 128, and of "iq4_nl", "iq4_xs" and "mxfp4" a code stands for a number
of a fixed table instead of for itself; those of "mxfp4" are twice what is meant, so that all are
integers, and a factor is half of a block's power of two. Of the "zero" kinds the minimum is a
group's zero (of 8 bits, less 128) and the minimum factor -factor. "fp8" and "nf4" are codes of
floats as in groups below, with float32 scales as factors; the last span may be shorter.

In groups (`GroupedMatrix`), as GPTQ, AWQ, compressed-tensors, bitsandbytes and MXFP4 have them:

    weight[n, k] = scale[n, k // group] * (code[n, k] - zero[n, k // group])

There are zeros of integers alone. Of the other kinds a code stands for a float: of 8 bits (e4m3),
of 4 bits (e2m1), or of a table of 16.

A matrix may have its k in another order than its inputs, as act-order leaves them: an input
order[k] is then what its k takes.

No torch here: checkpoints are read without it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray


class CodeShape(NamedTuple):
    """k that share a scale, and k that share a factor."""

    stretch: int
    span: int
    has_scales: bool
    has_minima: bool
    has_zeros: bool = False  # minima without factors of their own
    of_floats: bool = False  # codes stand for floats, factors are float32 scales

    @property
    def whole(self) -> int:
        """What k is a multiple of."""
        return GROUP_OF if self.of_floats else self.span


CODE_SHAPES = {
    "int8": CodeShape(32, 32, has_scales=False, has_minima=False),
    "int4": CodeShape(32, 32, has_scales=False, has_minima=True),
    "q5_1": CodeShape(32, 32, has_scales=False, has_minima=True),
    "iq4_nl": CodeShape(32, 32, has_scales=False, has_minima=False),
    "mxfp4": CodeShape(32, 32, has_scales=False, has_minima=False),
    "q2_k": CodeShape(16, 256, has_scales=True, has_minima=True),
    "q3_k": CodeShape(16, 256, has_scales=True, has_minima=False),
    "q4_k": CodeShape(32, 256, has_scales=True, has_minima=True),
    "q5_k": CodeShape(32, 256, has_scales=True, has_minima=True),
    "q6_k": CodeShape(16, 256, has_scales=True, has_minima=False),
    "iq4_xs": CodeShape(32, 256, has_scales=True, has_minima=False),
    "int4_zero": CodeShape(32, 32, has_scales=False, has_minima=False, has_zeros=True),
    "int8_zero": CodeShape(32, 32, has_scales=False, has_minima=False, has_zeros=True),
    "fp8": CodeShape(128, 128, has_scales=False, has_minima=False, of_floats=True),
    "nf4": CodeShape(64, 64, has_scales=False, has_minima=False, of_floats=True),
}


# Of a matrix that another one stands below, the rows are a multiple of so many.
CODED_ROWS = 16


# Of groups that op sets keep, the neighbours are a multiple of so many.
GROUP_OF = 32


# Kinds of codes in groups, and the bits of a code.
GROUP_KINDS = {"int4": 4, "int8": 8, "fp8": 8, "nf4": 4, "mxfp4": 4}


# What codes of "mxfp4" stand for: a sign, two bits of exponent and one of mantissa (OCP e2m1).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_E2M1, *(-value for value in _E2M1))


@dataclass(frozen=True, slots=True)
class Codes:
    """The numbers of some rows, contiguous arrays.

    Args:
        codes: [n, k] uint8. scales, minima: [n, k / stretch] int8 where the kind has them; "int4"
            and "q5_1" have minimum factors alone.
        factors, minimum_factors: [n, k / span] float16; of codes of floats float32.
    """

    codes: NDArray[Any]
    factors: NDArray[Any]
    scales: NDArray[Any] | None = None
    minimum_factors: NDArray[Any] | None = None
    minima: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix [n, k] of one kind, not read yet.

    Args:
        kind: a key of `CODE_SHAPES`.
        read: rows first to last - 1; called in any order.
        order: [k] int32, or None; None for codes of floats.
        table: [16] float32, what the codes of "nf4" stand for; else None.
    """

    kind: str
    n: int
    k: int
    read: Callable[[int, int], Codes]
    order: NDArray[Any] | None = None
    table: NDArray[Any] | None = None

    @property
    def of_floats(self) -> bool:
        return CODE_SHAPES[self.kind].of_floats

    def every(self, step: int, first: int, count: int) -> CodedMatrix:
        """The matrix of so many of its rows: first, first + step, first + 2 step, ..."""

        def read(begin: int, end: int) -> Codes:
            found = self.read(first + step * begin, first + step * (end - 1) + 1)
            given = {field.name: getattr(found, field.name) for field in fields(found)}
            arrays = {name: array for name, array in given.items() if array is not None}
            return Codes(**{name: array[::step].copy() for name, array in arrays.items()})

        return replace(self, n=count, read=read)

    def pieces(self, rows: int) -> Iterator[tuple[int, Codes]]:
        """All rows, so many at a time: the first one's number, and their numbers."""
        for first in range(0, self.n, rows):
            yield first, self.read(first, min(first + rows, self.n))


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """A matrix [n, k] whose codes are not read yet.

    Args:
        kind: a key of `GROUP_KINDS`.
        scales: [n, k / group] float32. zeros: of integers, alike, uint8; else None.
        read: unsigned codes [rows, k] of rows first to last - 1; called in any order.
        order: [k] int32, or None.
        table: [16] float32, what the codes of "nf4" stand for; else None.
    """

    kind: str
    n: int
    k: int
    scales: NDArray[Any]
    zeros: NDArray[Any] | None
    read: Callable[[int, int], NDArray[Any]]
    order: NDArray[Any] | None = None
    table: NDArray[Any] | None = None

    @property
    def bits(self) -> int:
        return GROUP_KINDS[self.kind]

    @property
    def group(self) -> int:
        return self.k // int(self.scales.shape[1])


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [n, k] as matrices one below the other, whose k are in one order."""

    parts: tuple[CodedMatrix, ...]

    @property
    def n(self) -> int:
        return sum(part.n for part in self.parts)

    @property
    def k(self) -> int:
        return self.parts[0].k

    @property
    def order(self) -> NDArray[Any] | None:
        return self.parts[0].order

    def first_rows(self, count: int) -> CodedWeight:
        """The first `count` rows of a weight of one part."""
        (part,) = self.parts
        return CodedWeight((replace(part, n=count),))


def are_in_one_order(matrices: Sequence[CodedMatrix | GroupedMatrix]) -> bool:
    """Whether their k are in the order of the inputs, or all in the same other one."""
    orders = [matrix.order for matrix in matrices if matrix.order is not None]
    alike = all((order == orders[0]).all() for order in orders)
    return alike and len(orders) in (0, len(matrices))
