"""A sandbox for chat templates, which are programs that come with downloaded tokenizers.

Each rendering has an allowance of characters and steps. Everything that a template does is charged
before it is done, by the size of its input and output. Charges apply to output text, turns of
loops, calls, operators, filters, tests, comparisons and methods of strings. The allowance bounds
the memory and the time of a rendering, whatever the template says.
"""

import datetime
import functools
import json
import re
import string
import types
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any, cast

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox

from geojax.data.templates.template_metering import CHARGE, MADE, READ, SEARCHED, TEXT, Metering

_ALLOWANCE = 1 << 26
"""Characters that any rendering may make or read; a step counts as some of them."""
_ALLOWANCE_PER_CHARACTER = 256
"""Further ones for each character of the messages."""
_LARGEST_ALLOWANCE = 1 << 29

_STEP = 64
_ELEMENT = 16
_MOST_BITS = 4096
_LARGEST_NUMBER = 100_000
"""Largest width, count or other number that a filter or a method of a string takes."""
_WIDEST_FIELD = 9999
_COLLECTIONS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_FILTERS_OF_ELEMENTS = _words(
    "attr batch count d default first float int items last length list map random reject rejectattr"
    " reverse round abs select selectattr slice"
)
"""Filters that take at most one look at each element of their value."""
_FILTERS_OF_TEXT = _words(
    "capitalize center dictsort e escape forceescape format groupby indent join lower max min"
    " replace safe sort string sum title tojson trim truncate unique upper wordcount"
)
"""Filters that read all of their value, however deep."""
_COMPARING_TESTS = _words("== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in")
_STRING_METHODS = _words(
    "capitalize casefold center count endswith find index isalnum isalpha isascii isdecimal isdigit"
    " islower isnumeric isspace istitle isupper join ljust lower lstrip partition removeprefix"
    " removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith"
    " strip swapcase title upper zfill"
)
_COLLECTION_METHODS = _words("copy count get index items keys values")


class TemplateLimitError(ValueError):
    """A template would do more than a rendering may."""


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """An environment whose templates have an allowance for each rendering."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def __init__(self, extensions: Iterable[Any] = ()) -> None:
        # What is computed while a template is compiled has no allowance: nothing is.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=list(extensions), optimized=False
        )
        self._allowance = self._left = 0
        self.globals.pop("lipsum")
        self.globals["raise_exception"] = self._raise
        self.globals["strftime_now"] = _now
        known = {**self.filters, "tojson": self._to_json}
        self.filters = {
            name: self._metered_filter(name, known[name])
            for name in _FILTERS_OF_ELEMENTS | _FILTERS_OF_TEXT
        }
        self.filters |= {
            CHARGE: _in_context(self._charge_for),
            MADE: _in_context(self._made),
            READ: _in_context(self._read),
            SEARCHED: _in_context(self._searched),
            TEXT: _in_context(self._text),
        }
        for name in _COMPARING_TESTS:
            self.tests[name] = self._metered_test(cast(Callable[..., Any], self.tests[name]))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return Metering().metered(super()._parse(source, name, filename))

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render a template of this environment.

        Raises:
            TemplateLimitError: it would make or do more than it may.
            Exception: whatever else a template raises.
        """
        self._left = _LARGEST_ALLOWANCE
        size = self._deep_size(variables)
        self._allowance = min(_ALLOWANCE + _ALLOWANCE_PER_CHARACTER * size, _LARGEST_ALLOWANCE)
        self._left = self._allowance
        parts = []
        for part in template.generate(variables):
            self._charge(len(part))
            parts.append(part)
        return "".join(parts)

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Charge an operator, and compute it."""
        if operator == "%" and isinstance(left, str):
            self._charge_percent_format(left, right)
        elif operator == "+":
            self._charge(self._size(left) + self._size(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length()
            self._refuse_unless(
                operator == "%" or bits + right.bit_length() <= _MOST_BITS, "too large a number"
            )
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int):
                    self._charge(self._size(value) * max(times, 0))
        return super().call_binop(context, operator, left, right)

    def call(
        __self,
        __context: jinja2.runtime.Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Charge a call, and do it."""
        __self._charge(_STEP)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
            __self._charge_string_method(owner, name, args)
        elif isinstance(owner, jinja2.runtime.LoopContext):
            __self._charge(__self._deep_size(args))
        elif isinstance(__obj, types.BuiltinMethodType):
            known = isinstance(owner, dict | list | tuple) and name in _COLLECTION_METHODS
            __self._refuse_unless(known, f"the method {name}")
            deep = name in ("count", "index")
            __self._charge(__self._deep_size(owner) if deep else __self._size(owner))
        else:
            __self._charge(sum(map(__self._size, args)))
        return __self._made(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Charge `str.format`, which the sandbox itself makes safe."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*arguments: Any, **named: Any) -> str:
            self._charge_format(value.__self__, (arguments, named))
            return wrapped(*arguments, **named)

        return bounded

    def _charge(self, amount: int) -> None:
        self._left -= amount
        if self._left < 0:
            raise TemplateLimitError(
                f"it makes or does more than the {self._allowance:,} characters and steps that a "
                "conversation of this size may take"
            )

    def _refuse_unless(self, condition: bool, what: str) -> None:
        if not condition:
            raise TemplateLimitError(f"{what} is not allowed in a chat template")

    def _size(self, value: Any) -> int:
        """Measure a value without what its elements hold."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, list | tuple | set | dict):
            return _ELEMENT * (1 + len(value))
        if isinstance(value, range):
            return len(value)
        return value.bit_length() // 8 if isinstance(value, int) else 0

    def _deep_size(self, value: Any, for_each: int = 0, for_depth: int = 0) -> int:
        """Measure a value with all that it holds, as often as it holds it, up to what is left.

        Args:
            value: the value.
            for_each: added for each value in it.
            for_depth: added for each value in it as often as it is deep.
        """
        total, stack = 0, [(value, 0)]
        while stack and total <= self._left:
            item, depth = stack.pop()
            total += _ELEMENT + for_each + for_depth * depth + self._size(item)
            if isinstance(item, jinja2.runtime.Namespace):
                stack.append((object.__getattribute__(item, "_Namespace__attrs"), depth + 1))
            elif isinstance(item, Mapping):
                stack += [(part, depth + 1) for pair in item.items() for part in pair]
            elif isinstance(item, _COLLECTIONS):
                if total + _ELEMENT * len(item) > self._left:
                    return total + _ELEMENT * len(item)
                stack += [(part, depth + 1) for part in item]
        return total

    def _charge_for(self, amount: int) -> int:
        self._charge(_STEP + amount)
        return amount

    def _made(self, value: Any) -> Any:
        self._charge(self._size(value))
        return value

    def _read(self, value: Any) -> Any:
        self._charge(self._deep_size(value))
        return value

    def _searched(self, value: Any) -> Any:
        self._charge(_ELEMENT if isinstance(value, Mapping) else self._deep_size(value))
        return value

    def _text(self, value: Any) -> Any:
        self._charge(self._deep_size(value))
        return value if isinstance(value, str | jinja2.Undefined) else self._made(str(value))

    def _raise(self, message: Any) -> None:
        raise jinja2.TemplateError(str(self._text(message)))

    def _to_json(
        self, value: Any, indent: int | str | None = None, ensure_ascii: bool = False, **other: Any
    ) -> str:
        width = len(indent) if isinstance(indent, str) else indent or 0
        marks = self._deep_size(other)
        self._charge(self._deep_size(value, for_each=marks + width, for_depth=width))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **other)

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 0 if getattr(function, "jinja_pass_arg", None) is None else 1

        @functools.wraps(function)
        def metered(*arguments: Any, **named: Any) -> Any:
            before, (value, *further) = arguments[:first], arguments[first:]
            self._charge(_STEP)
            self._charge_numbers([*further, *named.values()])
            self._charge(self._deep_size([*further, *named.values()]))
            if name == "join":
                value = list(value)
                separator = named.get("d", further[0] if further else "")
                self._charge(len(value) * self._deep_size(separator))
            elif name == "sum":
                start = named.get("start", further[1] if len(further) > 1 else 0)
                self._refuse_unless(isinstance(start, int | float), "a sum of other than numbers")
            elif name == "format":
                self._charge_percent_format(str(self._text(value)), (further, named))
            elif name == "replace":
                self._charge_replace(str(self._text(value)), *further[:2])
            elif name == "indent":
                width = named.get("width", further[0] if further else 4)
                columns = width if isinstance(width, int) else len(width)
                self._charge((str(self._text(value)).count("\n") + 1) * columns)
            times = 6 if name in ("e", "escape", "forceescape") else 1
            is_shallow = name in _FILTERS_OF_ELEMENTS
            self._charge(times * (self._size if is_shallow else self._deep_size)(value))
            return self._made(function(*before, value, *further, **named))

        return metered

    def _metered_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def metered(*arguments: Any) -> Any:
            for value in arguments:
                self._searched(value)
            return function(*arguments)

        return metered

    def _charge_numbers(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, int):
                self._refuse_unless(
                    abs(value) <= _LARGEST_NUMBER, f"a number beyond {_LARGEST_NUMBER:,}"
                )
                self._charge(abs(value))

    def _charge_string_method(self, text: str, name: str, arguments: tuple[Any, ...]) -> None:
        """Charge a method of a string; that of `format` is charged where it is wrapped."""
        self._refuse_unless(name in _STRING_METHODS, f"the method {name}")
        self._charge_numbers(arguments)
        self._charge(len(text) + self._deep_size(arguments))
        if name == "join" and arguments:
            self._charge(len(text) * len(arguments[0]))
        elif name == "replace":
            self._charge_replace(text, *arguments[:2])

    def _charge_replace(self, text: str, old: Any = "", new: Any = "") -> None:
        if isinstance(old, str) and isinstance(new, str):
            self._charge(text.count(old) * len(new))

    def _charge_percent_format(self, text: str, values: Any) -> None:
        """Charge `text % values`, each of whose fields may hold all of them."""
        self._refuse_unless(
            re.search(r"[%)][#0\- +\d.]*\*", text) is None, "a width that is an argument"
        )
        self._charge_fields(text, text.count("%"), values)

    def _charge_format(self, text: str, values: Any) -> None:
        """Charge `text.format(values)`, each of whose fields may hold all of them."""
        specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(text)]
        self._refuse_unless(not any("{" in spec for spec in specs), "a width that is an argument")
        self._charge_fields(text, len(specs), values)

    def _charge_fields(self, text: str, fields: int, values: Any) -> None:
        widest = max((int(number[:9]) for number in re.findall(r"\d+", text)), default=0)
        self._refuse_unless(widest <= _WIDEST_FIELD, f"a number beyond {_WIDEST_FIELD:,}")
        self._charge(len(text) + fields * (widest + self._deep_size(values)))


def _in_context(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """Make a filter that is never computed while a template is compiled."""

    @jinja2.pass_context
    def with_context(context: jinja2.runtime.Context, value: Any) -> Any:
        return function(value)

    return with_context


def _now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
