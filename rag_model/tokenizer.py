"""Load an untrusted `tokenizer.json` so that it cannot use up the time or memory of a process.

The rules of the file can make a text grow, and its regular expressions can take quadratic time or
worse. One query could then block a thread for minutes, fill the memory, or cause a panic in Rust,
which is not an `Exception` in Python. There are three guards:

* **Growth.** The rules that replace text are applied one after the other. The product of the
  factors by which they can lengthen a text is bounded.
* **Trial.** If a tokenizer has patterns that no common model has, it first splits hostile texts in
  a child process. A hostile text repeats a common character, or a literal or character of a rule.
* **Child.** A trial cannot contain every hostile text. So such a tokenizer later runs only in a
  child process, with bounded memory and time per call (`GuardedTokenizer`).
"""

import base64
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rag_model.digest import digest_file
from rag_model.errors import BookwheelError, InputError, format_error
from rag_model.extras import require
from rag_model.process import ChildDiedError, ChildWorker, run_in_child, serve_calls
from rag_model.untrusted_text import parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_PANIC_CLASS = "PanicException"  # class of Rust panics in pyo3, which cannot be imported
_TRIAL_SECONDS = 20.0  # CPU seconds for all texts of the trial; a harmless tokenizer takes 0.1 s
_TEXT_SECONDS = 0.5  # CPU seconds for one text of the trial; a harmless tokenizer takes 1 ms
_MAX_MEMORY = 1 << 30  # bytes that a child may allocate
_TRIAL_LENGTH = 2_000  # characters of a trial text, as in the longest query of a service
# The trial repeats each of these to a text of `_TRIAL_LENGTH` characters.
_REPEATED_TEXTS = ("a", "A", "1", " ", "\n", ".", "'", "_", "é", "漢", "a ", "a1", "'s", "a'")
# The trial repeats at most this many literals and characters of the rules, and as many pairs of
# characters.
_MAX_RULE_TEXTS = 64
# CPU seconds of a call: `_CALL_SECONDS`, and one more for each `_CHARACTERS_PER_SECOND`
# characters, which is a tenth of the speed of a common tokenizer.
_CALL_SECONDS = 10.0
_CHARACTERS_PER_SECOND = 50_000
_MAX_GROWTH = 64  # maximum output characters per input character; common models stay below 16
_MAX_ADDED = 10_000  # maximum characters that may be added to a text of any length
_UNICODE_GROWTH = 18  # maximum growth of a character by NFKC, which SentencePiece models may use
# maximum characters of a word, usually 100; WordPiece splits a word in cubic time
_MAX_WORD_LENGTH = 10_000
# keys under which a rule lists its steps, if it has several
_STEP_LIST_KEYS = ("normalizers", "pretokenizers", "processors", "decoders")
# ByteLevel writes up to 4 bytes for a character; BertNormalizer adds up to 2 spaces around it.
_GROWTH_BY_TYPE = {"ByteLevel": 4, "BertNormalizer": 3}
# part of Oniguruma's message about a pattern that took too many steps
_ONIGURUMA_LIMIT = "limit-in-match"
# Escapes in a pattern, such as `\d`. Their letters are not literals that the pattern matches.
_NOT_LITERAL = re.compile(r"\\[pP]\{[^}]*\}|\\[A-Za-z]|\\")
# Patterns of common models: GPT-2, CLIP, Llama 3, Qwen, GPT-4o, T5, XLM-R, DeepSeek.
_KNOWN_PATTERNS = frozenset(
    (
        " ",
        " +",
        " {2,}",
        "\\s+",
        "\\s",
        "\n",
        "\\p{N}",
        "\\p{N}{1,3}",
        "[\\r\\n]",
        "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+",
        "<\\|startoftext\\|>|<\\|endoftext\\|>|'s|'t|'re|'ve|'m|'ll|'d|[\\p{L}]+|[\\p{N}]|[^\\s\\p{L}\\p{N}]+",
        "'s|'t|'re|'ve|'m|'ll|'d|[\\p{L}]+|[\\p{N}]|[^\\s\\p{L}\\p{N}]+",
        *(
            "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?" + letters + "|" + digits + "| ?[^\\s" + others + "]+"
            "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
            for letters, others in (
                ("\\p{L}+", "\\p{L}\\p{N}"),
                ("[\\p{L}\\p{M}]+", "\\p{L}\\p{M}\\p{N}"),
            )
            for digits in ("\\p{N}", "\\p{N}{1,3}")
        ),
        "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+"
        "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|"
        "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
        "[一-龥\u3040-ゟ゠-ヿ]+",
    )
)


def load_tokenizer_file(file: Path) -> "Tokenizer":
    """Load a tokenizer, as a `GuardedTokenizer` if it has patterns that no common model has.

    Raises:
        InputError: The file is missing or damaged, its rules lengthen texts too much, or one of
            its patterns is too slow.
        MissingExtraError: `tokenizers` is not installed.
    """
    tokenizers_module = require("tokenizers", "model")
    with _explain_errors(f"the tokenizer {file} cannot be read"):
        tokenizer: Tokenizer = tokenizers_module.Tokenizer.from_file(str(file))
    if not check_patterns(file):
        return tokenizer
    guarded_tokenizer: Any = GuardedTokenizer(tokenizer)
    return guarded_tokenizer  # type: ignore[no-any-return]


def check_patterns(file: Path) -> bool:
    """Check how much the rules can lengthen a text; if the file has patterns that no common model
    has, try them in a child process. Return whether it has such patterns.

    Raises:
        InputError: The file is missing or damaged, its rules lengthen texts too much, or the child
            died or took too long.
    """
    try:
        tokenizer_config = parse_json(file.read_bytes())
        patterns = _find_uncommon_patterns(tokenizer_config)
        _check_growth(file, tokenizer_config)
        if patterns:
            _try_tokenizer_patterns(file, digest_file(file))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise _create_read_error(file, error) from error
    return bool(patterns)


@contextmanager
def explain_tokenizer_errors() -> Iterator[None]:
    """Turn any error of the tokenizers library, or a panic of its Rust code, into an InputError.

    Raises:
        InputError: the tokenizer cannot split a text.
    """
    with _explain_errors("the model's tokenizer cannot split a text"):
        yield


@contextmanager
def _explain_errors(problem: str) -> Iterator[None]:
    try:
        yield
    except BookwheelError:
        raise
    except BaseException as error:  # a panic is not an `Exception`
        if not is_exception_or_panic(error):
            raise
        raise InputError(f"{problem} ({format_error(error)[:300]}): fetch the model again") from error


def is_exception_or_panic(error: BaseException) -> bool:
    """Return whether an error is an `Exception`, or a panic of a library's Rust code."""
    return isinstance(error, Exception) or type(error).__name__ == _PANIC_CLASS


class GuardedTokenizer:
    """A tokenizer that splits texts in a child process, with bounded time and memory.

    All other attributes are those of the wrapped tokenizer. Encodings contain plain lists.
    """

    def __init__(self, tokenizer: "Tokenizer") -> None:
        """Wrap `tokenizer`; the first call starts the child."""
        self._tokenizer = tokenizer
        self._worker: ChildWorker | None = None

    def __getstate__(self) -> "Tokenizer":
        """Return the wrapped tokenizer for a copy, which starts its own child."""
        return self._tokenizer

    def __setstate__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer, self._worker = tokenizer, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    @property
    def post_processor(self) -> Any:
        """The rule that adds special tokens."""
        return self._tokenizer.post_processor

    @post_processor.setter
    def post_processor(self, value: Any) -> None:
        self._tokenizer.post_processor, self._worker = value, None

    @property
    def encode_special_tokens(self) -> bool:
        """Whether the names of special tokens in a text are split like other words."""
        return bool(self._tokenizer.encode_special_tokens)

    @encode_special_tokens.setter
    def encode_special_tokens(self, value: bool) -> None:
        self._tokenizer.encode_special_tokens = value

    def add_tokens(self, tokens: Sequence[Any]) -> int:
        """Add tokens to the vocabulary; return how many are new."""
        self._worker = None
        return self._tokenizer.add_tokens(list(tokens))

    def add_special_tokens(self, tokens: Sequence[Any]) -> int:
        """Add special tokens to the vocabulary; return how many are new."""
        self._worker = None
        return self._tokenizer.add_special_tokens(list(tokens))

    def encode(self, sequence: Any, pair: Any = None, *, add_special_tokens: bool = True) -> Any:
        """Split a text, or a pair of texts."""
        text = sequence if pair is None else (sequence, pair)
        return self.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def encode_batch(
        self, inputs: Sequence[Any], *, add_special_tokens: bool = True, is_pretokenized: bool = False
    ) -> list[Any]:
        """Split each text or pair of texts.

        Raises:
            InputError: the tokenizer fails, or takes too long or too much memory.
        """
        if is_pretokenized:
            raise InputError(
                "the model's tokenizer has uncommon patterns, which cannot split a list of words: use another model"
            )
        n_characters = sum(len(text) for item in inputs for text in ([item] if isinstance(item, str) else item))
        tokenizer = self._tokenizer
        settings = [tokenizer.truncation, tokenizer.padding, tokenizer.encode_special_tokens]
        replies = self._call_child("encode", [list(inputs), add_special_tokens, settings], n_characters)
        return [_build_encoding(reply) for reply in replies]

    encode_batch_fast = encode_batch

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a sequence of token ids.

        Raises:
            InputError: for the same reasons as `encode_batch`.
        """
        ids = [int(token_id) for token_id in ids]
        n_characters = sum(len(self._tokenizer.id_to_token(token_id) or "") for token_id in ids)
        return str(self._call_child("decode", [ids, skip_special_tokens], n_characters))

    def _call_child(self, method: str, arguments: list[Any], n_characters: int) -> Any:
        if self._worker is None:
            self._worker = ChildWorker(__name__, self._tokenizer.to_str(), memory=_MAX_MEMORY)
        try:
            return self._worker.call([method, *arguments], _CALL_SECONDS + n_characters / _CHARACTERS_PER_SECOND)
        except ChildDiedError as error:
            raise InputError(
                f"the model's tokenizer {error} on {n_characters:,} characters: one of its "
                "patterns is too slow, so use another model"
            ) from error


_ENCODING_FIELDS = (
    *("ids", "tokens", "type_ids", "attention_mask", "special_tokens_mask", "sequence_ids"),
    *("n_sequences", "offsets"),
)


def _build_encoding(reply: Sequence[Any]) -> SimpleNamespace:
    *values, overflow_count = reply
    encoding_fields = dict(zip(_ENCODING_FIELDS, values, strict=True))
    encoding_fields["offsets"] = [tuple(offset) for offset in encoding_fields["offsets"]]
    # the child reports only the number of overflowing encodings
    return SimpleNamespace(**encoding_fields, overflowing=[None] * overflow_count)


def load_with_guard(file: Path, load: Callable[[], Any]) -> Any:
    """Load a tokenizer of transformers by calling `load`; `file` is its `tokenizer.json`, if it has
    one.

    A tokenizer with patterns that no common model has splits texts in a child process.

    Raises:
        InputError: for the same reasons as `load_tokenizer_file`, or raised by `load`.
    """
    has_uncommon_patterns = file.is_file() and check_patterns(file)
    tokenizer = load()
    if has_uncommon_patterns and tokenizer.is_fast:
        tokenizer._tokenizer = GuardedTokenizer(tokenizer._tokenizer)
    return tokenizer


def _open_tokenizer(tokenizer_json: str) -> Any:
    tokenizer = require("tokenizers", "model").Tokenizer.from_str(tokenizer_json)

    def encode(inputs: Sequence[Any], add_special_tokens: bool, settings: Sequence[Any]) -> Any:
        truncation, padding, tokenizer.encode_special_tokens = settings
        _ = tokenizer.enable_truncation(**truncation) if truncation else tokenizer.no_truncation()
        _ = tokenizer.enable_padding(**padding) if padding else tokenizer.no_padding()
        encodings = tokenizer.encode_batch(
            [text if isinstance(text, str) else tuple(text) for text in inputs], add_special_tokens=add_special_tokens
        )
        return [
            [*(getattr(encoding, name) for name in _ENCODING_FIELDS), len(encoding.overflowing)]
            for encoding in encodings
        ]

    def decode(ids: Sequence[int], skip_special_tokens: bool) -> Any:
        return tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def call(value: Any) -> Any:
        method_name, *arguments = value
        with explain_tokenizer_errors():
            return (encode if method_name == "encode" else decode)(*arguments)

    return call


@cache
def _try_tokenizer_patterns(file: Path, digest: str) -> None:
    try:
        run_in_child(__name__, str(file), seconds=_TRIAL_SECONDS, memory=_MAX_MEMORY)
    except InputError as error:
        raise _create_read_error(file, error) from error
    except BookwheelError as error:
        raise InputError(
            f"the tokenizer {file} {error} on texts of {_TRIAL_LENGTH:,} characters: one of its "
            "patterns is too slow, so use another model"
        ) from error


def _create_read_error(file: Path, error: BaseException) -> InputError:
    return InputError(f"the tokenizer {file} cannot be read ({format_error(error)[:300]}): fetch the model again")


def _iter_objects(json_value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a tokenizer's JSON except those of its vocabulary."""
    pending_rules = [json_value]
    while pending_rules:
        node = pending_rules.pop()
        if isinstance(node, dict):
            yield node
            pending_rules += [child for name, child in node.items() if name != "vocab"]
        elif isinstance(node, list) and node and isinstance(node[0], dict):  # not a vocabulary
            pending_rules += node


def _find_uncommon_patterns(rules: Any) -> list[str]:
    """Return those regular expressions of the rules that no common model has."""
    patterns = [node["Regex"] for node in _iter_objects(rules) if isinstance(node.get("Regex"), str)]
    return [pattern for pattern in patterns if pattern not in _KNOWN_PATTERNS]


def _find_literals(rules: Any) -> list[str]:
    """Return the literal texts that the rules search for or insert."""
    names = ("String", "content", "prepend")
    return [node[name] for node in _iter_objects(rules) for name in names if isinstance(node.get(name), str)]


def _check_growth(file: Path, rules: Mapping[str, Any]) -> None:
    word_limit = (rules.get("model") or {}).get("max_input_chars_per_word", 0)
    if word_limit > _MAX_WORD_LENGTH:
        raise InputError(
            f"the tokenizer {file} splits words of up to {word_limit:,} characters "
            "(max_input_chars_per_word); "
            f"at most {_MAX_WORD_LENGTH:,} are allowed: use another model"
        )
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        growth_factor, added_characters = _bound_growth(_iter_rule_steps(rules.get(name)))
        if growth_factor > _MAX_GROWTH or added_characters > _MAX_ADDED:
            raise InputError(
                f"the {name} of the tokenizer {file} makes a text up to {growth_factor:,.0f} times "
                "as long, and "
                f"{added_characters:,.0f} characters longer; at most {_MAX_GROWTH} times and "
                f"{_MAX_ADDED:,} characters are allowed: use another model"
            )


def _iter_rule_steps(rule: Any) -> Iterator[dict[str, Any]]:
    """Yield the steps of a rule in order; sequences are flattened."""
    pending_rules = [rule]
    while pending_rules:
        step = pending_rules.pop()
        if isinstance(step, dict):
            substeps = next((step[name] for name in _STEP_LIST_KEYS if isinstance(step.get(name), list)), None)
            if substeps is None:
                yield step
            else:
                pending_rules += reversed(substeps)


def _bound_growth(steps: Iterator[dict[str, Any]]) -> tuple[float, float]:
    """Return (f, a) such that the rules turn n characters into at most f * n + a characters.

    Unicode's normal forms are not counted, because repeating them does not make a text longer.
    """
    growth_factor, added_characters = 1.0, 0.0
    for step in steps:
        step_growth, added_by_step = _bound_step_growth(step)
        growth_factor, added_characters = growth_factor * step_growth, added_characters * step_growth + added_by_step
        if growth_factor > _MAX_GROWTH or added_characters > _MAX_ADDED:
            break
    return growth_factor, added_characters


def _bound_step_growth(step: Mapping[str, Any]) -> tuple[float, float]:
    step_type = step.get("type")
    if step_type == "Replace":
        content_length, pattern = len(step["content"]), step["pattern"]
        min_match = len(pattern.get("String", "")) or int(pattern.get("Regex") in _KNOWN_PATTERNS)
        # A pattern that matches the empty text may match before every character, and at the end.
        return (max(1.0, content_length / min_match), 0.0) if min_match else (1.0 + content_length, content_length)
    if step_type == "Prepend":
        return 1.0, len(step["prepend"])
    if step_type == "Precompiled":
        return max(1.0, _find_longest_replacement(step["precompiled_charsmap"]) / _UNICODE_GROWTH), 0.0
    if step_type == "TemplateProcessing":
        templates = (step["single"], 1), (step["pair"], 2)
        sequence_copies = (
            sum("Sequence" in element for element in template) / n_sequences for template, n_sequences in templates
        )
        return max(1.0, *sequence_copies), max(len(step["single"]), len(step["pair"]))
    return _GROWTH_BY_TYPE.get(str(step_type), 1.0), 0.0


def _find_longest_replacement(charsmap: str | None) -> int:
    """Return the length in characters of the longest replacement in SentencePiece's table.

    The table consists of the size of a trie, the trie, and replacements that end with a NUL.
    """
    rule_bytes = base64.b64decode(charsmap or "")
    texts = rule_bytes[4 + int.from_bytes(rule_bytes[:4], "little") :]
    return max((len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")), default=0)


def _iter_trial_texts(rules: Any) -> Iterator[str]:
    """Yield texts that repeat a character or literal of the rules, or a common character."""
    pattern_texts = [_NOT_LITERAL.sub("", pattern) for pattern in _find_uncommon_patterns(rules)]
    literals = [literal for literal in _find_literals(rules) if 0 < len(literal) <= _TRIAL_LENGTH]
    characters = [*"".join(pattern_texts), *"".join(literals)]
    pairs = [
        pattern_text[start : start + 2] for pattern_text in pattern_texts for start in range(len(pattern_text) - 1)
    ]
    rule_texts = [*dict.fromkeys([*literals, *characters])][:_MAX_RULE_TEXTS]
    # The regex engine skips a text without a character that its pattern requires. A text that ends
    # with all these characters is never skipped.
    required_characters = "\n" + "".join(dict.fromkeys(characters))[:_MAX_RULE_TEXTS]
    for repeated_text in dict.fromkeys([*_REPEATED_TEXTS, *rule_texts, *pairs[:_MAX_RULE_TEXTS]]):
        for ending in ("", "!", required_characters):
            yield (repeated_text * _TRIAL_LENGTH)[: _TRIAL_LENGTH - len(ending)] + ending


def _encode_trial_texts(file: str) -> None:
    tokenizer = require("tokenizers", "model").Tokenizer.from_file(file)
    for text in _iter_trial_texts(parse_json(Path(file).read_bytes())):
        start_seconds = time.process_time()
        try:
            with explain_tokenizer_errors():
                tokenizer.encode(text)
        except InputError as error:
            if _ONIGURUMA_LIMIT in str(error):
                raise ChildDiedError("exceeds a limit of its library") from error
            raise
        if (encoding_seconds := time.process_time() - start_seconds) > _TEXT_SECONDS:
            raise ChildDiedError(f"took {encoding_seconds:.1f} s")


if __name__ == "__main__":
    serve_calls(lambda rules: _open_tokenizer(rules) if rules else _encode_trial_texts)
