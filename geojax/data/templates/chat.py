"""Conversations as a model reads them: a chat template, rendered as `transformers` does.

A template is Jinja. `{% generation %} ... {% endgeneration %}` in it marks what the assistant
writes. In a template without the tag an assistant's part is what its message adds to the
conversation before it, behind the prompt for an answer.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import numpy as np

from geojax.data.templates.template_files import TemplateText, missing_template, read_template
from geojax.data.templates.template_sandbox import TemplateSandbox
from geojax.data.tokenizer import Tokenizer
from geojax.errors import UserError

_LONGEST_REASON = 200

# Around what the assistant writes in a rendered text; nobody's text holds them.
_BEGIN, _END = f"<{secrets.token_hex(16)}>", f"</{secrets.token_hex(16)}>"
_ANSWER = secrets.token_hex(16)


class Conversation(NamedTuple):
    """The tokens of a conversation, and for each whether the assistant wrote it."""

    ids: np.ndarray
    """Tokens, int64 [n]."""
    of_assistant: np.ndarray
    """bool [n]."""


class _Rendered(NamedTuple):
    """A rendered conversation, and the assistant's parts as characters from and to."""

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """A template with the special tokens that it may name."""

    def __init__(self, text: TemplateText) -> None:
        """Compile a template.

        Raises:
            UserError: it is no template.
        """
        self._name = text.name
        self._special_tokens = text.special_tokens
        self._sandbox = TemplateSandbox([_Generation, jinja2.ext.loopcontrols])
        try:
            self._template = self._sandbox.from_string(text.source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"{text.name}: no chat template (line {error.lineno}: {_reason(error)})"
            ) from None
        except (SyntaxError, RecursionError, ValueError) as error:  # what it is compiled to
            raise UserError(
                f"{text.name}: no chat template (it cannot be compiled: {_reason(error)})"
            ) from None
        self._has_generation = any(
            token == "name" and value == "generation"
            for _, token, value in self._sandbox.lex(text.source)
        )

    @classmethod
    def load(cls, tokenizer: Path, template: Path | None) -> "ChatTemplate":
        """Read a template file, or the template of a tokenizer.

        Raises:
            UserError: there is none, or it cannot be read.
        """
        text = read_template(tokenizer, template)
        if text is None:
            raise UserError(f"{missing_template(tokenizer)}; name a template (--chat-template)")
        return cls(text)

    def conversation(
        self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **context: Any
    ) -> Conversation:
        """Return the tokens of a conversation; `context` is passed on to the template (`tools`).

        Raises:
            ValueError: the template refuses the messages, or one of them spells a special token.
        """
        _refuse_spelled(messages, tokenizer)
        rendered = self._rendered(messages, context)
        if messages and not rendered.text:
            raise ValueError(f"{self._name} renders nothing of the messages")
        encoding = tokenizer.encode_with_special_tokens(rendered.text)
        of_assistant = np.zeros(len(encoding.ids), bool)
        for begin, end in rendered.spans:
            if begin == end or (first := encoding.char_to_token(begin)) is None:
                continue
            last = encoding.char_to_token(end - 1)
            of_assistant[first : len(encoding.ids) if last is None else last + 1] = True
        return Conversation(np.asarray(encoding.ids, np.int64), of_assistant)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **context: Any
    ) -> list[int]:
        """Return the tokens of a conversation, up to where the assistant's answer begins.

        Raises:
            ValueError: as for `conversation`.
        """
        _refuse_spelled(messages, tokenizer)
        text = _without_marks(self._render(messages, context, prompt=True)).text
        if not text:
            raise ValueError(f"{self._name} renders nothing of the messages")
        return tokenizer.encode_with_special_tokens(text).ids

    def ends_of_answer(
        self, messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, **context: Any
    ) -> set[int]:
        """Return the tokens that end an answer to `messages`.

        These are `eos_token`, and the special token that the template writes after an answer.
        """
        names = [self._special_tokens.get("eos_token")]
        answered = [*messages, {"role": "assistant", "content": _ANSWER}]
        try:
            text = _without_marks(self._render(answered, context, prompt=False)).text
        except ValueError:  # it knows no such answer
            text = ""
        names.append(next(tokenizer.special_tokens_in([text.partition(_ANSWER)[2]]), None))
        ids = (tokenizer.id_of(name) for name in names if name is not None)
        return {number for number in ids if number is not None}

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any]
    ) -> _Rendered:
        text = self._render(messages, context, prompt=False)
        if self._has_generation:
            return _without_marks(text)
        spans = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:number], context, prompt=True)
            until = self._render(messages[: number + 1], context, prompt=False)
            if not (until.startswith(before) and text.startswith(until)):
                raise ValueError(
                    f"{self._name} renders message {number} in another way when others follow, so "
                    "the assistant's part is unknown. Mark this part in the template with "
                    "{% generation %} and {% endgeneration %}"
                )
            spans.append((len(before), len(until)))
        return _Rendered(text, spans)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], context: Mapping[str, Any], *, prompt: bool
    ) -> str:
        variables = {
            **{"tools": None, "documents": None, **self._special_tokens, **context},
            "messages": messages,
            "add_generation_prompt": prompt,
        }
        try:
            text = self._sandbox.render(self._template, variables)
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{self._name} renders half of a surrogate pair, which is no character"
            ) from None
        except RecursionError:
            raise ValueError(f"{self._name} refuses the messages (it calls itself)") from None
        except Exception as error:  # a template is a program, and raises what it likes
            raise ValueError(f"{self._name} refuses the messages ({_reason(error)})") from None
        return text


def _refuse_spelled(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> None:
    """Raise a ValueError if a message spells a special token."""
    for number, message in enumerate(messages):
        spelled = next(tokenizer.special_tokens_in(_texts(message)), None)
        if spelled is not None:
            raise ValueError(
                f"message {number} spells the special token {spelled}, which would end or "
                "begin a part of the conversation; leave it out"
            )


class _Generation(jinja2.ext.Extension):
    """The tag `generation`, which puts marks around what it holds."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_marked")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _without_marks(text: str) -> _Rendered:
    before, *marked = text.split(_BEGIN)
    parts, spans, length = [before], [], len(before)
    for each in marked:
        inside, _, behind = each.partition(_END)
        spans.append((length, length + len(inside)))
        parts += [inside, behind]
        length += len(inside) + len(behind)
    return _Rendered("".join(parts), spans)


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts of a message, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts(each)


def _reason(error: Exception) -> str:
    """Return an error's message in one line, of which a template may have made any length."""
    reason = " ".join(str(error)[: 2 * _LONGEST_REASON].split()) or type(error).__name__
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
