"""HTML and SVG as text in which nothing from outside can become markup."""

import html

from geojax.cli.escaping import escaped


class Markup(str):
    """Text of HTML or SVG; every other text is escaped where it becomes part of an element."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: object) -> Markup:
    """Return an element.

    Args:
        name: of the element.
        children: markup, or text, which is escaped.
        attributes: values by name, which are escaped; `class_` is class, and an underscore stands
            for a hyphen. None is left out.
    """
    words = [name]
    for attribute, value in attributes.items():
        if value is not None:
            key = attribute.rstrip("_").replace("_", "-")
            words.append(f'{key}="{_escaped(_number(value))}"')
    content = "".join(map(markup, children))
    return Markup(f"<{' '.join(words)}>{content}</{name}>")


def markup(text: str) -> Markup:
    """Escape text; markup stays."""
    return text if isinstance(text, Markup) else Markup(_escaped(text))


def _escaped(text: str) -> str:
    """Escape the characters of markup, and those that nobody sees, as marks of direction."""
    return html.escape(escaped(text))


def _number(value: object) -> str:
    """Return an attribute's value; coordinates have a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def joined(*parts: str) -> Markup:
    """Return elements and text next to each other."""
    return Markup("".join(map(markup, parts)))
