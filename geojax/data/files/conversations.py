"""Conversations as OpenAI, ShareGPT and Alpaca write them, as messages for a chat template."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from geojax.data.files.columns import Columns, require
from geojax.data.files.records import Record
from geojax.errors import UserError

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles of a chat template by those of ShareGPT."""

_CALL = "function_call"


class ConversationMessages(NamedTuple):
    """The messages of a conversation, and what else its template reads."""

    messages: list[dict[str, Any]]
    context: dict[str, Any]
    """Variables of the template: `tools`, where there are any."""


def conversation_of(record: Record, columns: Columns) -> ConversationMessages:
    """Return the conversation of a record.

    Raises:
        UserError: the record holds none.
    """
    return _READERS[columns.form](record, columns)


def _openai(record: Record, columns: Columns) -> ConversationMessages:
    (name,) = columns.names
    messages = [_without_absent(message) for message in _objects(record, name)]
    for number, message in enumerate(messages):
        if message.get("weight", 1) == 0:
            raise UserError(
                f"{record.place}: message {number} has the weight 0; mark what is learned in the "
                "chat template with {% generation %}, or leave the weight out"
            )
    return ConversationMessages(messages, _tools(record))


def _sharegpt(record: Record, columns: Columns) -> ConversationMessages:
    (name,) = columns.names
    messages = _system(record)
    for number, item in enumerate(_objects(record, name)):
        role, content = item.get("from"), item.get("value")
        if not isinstance(content, str):
            raise UserError(f"{record.place}: message {number} has no text in 'value'")
        if role == _CALL:
            call = {"type": "function", "function": _json(record, f"message {number}", content)}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        elif role in _ROLES:
            messages.append({"role": _ROLES[role], "content": content})
        else:
            known = ", ".join([*_ROLES, _CALL])
            raise UserError(
                f"{record.place}: message {number} is from '{str(role)[:40]}'; known are: {known}"
            )
    return ConversationMessages(messages, _tools(record))


def _alpaca(record: Record, columns: Columns) -> ConversationMessages:
    messages = _system(record)
    for pair in record.values.get("history") or []:
        texts = isinstance(pair, list) and [item for item in pair if isinstance(item, str)]
        if not texts or len(texts) != len(pair) or len(pair) != 2:
            raise UserError(f"{record.place}: the history is no list of pairs of texts")
        messages += _turn(*pair)
    for name in columns.names:
        require(record, name)
    instruction, given, answer = (
        _text(record, name) for name in (columns.names[0], "input", columns.names[1])
    )
    question = f"{instruction}\n{given}" if given else instruction
    return ConversationMessages(messages + _turn(question, answer), {})


_READERS = {"openai": _openai, "sharegpt": _sharegpt, "alpaca": _alpaca}


def _turn(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _system(record: Record) -> list[dict[str, Any]]:
    text = _text(record, "system")
    return [{"role": "system", "content": text}] if text else []


def _tools(record: Record) -> dict[str, Any]:
    tools = record.values.get("tools")
    if isinstance(tools, str):
        tools = _json(record, "'tools'", tools) if tools.strip() else None
    return {} if tools is None else {"tools": _without_absent(tools)}


def _objects(record: Record, name: str) -> list[dict[str, Any]]:
    value = require(record, name)
    if isinstance(value, str):
        value = _json(record, f"'{name}'", value)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UserError(f"{record.place}: the field '{name}' is no list of messages")
    return value


def _json(record: Record, what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{record.place}: {what} is no valid JSON") from None


def _without_absent(value: Any) -> Any:
    """Leave out the keys of objects that a table fills with nulls; a message may have no text."""
    if isinstance(value, Mapping):
        return {
            name: _without_absent(item)
            for name, item in value.items()
            if item is not None or name == "content"
        }
    return [_without_absent(item) for item in value] if isinstance(value, list) else value


def _text(record: Record, name: str) -> str:
    """Return a text; what a record lacks is an empty one."""
    value = record.values.get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{record.place}: the field '{name}' is no text")
    return value or ""
