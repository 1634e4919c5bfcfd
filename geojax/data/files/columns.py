"""The columns of a source's records, which say whether they are documents or conversations."""

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from geojax.data.files.records import ColumnType, Record
from geojax.errors import UserError

Form = Literal["text", "openai", "sharegpt", "alpaca"]
"""The form of a record: a document's text, or a conversation as others write it."""

_MOST_NAMES = 6
_SHOWN = 40

_TEXT = "text"
_USUAL_FORMS: dict[str, Form] = {"messages": "openai", "conversations": "sharegpt"}
_KEYS: dict[Form, frozenset[str]] = {
    "openai": frozenset({"role", "content"}),
    "sharegpt": frozenset({"from", "value"}),
}
_ALPACA = ("instruction", "output")
_OPTIONAL: dict[Form, tuple[str, ...]] = {
    "openai": ("tools",),
    "sharegpt": ("system", "tools"),
    "alpaca": ("input", "system", "history"),
}


class Columns(NamedTuple):
    """The columns that a source reads of each record."""

    form: Form
    names: tuple[str, ...]
    """Columns that every record has; the first is the text or the conversation."""
    optional: tuple[str, ...] = ()
    """Columns that are read where a record has them."""

    @property
    def are_conversations(self) -> bool:
        """True if a record is a conversation."""
        return self.form != "text"


def columns_of_text(name: str) -> Columns:
    """Return the columns of records whose text is in the column `name`."""
    return Columns("text", (name,))


def choose_columns(
    types: Mapping[str, ColumnType],
    *,
    form: Form | Literal["auto", "chat"],
    name: str | None,
    where: object,
) -> Columns:
    """Choose the columns of a file that hold its documents or conversations.

    Args:
        types: the columns of the file.
        form: the form of its records; "chat" is any conversation, "auto" any form.
        name: column of the text, or of the conversation; None: it follows from `types`.
        where: names the file in messages.

    Raises:
        UserError: there are no such columns, or more than one choice.
    """
    if name is not None and name not in types:
        raise UserError(missing_column(where, name, types))
    conversations = _conversations(types, form, name)
    if form in ("auto", "text"):
        text = _text_column(types, name)
        if form == "text" or not conversations:
            if text is None:
                raise UserError(
                    f"{where}: has no field '{_TEXT}'; name the one of the text with --text-field; "
                    f"its fields are: {_listed(types)}"
                )
            return columns_of_text(text)
        if text is not None and name is None and text == _TEXT:
            raise UserError(
                f"{where}: has both '{_TEXT}' and conversations in '{conversations[0].names[0]}'; "
                f"choose with --text-field {_TEXT} or --format chat"
            )
    if not conversations:
        wanted = "a conversation" if form == "chat" else f"a conversation in the form {form}"
        raise UserError(
            f"{where}: no field is {wanted}: a list of objects with role and content (openai) or "
            f"from and value (sharegpt), or instruction and output (alpaca); its fields are: "
            f"{_listed(types)}"
        )
    if len(conversations) > 1:
        found = " and ".join(f"'{choice.names[0]}'" for choice in conversations)
        raise UserError(f"{where}: has conversations in {found}; name one with --text-field")
    return conversations[0]


def require(record: Record, name: str) -> object:
    """Return the value of a column that every record has.

    Raises:
        UserError: this record lacks it.
    """
    if name not in record.values:
        raise UserError(missing_column(record.place, name, record.values))
    return record.values[name]


def missing_column(where: object, name: str, names: Iterable[str]) -> str:
    """Return the message of a column that is not there."""
    return f"{where}: has no field '{name}'; its fields are: {_listed(names)}"


def _conversations(
    types: Mapping[str, ColumnType], form: Form | Literal["auto", "chat"], name: str | None
) -> list[Columns]:
    """Return the choices of conversations, of which a well-known name is the only one."""
    found = []
    for column, type in types.items():
        found_form = _form_of(column, type)
        if column == name and type.item_keys is None and form in _KEYS:
            found_form = form  # the first conversation is empty, or a text of JSON
        if found_form and name in (None, column) and form in (found_form, "chat", "auto"):
            found.append(Columns(found_form, (column,), _OPTIONAL[found_form]))
    has_alpaca = all(types.get(column, ColumnType()).is_text for column in _ALPACA)
    if has_alpaca and name is None and form in ("alpaca", "chat", "auto"):
        found.append(Columns("alpaca", _ALPACA, _OPTIONAL["alpaca"]))
    known = [choice for choice in found if choice.names[0] in _USUAL_FORMS]
    return known if len(known) == 1 else found


def _form_of(column: str, type: ColumnType) -> Form | None:
    """Return the form of a column's conversations; None: it holds none."""
    if type.item_keys is None:
        return _USUAL_FORMS.get(column)
    return next((form for form, keys in _KEYS.items() if keys <= type.item_keys), None)


def _text_column(types: Mapping[str, ColumnType], name: str | None) -> str | None:
    if name is not None:
        return name
    if _TEXT in types:
        return _TEXT
    texts = [column for column, type in types.items() if type.is_text]
    return texts[0] if len(texts) == 1 else None


def _listed(names: Iterable[str]) -> str:
    """Return some of the names in order, for a message."""
    ordered = sorted(names)
    listed = ", ".join(name[:_SHOWN] for name in ordered[:_MOST_NAMES]) or "none"
    more = len(ordered) - _MOST_NAMES
    return f"{listed} and {more} more" if more > 0 else listed
