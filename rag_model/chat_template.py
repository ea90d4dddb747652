"""Render the chat template of a model in a child process, with bounded time, memory and length.

A template is a program. transformers runs it in Jinja's sandbox, which keeps it from files and from
Python's internals, but bounds neither loops nor products such as `'a' * 4000000000`.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rag_model.errors import InputError, UsageError
from rag_model.extras import require
from rag_model.process import ChildDiedError, run_in_child, serve_call

_MAX_SECONDS = 20.0  # CPU seconds of the child process, of which its imports take half a second
_MAX_MEMORY = 256 << 20  # bytes that the child process may allocate
_MAX_PROMPT_CHARACTERS = 1 << 20
_MAX_REFUSAL = 300  # maximum number of characters that an error message quotes of a refusal


class TemplateRefusalError(UsageError):
    """A template refused the messages, for example because it accepts no system message."""


def render_chat_template(
    template: str, messages: Sequence[Mapping[str, str]], special_tokens: Mapping[str, Any]
) -> str:
    """Render the messages as a prompt that ends with the beginning of the reply.

    Raises:
        TemplateRefusalError: the template refuses the messages.
        InputError: the template exceeds a limit of time, memory or length.
    """
    return _render(json.dumps([template, list(messages), dict(special_tokens)]))


@lru_cache(maxsize=256)  # cached, because a reader renders the same messages for every prompt
def _render(arguments_json: str) -> str:
    try:
        reply = run_in_child(__name__, json.loads(arguments_json), seconds=_MAX_SECONDS, memory=_MAX_MEMORY)
    except ChildDiedError as error:
        raise InputError(f"the chat template of the model {error}: use another model") from error
    if reply["refusal"]:
        raise TemplateRefusalError(
            f"the chat template of the model refuses the messages ({reply['refusal']}): use another reader or model"
        )
    return str(reply["text"])


def _render_in_child(arguments: Any) -> dict[str, str]:
    template, messages, special_tokens = arguments
    jinja2_module = require("jinja2", "model")
    from transformers.utils.chat_template_utils import (  # noqa: PLC0415 - only the child needs it
        render_jinja_template,
    )

    try:
        rendered_prompts: Any = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=True, **special_tokens
        )
    except jinja2_module.TemplateError as error:
        return {"refusal": " ".join(str(error).split())[:_MAX_REFUSAL] or type(error).__name__, "text": ""}
    text = str(rendered_prompts[0][0])
    if len(text) > _MAX_PROMPT_CHARACTERS:
        raise InputError(
            f"the chat template of the model renders a message as a prompt of {len(text):,} "
            f"characters; at most {_MAX_PROMPT_CHARACTERS:,} are allowed: use another model"
        )
    return {"refusal": "", "text": text}


if __name__ == "__main__":
    serve_call(_render_in_child)
