"""What goes between `launch` and its ranks: a function and its arguments, and what came of them, pickled.

Only processes that one started hold the pipe's other end.
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.runtime.errors import InterpreterError

from ..utils.user_lines import describe_error, user_lines


class _Pickler(pickle.Pickler):
    """Takes of a tensor what it shows: a view of the peers' heaps has all of them for its storage."""

    def reducer_override(self, what: Any) -> Any:
        is_part = type(what) is torch.Tensor and what.layout is torch.strided and not what.requires_grad
        if is_part and what.untyped_storage().nbytes() > what.nbytes:
            return what.clone(memory_format=torch.contiguous_format).__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        return NotImplemented


def pickle_call(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Return a call as a rank takes it.

    Raises:
        ValueError: it cannot be pickled.
    """
    try:
        return pickle.dumps((fn, tuple(args)))
    except Exception as error:
        raise ValueError(
            f"{fn!r} with these arguments cannot be sent to the ranks, which are processes of their own: {error}; a "
            "function must be importable by name, from a module or a script's top level, and what it takes picklable"
        ) from error


def pickle_result(result: Any) -> bytes:
    """Return that a call has succeeded, and its result.

    Raises:
        ValueError: it cannot be pickled.
    """
    pickled = io.BytesIO()
    try:
        _Pickler(pickled).dump((True, result))
    except Exception as error:
        raise ValueError(f"a rank returned what cannot be sent, a {type(result).__name__}: {error}") from error
    return pickled.getvalue()


def pickle_error(error: Exception) -> bytes:
    """Return that a call has failed, of what, and where; call this while it is handled."""
    text = traceback.format_exc()
    if isinstance(error, InterpreterError) and error.__suppress_context__:  # which says itself where
        text = "".join(traceback.format_list(user_lines(error)[::-1]))
    try:
        pickled = pickle.dumps(error)
    except Exception:
        pickled = b""
    return pickle.dumps((False, (pickled, describe_error(error), text)))


def unpickle_error(answer: tuple[bytes, str, str]) -> tuple[Exception, str]:
    """Return the error of a call that has failed, and its traceback; a RuntimeError where it cannot be rebuilt here."""
    pickled, description, text = answer
    try:
        error = pickle.loads(pickled)
    except Exception:  # its class may be one that only the rank can import
        error = None
    return error if isinstance(error, Exception) else RuntimeError(description), text
