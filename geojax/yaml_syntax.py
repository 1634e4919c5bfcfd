"""YAML of configs: safe, without repeated keys, with 1e-3 as a number, and of a bounded size.

A document holds what JSON can: mappings, lists, text, numbers, true, false and null. Everything
else is a `YamlError`: other tags (`!!set`, `!!binary`), a tag that does not suit its value, and a
document that would take PyYAML long or expand to much more than its text.
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

MOST_BYTES = 1 << 19
"""Size of the largest document that is read."""
MOST_VALUES = 30_000
"""Most keys and values of a document, those of an alias counted wherever it stands."""
MOST_LEVELS = 50
"""Most levels of mappings and lists in each other."""

_MOST_BITS = 64
_WRONG_VALUE = (ValueError, LookupError, AttributeError, TypeError, OverflowError)
"""Errors of PyYAML's constructors, and of Python's under them, for a value that is none."""


class YamlError(ValueError):
    """Error for text that is not such YAML."""

    def __init__(self, problem: str, line: int | None):
        super().__init__(problem)
        self.line = line
        """Line of the error from 1; None if it is unknown."""


class Document(NamedTuple):
    """The content of a YAML text, and where its parts stand."""

    content: Any
    lines: dict[tuple[str, ...], int]
    """Line, from 1, of each key and list item, by the keys and indices on the way to it."""


def parse(text: str, most_bytes: int = MOST_BYTES) -> Any:
    """Parse the YAML `text` of up to `most_bytes` characters.

    Raises:
        YamlError: see `parse_document`.
    """
    return parse_document(text, most_bytes).content


def parse_document(text: str, most_bytes: int = MOST_BYTES) -> Document:
    """Parse the YAML `text` of up to `most_bytes` characters, and note the lines of its keys.

    Raises:
        YamlError: it is not YAML, gives a key twice, is too large or nested too deeply, or holds
            text that is none: NUL or half of a surrogate pair.
    """
    if len(text) > most_bytes:
        raise YamlError(f"{len(text):,} characters are too many; up to {most_bytes:,} would do", 1)
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:  # a control character
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(str(error).splitlines()[0], line) from None
    try:
        node = loader.get_single_node()
        if node is None:
            return Document(None, {})
        content = loader.construct_document(node)
        return Document(content, dict(_lines(node, ())))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        parts = (getattr(error, name, None) for name in ("context", "problem"))
        problem = ", ".join(filter(None, parts)) or str(error).splitlines()[0]
        raise YamlError(problem, mark.line + 1 if mark else None) from None
    except _WRONG_VALUE as error:  # an escape such as \U00110000
        raise YamlError(str(error), loader.line + 1) from None


def _lines(node: yaml.Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the line of each part of a node that was constructed, so that merge keys are resolved.

    The loader has bounded the levels and the number of parts, those of aliases included.
    """
    parts: list[tuple[str, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        parts = [(key.value, key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        parts = [(str(index), item, item) for index, item in enumerate(node.value)]
    for name, start, value in parts:
        below = (*path, name)
        yield below, start.start_mark.line + 1
        yield from _lines(value, below)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with limits, and with errors in place of its own tracebacks."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._levels = 0
        self._values = 0
        self._values_below: dict[int, int] = {}  # of each finished node, by its identity

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        alias = isinstance(event, yaml.AliasEvent)
        before = self._values
        self._levels += 1
        self._values += 1
        self._check_size(event.start_mark)
        node = super().compose_node(parent, index)
        self._levels -= 1
        if node is None:
            return None
        if alias:
            if id(node) not in self._values_below:
                raise yaml.composer.ComposerError(
                    None, None, f"the alias '*{event.anchor}' stands for itself", event.start_mark
                )
            self._values += self._values_below[id(node)]
            self._check_size(event.start_mark)
        else:
            self._values_below[id(node)] = self._values - before
        return node

    def _check_size(self, mark: Any) -> None:
        """Raise an error at `mark` if the document has grown beyond its limits."""
        problem = None
        if self._levels > MOST_LEVELS:
            problem = f"more than {MOST_LEVELS} levels of mappings and lists in each other"
        elif self._values > MOST_VALUES:
            problem = f"more than {MOST_VALUES:,} keys and values, those of aliases included"
        if problem is not None:
            raise yaml.composer.ComposerError(None, None, problem, mark)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except _WRONG_VALUE:
            kind = node.tag.rpartition(":")[2]
            problem = f"{_shortened(node.value)} is no valid {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None
        if isinstance(value, str) and _NO_TEXT.search(value):
            problem = f"{_shortened(value)} holds a character that is no text"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            problem = f"{_shortened(node.value)} is beyond what {_MOST_BITS} bits hold"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):  # PyYAML looks for merge keys before it checks
            problem = "expected a mapping of keys, but found none"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key '{key.value}' is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def refuse_tag(self, node: yaml.Node) -> None:
        """Raise the error for a tag that is none of JSON's types."""
        tag = node.tag.replace(_CORE, "!!")
        problem = f"the tag {_shortened(tag)} is none of {', '.join(_TAGS)}; leave it out"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_NO_TEXT = re.compile("[\0\ud800-\udfff]")

_CORE = "tag:yaml.org,2002:"
_TAGS = ("!!map", "!!seq", "!!str", "!!int", "!!float", "!!bool", "!!null")
_Loader.yaml_constructors = {
    tag: constructor
    for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
    if tag is not None and tag.replace(_CORE, "!!") in _TAGS
} | {None: _Loader.refuse_tag}

# A date stays text, and so does a lone =, the "default value" of YAML 1.1.
_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.removeprefix(_CORE) not in ("timestamp", "value")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
# YAML 1.1, which PyYAML follows, takes 1e-3 for a string because it has no dot.
_NUMBER = re.compile(r"^[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))


def one_line(value: Any) -> str:
    """Write a value as YAML on one line."""
    text: str = yaml.dump(value, None, Dumper, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


# mypy takes no class that is chosen at run time for a base.
class Dumper(yaml.CSafeDumper if yaml.__with_libyaml__ else yaml.SafeDumper):  # type: ignore[misc]
    """PyYAML's safe dumper, which quotes text that `parse` would take for a number."""


Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
