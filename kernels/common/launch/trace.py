"""A call traced with a number of rows that is not known: what it queues as a function of rows and addresses.

A variant is run once with a `Number` in place of its rows and of its operands' addresses. What it computes of them is
written down as a line of Python; what it decides by them is written down as a guard, the outcome of the comparison. So
is the value, wherever something takes a number as it is: `range`, an index of a tensor, `int`, a text. The function
that comes of it gives what the variant would have for all rows and addresses that pass its guards, for others None:

    def traced(m, new, A, B):
        n0 = A.data_ptr()
        n1 = -m
        n2 = n1 // 2
        if not n2 < 0: return None
        ...
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_NAME = re.compile(r"[a-z]\w*")


class Untraceable(AttributeError):
    """A variant asked what a trace does not know."""


class Traced:
    """A value of a traced call.

    Args:
        text: what it is in the function.
        value: what it is in the call that is traced.
    """

    __slots__ = ("text", "value")

    def __init__(self, text: str, value: Any) -> None:
        self.text = text
        self.value = value


class Several(Traced):
    """Values that stand beside each other in a tuple."""


class Source(NamedTuple):
    """A function that was written, and what stands in it by name; compiled, in a millisecond, when it is needed."""

    text: str
    constants: dict[str, Any]

    def compiled(self) -> Callable[..., Any]:
        """Return the function."""
        names = dict(self.constants)
        exec(compile(self.text, "<a traced call>", "exec"), names)
        function: Callable[..., Any] = names["traced"]
        return function


class Trace:
    """The function that is written while a call is traced.

    Attributes:
        arguments: what it takes, by name.
    """

    def __init__(self) -> None:
        self.arguments: list[str] = []
        self._lines: dict[str, Traced | None] = {}  # with what each names; of guards nothing
        self._constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # of constants, by identity
        self._is_open = True

    def argument(self, name: str, value: Any) -> Traced:
        """Return an argument of the function; a number, if the value is one."""
        self.arguments.append(name)
        return Number(self, name, value) if type(value) is int else Traced(name, value)

    def computed(self, text: str, value: Any) -> Any:
        """Return what an expression gives, and here gave: a `Number`, if that is one; computed once."""
        assert self._is_open, f"{text} is asked for behind the trace"
        found = self._lines.get(text)
        if found is None:
            name = f"n{len(self._lines)}"
            is_number = isinstance(value, (int, float))
            found = self._lines[text] = Number(self, name, value) if is_number else Traced(name, value)
        return found

    def guard(self, text: str, outcome: bool) -> bool:
        """Have the function give None where a condition has another outcome, and return this one."""
        condition = text if outcome else f"not {text}"
        assert self._is_open, f"{text} is decided behind the trace"
        self._lines.setdefault(condition, None)
        return outcome

    def text(self, tree: Any) -> str:
        """Return the expression of a value, or of tuples of them."""
        if isinstance(tree, Traced):
            assert getattr(tree, "_trace", self) is self, "a number of another trace"
            return tree.text
        if isinstance(tree, tuple) and is_traced(tree):
            return f"({''.join([f'{self.text(one)}, ' for one in tree])})"
        is_literal = type(tree) is int or (type(tree) is float and math.isfinite(tree))
        return repr(tree) if is_literal else self._constant(tree)

    def _constant(self, value: Any) -> str:
        name = self._names.setdefault(id(value), f"c{len(self._names)}")
        self._constants[name] = value  # which keeps it, and so its identity
        return name

    def source(self, result: Any) -> Source:
        """Return the function, which gives a result; neither keeps what was traced.

        What can be decided without new memory comes before that is asked for.
        """
        early: list[str] = []
        late: list[str] = []
        names = {"new"}
        for text, named in self._lines.items():
            is_late = not names.isdisjoint(_NAME.findall(text))
            line = f"if not ({text}): return None" if named is None else f"{named.text} = {text}"
            (late if is_late else early).append(line)
            if is_late and named is not None:
                names.add(named.text)
        head = f"def traced({', '.join(self.arguments)}):"
        return Source("\n    ".join([head, *early, *late, f"return {self.text(result)}"]), self._constants)

    def close(self) -> None:
        """End the trace: no number may be used any more, and no tensor is kept."""
        self._is_open = False
        self._lines.clear()
        self._constants = {}


def value_of(tree: Any) -> Any:
    """Return what a value is, or tuples of them are, in the call that is traced."""
    if isinstance(tree, Traced):
        return tree.value
    if isinstance(tree, tuple):
        found: list[Any] = []
        for one in tree:
            found += value_of(one) if isinstance(one, Several) else (value_of(one),)
        return tuple(found)
    return tree


def is_traced(tree: Any) -> bool:
    """Whether anything in tuples depends on rows or addresses."""
    return isinstance(tree, Traced) or (isinstance(tree, tuple) and any(map(is_traced, tree)))


def fixed(tree: Any) -> Any:
    """Return tuples with the values of numbers, on which the trace then relies."""
    if isinstance(tree, Number):
        return tree.fixed()
    if isinstance(tree, tuple) and is_traced(tree):
        return tuple_like(tree, [fixed(one) for one in tree])
    return tree


def tuple_like(tree: tuple[Any, ...], parts: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of other parts, named as those of this one are."""
    return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)


class Number(Traced):
    """A number that depends on the rows or addresses of a call; what is computed of it does, too."""

    __slots__ = ("_trace",)

    def __init__(self, trace: Trace, text: str, value: Any) -> None:
        super().__init__(text, value)
        self._trace = trace

    def fixed(self) -> Any:
        """Return its value, on which the trace relies from now on."""
        self._trace.guard(f"{self.text} == {self.value!r}", True)
        return self.value

    def apply(self, function: Callable[[Any], Any]) -> Any:
        """Return what a function gives for it."""
        return self._trace.computed(f"{self._trace.text(function)}({self.text})", function(self.value))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), _: Any = None) -> Any:
        """Compute `torch.sym_max`, where `max` would decide which is more."""
        if function is not torch.sym_max:
            raise Untraceable(f"{function} takes a number that is there; a call is being traced")
        trace = next(one for one in arguments if isinstance(one, Number))._trace
        return trace.computed(f"max{trace.text(arguments)}", max(map(_value, arguments)))

    __index__ = __int__ = fixed

    def __float__(self) -> float:
        return float(self.fixed())

    def __hash__(self) -> int:
        raise Untraceable("a traced number is no key: what is kept by it would be of another trace; give int(number)")

    def __repr__(self) -> str:
        return repr(self.fixed())

    def __format__(self, how: str) -> str:
        return format(self.fixed(), how)

    def __bool__(self) -> bool:
        return self._trace.guard(self.text, bool(self.value))

    def __neg__(self) -> Any:
        return self._trace.computed(f"-{self.text}", -self.value)

    def __ceil__(self) -> Any:
        return self.apply(math.ceil)

    def __floor__(self) -> Any:
        return self.apply(math.floor)


_CHANGE_NOTHING = (("+", 0), ("-", 0), ("*", 1))  # strides and offsets of many views


def _operation(symbol: str, function: Callable[[Any, Any], Any], *, is_reflected: bool = False) -> Any:
    def operation(self: Number, other: Any) -> Any:
        if not isinstance(other, (int, float, Number)):
            return NotImplemented
        left, right = (other, self) if is_reflected else (self, other)
        if type(other) is int and (symbol, other) in _CHANGE_NOTHING:
            return -self if is_reflected and symbol == "-" else self
        if type(other) is int and (symbol, other) == ("*", 0):
            return 0
        text = f"{self._trace.text(left)} {symbol} {self._trace.text(right)}"
        return self._trace.computed(text, function(_value(left), _value(right)))

    return operation


def _comparison(symbol: str, function: Callable[[Any, Any], bool]) -> Any:
    def comparison(self: Number, other: Any) -> Any:
        if not isinstance(other, (int, float, Number)):
            return NotImplemented
        if other is self:
            return function(self.value, self.value)
        return self._trace.guard(f"{self.text} {symbol} {self._trace.text(other)}", function(self.value, _value(other)))

    return comparison


def _value(number: Any) -> Any:
    return number.value if isinstance(number, Number) else number


for _name, _symbol in {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "truediv": "/", "mod": "%"}.items():
    setattr(Number, f"__{_name}__", _operation(_symbol, getattr(operator, _name)))
    setattr(Number, f"__r{_name}__", _operation(_symbol, getattr(operator, _name), is_reflected=True))
for _name, _symbol in {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}.items():
    setattr(Number, f"__{_name}__", _comparison(_symbol, getattr(operator, _name)))
