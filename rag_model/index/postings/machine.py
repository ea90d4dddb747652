"""What a processor does at once and numba has no word for: a word of eight bytes at any byte, the bits of a number."""

from collections.abc import Callable
from typing import Any

from rag_model.extras import require

_numba = require("numba", extra="text")
_ir = require("llvmlite.ir", extra="text")
_WORD = _ir.IntType(64)


def _instruction(function: Callable[..., Any]) -> Any:
    """Return a function that compiled code may call; it says its types and generates its machine code."""
    return require("numba.extending", extra="text").intrinsic(function)


def _place(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    first = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(first, [at]), _WORD.as_pointer())


@_instruction
def load64(_: Any, data: Any, at: Any) -> Any:
    """Return data[at:at + 8] as a uint64, the lowest byte first; `data` is uint8 and has these bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_place(context, builder, signature.args[0], *arguments), align=1)

    return _numba.types.uint64(data, _numba.types.int64), generate


@_instruction
def store64(_: Any, out: Any, at: Any, word: Any) -> Any:
    """Write a uint64 to out[at:at + 8], the lowest byte first; `out` is uint8 and has these bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _place(context, builder, signature.args[0], *arguments[:2]), align=1)
        return context.get_dummy_value()

    return _numba.types.void(out, _numba.types.int64, _numba.types.uint64), generate


@_instruction
def bit_length(_: Any, value: Any) -> Any:
    """Return how many bits an int64 >= 0 has: 0 of 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sub(_WORD(64), builder.ctlz(arguments[0], _ir.IntType(1)(0)))

    return _numba.types.int64(_numba.types.int64), generate
