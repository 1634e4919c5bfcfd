"""Characters that a terminal would obey, or not show, as escapes."""

SPACE = "·"
"""Mark of a space, where each one matters."""


def escaped(text: str) -> str:
    """Escape line ends, control characters and marks of direction, as Python writes them."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def escaped_visibly(text: str) -> str:
    """Escape a text so that no two look the same: spaces are marked, backslashes are doubled."""
    plain = text.replace("\\", "\\\\").replace(SPACE, f"\\x{ord(SPACE):x}")
    return escaped(plain.replace(" ", SPACE))
