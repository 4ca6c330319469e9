"""What a session checks before it lets a compiler's runtime touch memory: names, element types, shapes."""

from collections.abc import Mapping, Sequence

import numpy as np

from trtdiff.errors import UsageError
from trtdiff.types import Array, TensorSpec

_REMEMBERED = 4096


class Contract:
    """The tensors a call needs. Checks cost microseconds: a combination of shapes that passed once is remembered."""

    def __init__(self, specs: Sequence[TensorSpec], *, where: str, contiguous: bool = False) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._types = {spec.name: np.dtype(spec.dtype) for spec in specs}
        self._where = where
        self._contiguous = contiguous
        self._passed: set[tuple[tuple[int, ...], ...]] = set()

    def check(self, arrays: Mapping[str, Array]) -> None:
        """Raise UsageError, naming the tensor, what is wrong with it and what it should be."""
        if arrays.keys() != self._specs.keys():
            raise self._names_differ(arrays)
        for name, dtype in self._types.items():
            array = arrays[name]
            if array.dtype != dtype:
                raise UsageError(f"{name} is {array.dtype}, the engine takes {dtype}", where=self._where)
            if self._contiguous and not array.flags.c_contiguous:
                raise UsageError(f"{name} is not contiguous in memory", where=self._where,
                                 hint="take buffers from allocate(); slice along the first dimension")  # fmt: skip
        shapes = tuple([arrays[name].shape for name in self._specs])
        if shapes not in self._passed:
            self._check_shapes(arrays)
            if len(self._passed) < _REMEMBERED:
                self._passed.add(shapes)

    def _names_differ(self, arrays: Mapping[str, Array]) -> UsageError:
        missing, unknown = self._specs.keys() - arrays.keys(), arrays.keys() - self._specs.keys()
        parts = [
            f"{word} {', '.join(sorted(names))}"
            for word, names in (("missing:", missing), ("unknown:", unknown))
            if names
        ]
        return UsageError(f"these are not the engine's tensors; {'; '.join(parts)}", where=self._where,
                          hint=f"it has {', '.join(self._specs)}")  # fmt: skip

    def _check_shapes(self, arrays: Mapping[str, Array]) -> None:
        """Every symbolic dimension must have one size throughout; `height/8` of 64 and `height` of 512 agree."""
        seen: dict[str, tuple[int, str]] = {}
        for name, spec in self._specs.items():
            shape = arrays[name].shape
            if len(shape) != len(spec.dims):
                raise UsageError(f"{name} has shape {list(shape)}, the engine takes {spec}", where=self._where)
            for axis, (dim, size) in enumerate(zip(spec.dims, shape, strict=True)):
                if isinstance(dim, int):
                    if dim != size:
                        raise UsageError(f"{name} has shape {list(shape)}, the engine takes {spec}", where=self._where,
                                         hint=f"dimension {axis} must be {dim}")  # fmt: skip
                    continue
                symbol, _, divisor = dim.partition("/")
                value = size * int(divisor or 1)
                before, holder = seen.setdefault(symbol, (value, name))
                if before != value and symbol != "?":
                    raise UsageError(f"{name} has shape {list(shape)}: {symbol} is {value}, but {before} in {holder}",
                                     where=self._where, hint=f"the engine takes {spec}")  # fmt: skip
