"""Conversations and their templates, which come from strangers' folders."""

import json
import random
from typing import Any

from fuzz.case import Case
from fuzz.corpus import Corpus
from fuzz.damage import JSON_VALUES, harm, mutated

_TALK: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "one two?"},
        {"role": "assistant", "content": "two one"},
    ]
}
_TEMPLATES = (
    "",
    " ",
    "x",
    "{{ 'x' * 10**10 }}",
    "{{ 'x' * 10**10 | length }}",
    "{% set x = 'x' * 10**6 %}{{ x * 10**6 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 10 ** 9999 }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 'x' | center(10**10) }}",
    "{{ ('x' * 1000) | indent(10**9) }}",
    "{{ [1] * 10**10 }}",
    "{{ range(10**10) | list }}",
    "{{ range(10**5) | list | join('x' * 10**5) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='x') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for a in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('x') }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ messages[0].content.__class__.__mro__ }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{ messages.append(1) }}{{ messages }}",
    "{{ raise_exception('no\nthanks') }}",
    "{{ raise_exception('x' * 99999) }}",
    "{{ strftime_now('%' * 10**6) }}",
    "{{ strftime_now('\\0') }}",
    "{{ nope.nope.nope }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends x %}",
    "{% generation %}{% generation %}x{% endgeneration %}{% endgeneration %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{% for m in messages %}{% generation %}{{ m }}{% break %}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ '\\ud800' }}",
    "{{ 1 / 0 }}",
    "{{ messages | map('upper') | list | sort | unique | batch(10**9) | list }}",
    "{{ lipsum(10**6) }}",
    "{{ cycler }}{{ joiner }}{{ self }}{{ dict }}",
    "{{ messages | groupby('role') | tojson }}",
    "{{ ('x' * 10**5) | replace('x', 'x' * 10**5) }}",
    "{{ ('x' * 10**5).replace('x', 'x' * 10**5) }}",
    "{{ ('x ' * 10**5) | wordwrap(1) | length }}",
    "{{ 'x'.ljust(10**10) }}{{ 'x'.zfill(10**10) }}",
    "{{ ('a\\t' * 10**5).expandtabs(10**6) }}",
    "{" * 100_000,
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "[" * 300 + "1" + "]" * 300 + " }}",
    "{% if 1 %}" * 300 + "{% endif %}" * 300,
    "{{ 1" + " + 1" * 20_000 + " }}",
    "{#" * 50_000,
)
_LINES = (
    b"",
    b"null\n",
    b"[]\n",
    b"{}\n",
    b'{"messages": null}\n',
    b'{"messages": []}\n',
    b'{"messages": "x"}\n',
    b'{"messages": [null]}\n',
    b'{"messages": [{}]}\n',
    b'{"messages": [{"role": "assistant"}]}\n',
    b'{"messages": [{"role": "assistant", "content": null}]}\n',
    b'{"messages": [{"role": "assistant", "content": 3}]}\n',
    b'{"messages": [{"role": "assistant", "content": "\\ud800"}]}\n',
    b'{"messages": [{"role": "assistant", "content": "<|im_end|>"}]}\n',
    b'{"messages": [{"role": {"a": 1}, "content": [{"type": "text", "text": "x"}]}]}\n',
    b'{"messages": [{"role": "user", "content": "' + b"x" * 10**6 + b'"}]}\n',
    b'{"messages": [{"role": "assistant", "content": "' + b"one two " * 10**5 + b'"}]}\n',
    b'{"messages": ' + b"[" * 100_000 + b"\n",
    b'{"conversations": [{"from": "human", "value": "x"}]}\n',
    b'{"messages": [{"role": "assistant", "content": "x"}], "tools": 3}\n',
    b'{"messages": [{"role": "assistant", "content": "x"}], "tools": [[[]]]}\n',
)


def chats(corpus: Corpus, rng: random.Random) -> Case:
    """Conversations, a tokenizer's files and a template, of which one or two are hostile."""
    line = json.dumps(_TALK).encode() + b"\n"
    files = {"a.jsonl": line * 4, **corpus.tokenizer}
    words = ["data", "prepare", "a.jsonl", "--output", "out", "--format", "chat"]
    words += ["--tokenizer", "chat/tokenizer.json"]
    case = Case(words, files, notes=True)
    for damage in rng.choices(["template", "lines", "message", "file", "config"], k=2):
        if damage == "template":
            template = rng.choice(_TEMPLATES).encode()
            if rng.random() < 0.3:
                template = mutated(template, rng)
            if rng.random() < 0.5:
                files["chat/chat_template.jinja"] = template
            else:
                words += ["--chat-template", "own.jinja"]
                files["own.jinja"] = template
        elif damage == "lines":
            files["a.jsonl"] = rng.choice(_LINES) + line
        elif damage == "message":
            talk = json.loads(line)
            message = rng.choice(talk["messages"])
            message[rng.choice(["role", "content", "tool_calls", "x"])] = rng.choice(JSON_VALUES)
            files["a.jsonl"] = json.dumps(talk).encode() + b"\n" + line
        elif damage == "config":
            config = json.loads(corpus.tokenizer["chat/tokenizer_config.json"])
            key = rng.choice([*config, "unk_token", "pad_token", "x_token"])
            config[key] = rng.choice([*JSON_VALUES, [{"name": "default", "template": 3}], [3]])
            files["chat/tokenizer_config.json"] = json.dumps(config).encode()
        elif not case.kinds and case.files.keys() >= corpus.tokenizer.keys():
            harm(case, rng.choice(list(corpus.tokenizer)), rng)
        if rng.random() < 0.5:
            break
    return case


DRAWS = ((4, chats),)
