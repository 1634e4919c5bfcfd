"""What a chat template can make is bounded, and published templates are rendered as ever."""

import json
import time
import tracemalloc

import jinja2.ext
import jinja2.sandbox
import pytest

from geojax.data.templates import template_sandbox
from geojax.data.templates.template_sandbox import TemplateLimitError, TemplateSandbox

MESSAGES = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "  Say öne.\n", "tags": ["a", "b"]},
    {
        "role": "assistant",
        "content": "<think>hm</think> öne 🙂",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": [1, 2.5, None]}}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "user", "content": "two?"},
]
# After those of Llama 3.1, Qwen 3, DeepSeek R1, Mistral, Gemma 2 and gpt-oss, part by part.
AS_PUBLISHED = [
    """{{- bos_token }}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}""",
    """{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user"
            and message.content is string and not(message.content.startswith('<tool_response>')
            and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- set reasoning = '' %}
    {%- if '</think>' in content %}
        {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {%- if loop.index0 > ns.last_query_index or loop.last %}{{- reasoning.strip('\\n') ~ content }}
    {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
    {%- if message.tool_calls %}
        {%- for tool_call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {{- tool_call.function.arguments | tojson(indent=2) }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}""",
    """{%- macro typed(spec, depth=0) -%}
    {%- if spec is mapping %}{ {% for key, value in spec|dictsort %}
        {{- key }}: {{ typed(value, depth + 1) }}{{ "," if not loop.last }}{% endfor %} }
    {%- elif spec is sequence and spec is not string %}{{ spec|map('string')|join(' | ') }}
    {%- else %}{{ spec|default('any', true)|upper }}{% endif -%}
{%- endmacro -%}
{%- set ns = namespace(system='', first=true) -%}
{%- for message in messages if message['role'] != 'tool' -%}
    {%- if message.role == 'system' %}{%- set ns.system = ns.system + '\\n\\n' + message.content -%}
    {%- else %}{{ typed(message) }}{%- endif -%}
{%- else %}nothing{%- endfor -%}
{{ ns.system|indent(4, true)|replace('terse', 'brief') }}
{%- set users = messages|selectattr('role', 'equalto', 'user')|list -%}
{{ users|length }}{{ users|map(attribute='content')|map('trim')|join(', ') }}
{{- (messages|last)['content'][:2] }}{{ "%s-%03d" % ("a", 7) }}{{ "{} {x:>4}".format(1, x=2) }}
{%- for group in messages|groupby('role') %}{{ group.grouper }}{{ group.list|length }}{% endfor %}
{%- for batch in [1, 2, 3]|batch(2, 'x') %}{{ batch }}{% endfor %}
{%- filter upper %}shout{% endfilter %}{% set block %}a{{ 1 + 1 }}b{% endset %}{{ block * 2 }}
{%- for key, value in messages[1].items() %}{{ key }}{{ value }}
    {%- if loop.index > 1 %}{% break %}{% endif %}{% endfor %}
{{- messages[2].get('content', '').replace('ö', 'o') }}{{ 7 // 2 ** 2 % 3 }}{{ [1, 2] + [3] }}
{{- nothing }}
{{- [3, 1]|sort|first }}{{ range(3)|sum }}{{ 2.567|round(1) }}{{ none }}{{ 'b' in ['a', 'b'] }}""",
]
CONTEXT = {"messages": MESSAGES, "tools": None, "bos_token": "<s>"}


@pytest.mark.parametrize("source", AS_PUBLISHED)
def test_the_charges_change_nothing(source):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    plain.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    sandbox = TemplateSandbox([jinja2.ext.loopcontrols])
    expected = plain.from_string(source).render(CONTEXT)
    assert sandbox.render(sandbox.from_string(source), CONTEXT) == expected
    assert len(expected) > 100


TWICE = "{% set ns = namespace(x=[1], y=[1]) %}{% for _ in range(60) %}"
HOSTILE = [
    "{{ 'x' * 10**10 }}",
    "{{ 10**10 * 'x' }}",
    "{{ ([0] * 10**9)|length }}",
    "{{ 10 ** (10 ** 10) }}",
    TWICE + "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x|length }}",
    "{% set ns = namespace(x=3) %}{% for _ in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ '%1000000000d' % 5 }}",
    "{{ '%*d' % (1000000000, 5) }}",
    "{{ '%(a)*d' % {'a': 5} }}",
    "{{ '{:1000000000}'.format(5) }}",
    "{{ '{:{}}'.format(5, 1000000000) }}",
    "{{ ('{0}' * 10000).format('x' * 100000) }}",
    "{{ ('%(a)s' * 10000)|format(a='x' * 100000) }}",
    "{{ range(100000)|join('x' * 100000) }}",
    "{{ ('x' * 100000).join(range(100000)|map('string')) }}",
    "{{ 'x'|center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ 'x'.zfill(100000 * 1000) }}",
    "{{ ('\\n' * 100000)|indent(100000) }}",
    "{{ ('x' * 100000)|replace('x', 'y' * 100000) }}",
    "{{ ('x' * 100000).replace('', 'y' * 100000) }}",
    "{{ [1]|batch(1000000000, 'x')|list }}",
    "{{ range(100000)|map('center', 100000)|join }}",
    "{{ messages|tojson(indent=100000000) }}",
    "{{ ([[1]] * 100000)|tojson(separators=('x' * 100000, 'y')) }}",
    "{{ range(100000)|map('string')|list|tojson(indent='x' * 100000) }}",
    "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ '\\t'.expandtabs(1000000000) }}",
    "{{ 'a'.translate({97: 'x' * 100000}) }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) if range(99999)|max == 0 %}{% endfor %}",
    "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% for a in range(99999) %}" + "text" * 1000 + "{% endfor %}",
    "{% set x %}{% for a in range(99999) %}" + "text" * 1000 + "{% endfor %}{% endset %}",
    "{% macro m() %}" + "text" * 1000 + "{% endmacro %}"
    "{% set x %}{% for a in range(99999) %}{{ m() }}{% endfor %}{% endset %}",
    "{% set x = 'x' * 1000000 %}"
    "{% set y %}{% for a in range(999) %}{{ x }}{% endfor %}{% endset %}",
    "{% set x = 'x' * 1000000 %}{% for a in range(999) %}{{ x }}{% endfor %}",
    TWICE + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set x = 'x' * 1000000 %}{% set ns = namespace(l=[]) %}"
    "{% for a in range(9999) %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    TWICE + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    TWICE + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    TWICE + "{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}{% set z = ns.x|string %}",
    TWICE + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ raise_exception(ns.x) }}",
    TWICE + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
    "{{ ns.x == ns.y }}",
    TWICE + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
    "{{ [ns.x]|select('equalto', ns.y)|list }}",
    TWICE + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
    "{{ [ns.x, ns.y]|sort|length }}",
    TWICE + "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
    "{% for z in [ns.x, ns.y] %}{{ loop.changed(z) }}{% endfor %}",
    TWICE + "{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}",
    "{{ [[1], [2]]|sum(start=[]) }}",
    "{% set x = 'x' * 1000000 %}{% for a in range(99999) %}{{ x|wordcount }}{% endfor %}",
    "{% set x = 'x' * 1000000 %}{% for a in range(99999) %}{{ 'y' in x }}{% endfor %}",
    "{% set x = 'x' * 1000000 %}{% for a in range(99999) %}{{ x is eq(x[1:]) }}{% endfor %}",
]


@pytest.mark.parametrize("source", HOSTILE)
def test_what_would_take_all_memory_or_time_ends(source, monkeypatch):
    """With a small allowance, so that the tests are fast; the bound is in proportion to it."""
    allowance = 1 << 18
    monkeypatch.setattr(template_sandbox, "_ALLOWANCE", allowance)
    monkeypatch.setattr(template_sandbox, "_ALLOWANCE_PER_CHARACTER", 1)
    sandbox = TemplateSandbox()
    tracemalloc.start()
    started = time.process_time()
    try:
        template = sandbox.from_string(source)
        with pytest.raises(TemplateLimitError):
            sandbox.render(template, {"messages": MESSAGES})
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8_000_000
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
    ],
)
def test_a_template_that_calls_itself_ends(source):
    sandbox = TemplateSandbox()
    with pytest.raises((RecursionError, TemplateLimitError)):
        sandbox.render(sandbox.from_string(source), {})


@pytest.mark.parametrize("source", ["{{ 'x'|pprint }}", "{{ 'x'|urlize }}", "{{ x|(text) }}"])
def test_filters_without_a_bound_are_unknown(source):
    with pytest.raises(jinja2.TemplateSyntaxError):
        TemplateSandbox().from_string(source)


def test_a_long_conversation_has_a_larger_allowance():
    sandbox = TemplateSandbox()
    talk = [{"role": "user", "content": "word " * 2000} for _ in range(400)]
    template = sandbox.from_string(AS_PUBLISHED[1])
    assert len(sandbox.render(template, {"messages": talk})) > 4_000_000
