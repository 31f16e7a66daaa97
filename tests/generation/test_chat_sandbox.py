"""What chat templates may not do."""

from __future__ import annotations

import pytest

from penstock.core.errors import InvalidInput
from penstock.generation.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hello"}]
ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over letters": "{% set t = 'a' * 9999 %}{% for a in t %}{% for b in t %}{% endfor %}{% endfor %}",
    "recursive loops": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "recursive macros": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "doubled text": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubled sum": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubled block": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}",
    "doubled join": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = [n.x, n.x]|join %}{% endfor %}",
    "doubled method": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x.join([n.x, n.x]) %}{% endfor %}",
    "doubled replacement": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x.replace('a', n.x) %}{% endfor %}",
    "doubled filter": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x|replace('a', n.x) %}{% endfor %}",
    "written text": "{% set t = 'ab' * 1000000 %}{% for i in range(100) %}{{ t }}{% endfor %}",
    "constant in block": "{% set x %}{% for i in range(99999) %}" + "constant" * 100 + "{% endfor %}{% endset %}",
    "repeated text": "{{ 'a' * 10000000000 }}",
    "power": "{{ 9 ** 999999999 }}",
    "powers": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "wide text": "{{ 'a'.center(10000000000) }}",
    "wide format": "{{ '%10000000000d' % 1 }}",
    "width of a value": "{{ '%*d' % (10000000000, 1) }}",
    "wide method": "{{ '{:10000000000}'.format(1) }}",
    "width of an argument": "{{ '{:{}}'.format(1, 10000000000) }}",
    "indentation": "{{ 'a'|indent(10000000000, first=True) }}",
    "range": "{{ range(10000000000)|list }}",
    "nested lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "nested objects": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x|tojson }}",
    "compared lists": "{% set n = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}",
    "changed lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{{ loop.changed(n.x) }}{% endfor %}",
    "a text in a list": "{% set t = 'a' * 9999 %}{{ [t] * 99999 }}",
    "list made a text": "{% set t = 'a' * 9999 %}{{ ([t] * 99999)|upper|length }}",
    "list in a format": "{% set t = 'a' * 9999 %}{{ ('%s' % ([t] * 99999,))|length }}",
    "list in a method": "{% set t = 'a' * 9999 %}{{ '{}'.format([t] * 99999)|length }}",
    "list in a message": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ raise_exception(n.x) }}",
    "mapped list": "{% set t = 'a' * 9999 %}{{ [[t] * 99999]|map('string')|join|length }}",
    "indented JSON": "{{ {'a': 1}|tojson(indent=1000000000) }}",
    "deep JSON": "{% set n = namespace(x=[1] * 99999) %}{% for i in range(200) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x|tojson(indent=4) }}",
    "words": "{{ ('a ' * 9999999).split()|length }}",
    "parts": "{{ ('a ' * 9999999).split(' ')|length }}",
    "lines": "{{ ('a\n' * 9999999).splitlines()|length }}",
    "letters": "{{ ('a' * 9999999)|list|length }}",
    "titles": "{% for i in range(99999) %}{% set t = ('ab ' * 99999)|title %}{% endfor %}",
    "long texts in a loop": "{% for i in range(99999) %}{% set t = 'a' * 9999999 %}{% endfor %}",
    "parts of texts in a loop": "{% set t = 'a' * 9999999 %}{% for i in range(99999) %}{% set p = t[1:] %}{% endfor %}",
    "searches in a loop": "{% set t = 'a' * 9999999 %}{% for i in range(99999) %}{% if 'b' in t %}{% endif %}{% endfor %}",
    "methods in a loop": "{% set t = 'a' * 9999999 %}{% for i in range(99999) %}{% set p = t.find('ab') %}{% endfor %}",
    "tests in a loop": "{% set t = 'a' * 9999999 %}{% for i in range(99999) %}{% if t is upper %}{% endif %}{% endfor %}",
    "form of the time": "{{ strftime_now('%Y' * 9999999)|length }}",
    "translation": "{{ 'a'.translate({97: 'b'}) }}",
}  # fmt: skip
FORBIDDEN = {
    "attribute": "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
    "globals": "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
    "change": "{{ messages.append(1) }}",
    "budget": "{{ messages|counted }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_template_without_end_is_stopped(name: str) -> None:
    with pytest.raises(InvalidInput, match="chat template"):
        ChatTemplate(ENDLESS[name]).render(MESSAGES)


@pytest.mark.parametrize("name", FORBIDDEN)
def test_template_that_leaves_its_sandbox_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="chat template"):
        ChatTemplate(FORBIDDEN[name]).render(MESSAGES)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ '%05.1f|%s' % (1.5, 'a') }}", "001.5|a"),
        ("{{ '{:>4}'.format(1) }}", "   1"),
        ("{{ 'a\nb'|indent(2) }}", "a\n  b"),
        ("{{ 'aXa'.replace('X', '--') }}{{ 'aXaX'|replace('X', '-', 1) }}", "a--aa-aX"),
        ("{{ [1, 2]|join(', ') }}{{ messages|join('', attribute='role') }}", "1, 2user"),
        ("{{ 2 ** 10 }}{{ 7 % 3 }}{{ [1] + [2] }}{{ '-' * 3 }}", "10241[1, 2]---"),
        ("{{ 1 ~ none ~ undefined_name ~ 'x' }}", "1Nonex"),
        ("{{ none }}{{ undefined_name }}{{ true }}", "NoneTrue"),
        ("{% for a in 'ab' %}{{ loop.index }}{{ loop.last }}{{ loop.length }},{% endfor %}", "1False2,2True2,"),
        ("{{ ['b', 'a']|sort|first }}{{ 'a b'|title }}{{ 'aXb'.split('X')[-1] }}", "aA Bb"),
        ("{{ {'a': [1]}|tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ messages|selectattr('role', 'equalto', 'user')|map(attribute='content')|list }}", "['Hello']"),
        ("{{ messages[0] in messages }}{{ messages[1:] == [] }}{{ 1 < 2 < 3 }}", "TrueTrueTrue"),
        ("{{ 'a' is in ['a'] }}{{ 'A' is upper }}{{ messages|map('length')|join }}", "TrueTrue2"),
        ("{{ ['a', 'b', 'a'].index('b') }}{{ 'a,b'.split(',', 1)|join('-') }}", "1a-b"),
        ("{% filter upper %}a{{ 'b' }}{% endfilter %}", "AB"),
        ("{% for a in nothing %}x{% else %}none{% endfor %}", "none"),
        ("{% for a in [1, 2, 3] if a > 1 %}{{ loop.previtem }}{{ a }}{% endfor %}", "223"),
    ],
)  # fmt: skip
def test_template_that_counts_little_writes_as_jinja_does(template: str, text: str) -> None:
    assert ChatTemplate(template).render(MESSAGES) == text


def test_long_conversation_is_within_the_budget() -> None:
    template = """{%- for m in messages -%}
        {%- if m.role not in ['user', 'assistant'] or messages|length == 0 -%}
            {{ raise_exception('x') }}
        {%- endif -%}
        {%- if '</think>' in m.content -%}
            {%- set c = m.content.split('</think>')[-1].lstrip('\n') -%}
        {%- else -%}
            {%- set c = m.content|trim -%}
        {%- endif -%}
        {{- '<|' ~ m.role ~ '|>' + c + '\n' -}}
        {%- if loop.index0 > (messages|length) - 2 and c -%}!{%- endif -%}
    {%- endfor -%}
    {{- messages|selectattr('role', 'equalto', 'user')|list|length -}}"""
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": f"{i} " * 2000} for i in range(600)]
    text = ChatTemplate(template).render(messages)
    assert text.count("<|user|>") == 300
    assert text.endswith("!300")
