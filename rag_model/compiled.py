"""Decorators that compile loops with numba, and instructions that numba does not provide.

A function is compiled when it is first called. The machine code is cached next to the sources, or
in the user's cache, until the function's own file changes. After a change of a function that
another file calls, run `make clean-compiled`.
"""

from collections.abc import Callable
from typing import Any

from rag_model.extras import hide_modules, require


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function to code that releases the GIL and divides by zero as numpy does.

    If no cache folder is writable, as in a container with a read-only disk, each process compiles
    again.
    """
    return _compile(function, {})


def bare(function: Callable[..., Any]) -> Any:
    """Compile a function that allocates no arrays; its array arguments get no reference counts.

    Updating these counts takes five nanoseconds per array and call, which is most of the time of a
    function on a short list.
    """
    return _compile(function, {"_nrt": False})


def inlined(function: Callable[..., Any]) -> Any:
    """Compile a function like `bare`, and inline it into its callers.

    A call that is not inlined passes each array as seven numbers. For a short list, passing them
    takes most of a call's time.
    """
    return _compile(function, {"_nrt": False, "forceinline": True})


def _compile(function: Callable[..., Any], settings: dict[str, Any]) -> Any:
    compiler = require("numba", extra="text").njit
    try:
        dispatcher = compiler(function, cache=True, nogil=True, error_model="numpy", **settings)
    except RuntimeError:
        dispatcher = compiler(function, nogil=True, error_model="numpy", **settings)
    resolve_call = dispatcher.get_call_template

    def resolve_without_constants(arguments: Any, keywords: Any) -> Any:
        unliteral = _numba.types.unliteral
        return resolve_call([unliteral(argument) for argument in arguments], keywords)

    # If compiled code calls the function with constants, numba would compile a version for each
    # constant, even for the first value of a loop variable. That takes an eighth of the compile
    # time and makes nothing faster, because LLVM uses the constants when it inlines the function.
    dispatcher.get_call_template = resolve_without_constants
    return dispatcher


_numba = require("numba", extra="text")
# numba imports SciPy's linear algebra, if installed, when it compiles the first function. This
# import takes a quarter of the time of that compilation, and no compiled loop needs it. It can
# still be imported later.
with hide_modules("scipy.linalg"):
    require("numba.np.arraymath", extra="text")
_ir = require("llvmlite.ir", extra="text")
_WORD = _ir.IntType(64)


def _create_intrinsic(function: Callable[..., Any]) -> Any:
    """Return an intrinsic for compiled code.

    `function` returns the types of the intrinsic, and a function that generates its machine code.
    """
    return require("numba.extending", extra="text").intrinsic(function)


def _get_word_pointer(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data_pointer = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data_pointer, [offset]), _WORD.as_pointer())


@_create_intrinsic
def load64(_: Any, data: Any, at: Any) -> Any:
    """Return data[at:at + 8] as a little-endian uint64.

    `data` is uint8, and bounds are not checked.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_get_word_pointer(context, builder, signature.args[0], *arguments), align=1)

    return _numba.types.uint64(data, _numba.types.int64), generate


@_create_intrinsic
def store64(_: Any, out: Any, at: Any, word: Any) -> Any:
    """Write a uint64 to out[at:at + 8], little-endian.

    `out` is uint8, and bounds are not checked.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _get_word_pointer(context, builder, signature.args[0], *arguments[:2]), align=1)
        return context.get_dummy_value()

    return _numba.types.void(out, _numba.types.int64, _numba.types.uint64), generate


@_create_intrinsic
def bit_length(_: Any, value: Any) -> Any:
    """Return the number of bits of an int64 >= 0 without its leading zeros; 0 for the number 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sub(_WORD(64), builder.ctlz(arguments[0], _ir.IntType(1)(0)))

    return _numba.types.int64(_numba.types.int64), generate
