"""Untrusted chat templates are rendered as by transformers, within bounds of time, memory and length."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rag_model.chat_template import TemplateRefusalError, render_chat_template
from rag_model.errors import InputError
from rag_model.process import run_in_child
from tests.fixtures.tiny_generators import CHAT

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "who is it? 日本"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
COMMON_TEMPLATES = (
    CHAT,
    "{{ bos_token }}{% for message in messages if message.role == 'user' %}{{ message | tojson }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}{{ ns.n }}{{ strftime_now('') }}{% if add_generation_prompt %}>{% endif %}",
)


@pytest.mark.parametrize("template", COMMON_TEMPLATES)
def test_a_template_is_rendered_as_by_transformers(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rag_model.chat_template.run_in_child", run_in_child)  # other tests share one child
    expected, _ = render_jinja_template([MESSAGES], chat_template=template, add_generation_prompt=True, **TOKENS)
    assert render_chat_template(template, MESSAGES, TOKENS) == expected[0]


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(TemplateRefusalError, match=r"refuses the messages \(no system message\)"):
        render_chat_template("{{ raise_exception('no system message') }}", MESSAGES, TOKENS)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 4000000000 }}", "needed more than 256 MiB of memory"),
        ("{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", "needed more than 256 MiB of memory"),
        ("{{ 'a' * 2000000 }}", "a prompt of 2,000,000 characters"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "(took more than 1 s|did not end within 10 s)",  # the second on a busy machine
        ),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", ""),
        ("{{ messages.__class__.__mro__ }}", ""),
        ("{{", ""),
        ("{{ 1 / 0 }}", ""),
    ],
)
def test_a_hostile_template_is_refused_in_one_sentence(
    template: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "took" in message:
        monkeypatch.setattr("rag_model.chat_template._MAX_SECONDS", 1.0)
    with pytest.raises((InputError, TemplateRefusalError), match=rf"^[^\n]*{message}[^\n]*$"):
        render_chat_template(template, MESSAGES, TOKENS)
