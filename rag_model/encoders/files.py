"""Find the folder of a model, and read its JSON files: limits, sizes, sentence-transformers modules
and prompts.

The name of a model is a folder, or a hub name, which is downloaded once into the hub's own cache.
`NAME@REVISION` names a branch, a tag, a commit or a pull request (`refs/pr/3`) of the hub.
The two formats of pooling in sentence-transformers are read: `pooling_mode_mean_tokens: true` (up
to version 5) and `pooling_mode: "mean"` (since version 6). A sparse encoder (`SparseEncoder`)
consists of `MLMTransformer` (up to version 5.3) or `Transformer`, and of `SpladePooling`.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rag_model.errors import InputError, UsageError
from rag_model.extras import require
from rag_model.secrets import refuse_secret
from rag_model.untrusted_text import parse_json

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
_DEFAULT_MAX_LENGTH = 512  # maximum tokens of an input, if no file has a limit
# Types of models whose position ids begin after the padding id.
_POSITIONS_AFTER_PADDING = frozenset(("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet", "longformer"))
_UNBOUNDED = 100_000  # larger token limits, such as 1e30, mean "no limit"
MODULES = "modules.json"
_ONNX_FILES = ("model.onnx", "onnx/model.onnx")  # path in an exported model, and on the hub
SPLADE_MODULE = "SpladePooling"
_SUPPORTED_MODULES = ("Transformer", "Pooling", "Normalize")
_SUPPORTED_SPARSE_MODULES = ("Transformer", "MLMTransformer", SPLADE_MODULE)
_SETTINGS_FILE = "config_sentence_transformers.json"
_DISTANCES = ("euclidean", "manhattan")  # names of similarities in sentence-transformers
_POOLING_BY_MODE = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
}
# Names of prompts, in the order in which sentence-transformers' `encode_document` searches them.
# That function adds an empty `document`, so it never uses the others. Here they are used if the
# folder has no `document`, because such a model was saved before `encode_document` existed.
_PASSAGE_PROMPTS = ("document", "passage", "corpus")
_QUESTION_PROMPTS = ("query",)
_DEMO_ADVICE = {
    "sentence-transformers/all-MiniLM-L6-v2": (
        "; the demo extra holds this model, in the folder that "
        "`python -c 'import flows.demo; print(flows.demo.demo_encoder())'` prints"
    )
}
DOWNLOAD_PATTERNS = ("*.json", "*.txt", "*.model", "*.metadata", "*.jinja", "*.safetensors")
_RUNTIME_EXPORTS = ["onnx/*", "openvino/*"]  # patterns of files that are not downloaded
ENDPOINT_PREFIX = "openai:"  # prefix of the name of a model behind an HTTP API
_HUB_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>.*))?")
# A git ref, without `..`: the hub's client writes a file of this name into its cache.
_REVISION = re.compile(r"(?!.*\.\.)\w[^\s~^:?*\[\\]*(?<!/)")
_LEGACY_TOKENIZER_FILES = ("vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model")
_HUB_FOLDER = re.compile(r"models--(?P<owner>.+?)--(?P<model>.+)/snapshots/(?P<commit>[0-9a-f]{40})")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object of an encoder folder.

    Raises:
        InputError: the file is missing, not JSON, or not an object.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"model file {path} is corrupt (not a JSON object): fetch the model again")
    return content


def read_json(path: Path) -> Any:
    """Read a JSON file of an encoder folder.

    Raises:
        InputError: the file is missing or not JSON.
    """
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"model {path.parent} has no {path.name}: give the folder of a Hugging Face model") from error
    except (ValueError, OSError) as error:
        raise InputError(f"model file {path} is corrupt ({error}): fetch it again") from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file of an encoder folder; equal values give equal bytes."""
    json_text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False)
    path.write_text(json_text + "\n", encoding="utf-8")


def read_optional_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file is missing."""
    return read_json_object(path) if path.is_file() else {}


def read_max_tokens(folder: Path) -> int:
    """Return the maximum number of tokens of an input: the smallest limit in the folder's files, or
    else 512.
    """
    token_limits = [
        read_position_limit(folder),
        read_optional_json(folder / "tokenizer_config.json").get("model_max_length"),
    ]
    return min((int(limit) for limit in token_limits if limit and limit < _UNBOUNDED), default=_DEFAULT_MAX_LENGTH)


def read_position_limit(folder: Path) -> int | None:
    """Return the number of tokens that the position embeddings allow; None if the config has no
    limit.

    RoBERTa's position ids begin after the padding id (Liu et al. 2019), so 514 positions allow 512
    tokens.
    """
    config = read_optional_json(folder / CONFIG)
    limit = config.get("max_position_embeddings")
    if not limit or config.get("model_type") not in _POSITIONS_AFTER_PADDING:
        return limit or None
    pad_id = config.get("pad_token_id")
    return max(1, int(limit) - (pad_id if isinstance(pad_id, int) else 1) - 1)


def read_dim(folder: Path) -> int:
    """Return the dimension of the vectors of the model in `folder`.

    Raises:
        InputError: the model's config has no dimension.
    """
    config = read_json_object(folder / CONFIG)
    for dim_key in ("projection_dim", "hidden_size", "dim", "d_model", "n_embd"):
        if isinstance(dim := config.get(dim_key), int) and dim > 0:
            return dim
    raise InputError(f"encoder file {folder / CONFIG} has no hidden_size: give the folder of a bi-encoder")


def read_sentence_transformers(folder: Path) -> dict[str, Any]:
    """Read the fields of `EncoderSpec` that a sentence-transformers folder sets.

    Raises:
        InputError: a file is missing or corrupt, or the model has an unsupported part.
    """
    modules = read_supported_modules(folder, _SUPPORTED_MODULES)
    if "Pooling" not in modules or modules.get("Transformer") != "":
        raise InputError(
            f"encoder {folder} has no Transformer in its top folder, or no Pooling: use an encoder with both"
        )
    _check_text_case(folder)
    return {
        "pooling": _read_pooling(folder / modules["Pooling"] / "config.json"),
        "max_length": _read_max_length(folder),
        **read_vector_settings(folder, modules),
        **read_prompts(folder),
    }


def read_vector_settings(folder: Path, modules: Collection[str]) -> dict[str, Any]:
    """Read `normalize` and `truncate_dim` of `EncoderSpec` from a folder with these `modules`.

    Indexes rank by inner product, so the vectors of a cosine model are normalized even if it has no
    Normalize module. As in sentence-transformers, the default is cosine.

    Raises:
        InputError: the similarity is not supported, or a value has a wrong type.
    """
    settings = read_optional_json(folder / _SETTINGS_FILE)
    similarity = settings.get("similarity_fn_name")
    similarity = "cosine" if similarity is None else similarity
    has_unit_vectors = "Normalize" in modules
    # Euclidean distance and inner product rank unit vectors in the same order.
    if similarity in _DISTANCES and not (similarity == "euclidean" and has_unit_vectors):
        raise InputError(
            f"encoder {folder} compares vectors by {similarity} distance (similarity_fn_name in "
            f"{_SETTINGS_FILE}), which is not supported: use a model for cosine or dot similarity"
        )
    # If the similarity is defined for token vectors (MaxSim), sentence-transformers compares the
    # vectors of texts by cosine.
    if similarity not in ("cosine", "dot", "maxsim", "meanmaxsim", *_DISTANCES):
        raise InputError(
            f"encoder file {folder / _SETTINGS_FILE} has similarity_fn_name {similarity!r}: "
            'change it to "cosine" or "dot", or remove it'
        )
    truncate_dim = settings.get("truncate_dim")
    if truncate_dim is not None and (type(truncate_dim) is not int or truncate_dim < 1):
        raise InputError(
            f"encoder file {folder / _SETTINGS_FILE} has truncate_dim {truncate_dim!r}: "
            "change it to a positive whole number, or remove it"
        )
    return {"normalize": has_unit_vectors or similarity != "dot", "truncate_dim": truncate_dim or 0}


def has_splade_pooling(folder: Path) -> bool:
    """Return whether a folder has the modules of a sparse encoder.

    Raises:
        InputError: `modules.json` is damaged.
    """
    return (folder / MODULES).is_file() and SPLADE_MODULE in read_modules(folder)


def read_splade(folder: Path) -> dict[str, Any]:
    """Read the fields of `SparseSpec` that the folder of a sparse encoder sets.

    Raises:
        InputError: a file is missing or corrupt, or the model has an unsupported part.
    """
    modules = read_supported_modules(folder, _SUPPORTED_SPARSE_MODULES)
    if modules.get("Transformer", modules.get("MLMTransformer")) != "":
        raise InputError(f"encoder {folder} has no Transformer in its top folder: use another one")
    pooling_config = read_json_object(folder / modules[SPLADE_MODULE] / "config.json")
    settings = {
        "pooling": pooling_config.get("pooling_strategy"),
        "activation": pooling_config.get("activation_function"),
    }
    return {name: setting for name, setting in settings.items() if setting is not None} | {
        "max_length": _read_max_length(folder),
        **read_prompts(folder),
    }


def read_prompts(folder: Path) -> dict[str, str]:
    """Read the prompts of passages and questions, as fields of a spec.

    The setting `default_prompt_name` is ignored, because sentence-transformers' `encode_query` and
    `encode_document` do not use it.

    Raises:
        InputError: the file is damaged.
    """
    settings = read_optional_json(folder / _SETTINGS_FILE)
    prompt_by_name = settings.get("prompts") or {}
    if not isinstance(prompt_by_name, dict):
        raise InputError(f"encoder file {folder / _SETTINGS_FILE} is corrupt: fetch the model again")
    return {
        "passage_prompt": _find_prompt(prompt_by_name, _PASSAGE_PROMPTS),
        "question_prompt": _find_prompt(prompt_by_name, _QUESTION_PROMPTS),
    }


def read_modules(folder: Path) -> dict[str, str]:
    """Return the path of each module by its class name; see `list_modules`."""
    return dict(list_modules(folder))


def list_modules(folder: Path) -> list[tuple[str, str]]:
    """Return (class name such as `Pooling`, path) of each module of a folder.

    Raises:
        InputError: `modules.json` is damaged.
    """
    modules = read_json(folder / MODULES)
    try:
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in modules]
    except (TypeError, KeyError) as error:
        raise InputError(f"encoder file {folder / MODULES} is corrupt: fetch it again") from error


def read_supported_modules(folder: Path, supported_types: Sequence[str]) -> dict[str, str]:
    """Read the modules of a folder like `read_modules`, and check that all types are supported.

    Raises:
        InputError: a type is not supported, or `modules.json` is damaged.
    """
    modules = read_modules(folder)
    if unknown_modules := sorted(modules.keys() - {*supported_types}):
        raise InputError(
            f"encoder {folder} has a {unknown_modules[0]} module, which is not supported: "
            f"use a model of {', '.join(supported_types[:-1])} and {supported_types[-1]}"
        )
    return modules


def _read_pooling(path: Path) -> str:
    config = read_json_object(path)
    mode_setting = config.get("pooling_mode")
    mode_keys = [name for name, is_enabled in config.items() if name.startswith("pooling_mode_") and is_enabled is True]
    mode_keys += [mode_setting] if isinstance(mode_setting, str) else list(mode_setting or [])
    if len(mode_keys) != 1 or mode_keys[0] not in _POOLING_BY_MODE:
        raise InputError(
            f"encoder file {path} requests pooling {'+'.join(mode_keys) or 'none'}, which is not "
            "supported: use a model that pools by cls, mean or last token"
        )
    if config.get("include_prompt") is False:
        raise InputError(f"encoder file {path} pools without the prompt, which is not supported: use another model")
    return _POOLING_BY_MODE[mode_keys[0]]


def _read_max_length(folder: Path) -> int:
    limit = read_optional_json(folder / "sentence_bert_config.json").get("max_seq_length")
    if not limit or limit >= _UNBOUNDED:
        return read_max_tokens(folder)
    # sentence-transformers uses this limit instead of the tokenizer's `model_max_length`.
    return min(int(limit), read_position_limit(folder) or int(limit))


def _find_prompt(prompts: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((str(prompts[name] or "") for name in names if name in prompts), "")


def _check_text_case(folder: Path) -> None:
    """Check that the tokenizer converts texts to lower case if the model expects it.

    Raises:
        InputError: the tokenizer keeps upper case.
    """
    if not read_optional_json(folder / "sentence_bert_config.json").get("do_lower_case"):
        return
    # Older tokenizers, without a `tokenizer.json`, have their own setting for the conversion.
    rules = read_optional_json(folder / TOKENIZER)
    if rules and not _contains_rule(rules.get("normalizer"), _converts_to_lower_case):
        raise InputError(
            f"encoder {folder} expects texts in lower case (do_lower_case in "
            f"sentence_bert_config.json): add a Lowercase normalizer to its {TOKENIZER}"
        )


def read_missing_end_token(folder: Path) -> str:
    """Return the end token that the tokenizer's settings request but `tokenizer.json` does not add,
    or an empty string.

    transformers 4 added the token for `add_eos_token`; transformers 5 reads only `tokenizer.json`.

    Raises:
        InputError: the settings request an end token but do not name it.
    """
    settings = read_optional_json(folder / "tokenizer_config.json")
    if settings.get("add_eos_token") is not True:
        return ""
    end_token = settings.get("eos_token") or read_optional_json(folder / "special_tokens_map.json").get("eos_token")
    end_token = end_token.get("content") if isinstance(end_token, dict) else end_token
    if not isinstance(end_token, str) or not end_token:
        raise InputError(
            f"encoder file {folder / 'tokenizer_config.json'} sets add_eos_token but names no "
            "eos_token: fetch the model again"
        )
    post_processor = read_optional_json(folder / TOKENIZER).get("post_processor")
    return "" if _contains_rule(post_processor, lambda step: _find_last_token(step) == end_token) else end_token


def _contains_rule(rule: Any, matches: Callable[[Mapping[str, Any]], bool]) -> bool:
    """Return whether `matches` accepts a rule of `tokenizer.json`, or a step nested in it."""
    if not isinstance(rule, dict):
        return False
    sub_rules = rule.get("normalizers") or rule.get("processors") or []
    return matches(rule) or any(_contains_rule(sub_rule, matches) for sub_rule in sub_rules)


def _converts_to_lower_case(normalizer: Mapping[str, Any]) -> bool:
    return normalizer.get("type") == "Lowercase" or bool(normalizer.get("lowercase"))


def _find_last_token(post_processor: Mapping[str, Any]) -> Any:
    """Return the last special token of a post-processor, or None."""
    if post_processor.get("type") in {"RobertaProcessing", "BertProcessing"}:
        return (post_processor.get("sep") or [None])[0]
    template = post_processor.get("single") or [{}]
    return (template[-1].get("SpecialToken") or {}).get("id")


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a model on the hub, and the requested revision."""

    repository: str  # OWNER/NAME
    revision: str | None = None  # branch, tag, commit or refs/pr/NUMBER; the default is main

    def __str__(self) -> str:
        """Return the name as a user writes it."""
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Parse `OWNER/NAME` or `OWNER/NAME@REVISION`; return None for the name of a folder.

        >>> HubName.parse("facebook/rag-token-nq@refs/pr/3")
        HubName(repository='facebook/rag-token-nq', revision='refs/pr/3')

        Raises:
            InputError: the text after the @ cannot be a revision.
        """
        match = _HUB_NAME.fullmatch(name)
        if match is None:
            return None
        if match["revision"] is not None and not _REVISION.fullmatch(match["revision"]):
            raise InputError(
                f"{name!r} has no valid revision after the @: write NAME@REVISION, with a branch, "
                "a tag, a commit or refs/pr/NUMBER"
            )
        return cls(match["repository"], match["revision"])


def resolve_folder(name: str | Path) -> Path:
    """Return the local folder of model `name`: a folder, or a hub name such as
    `intfloat/e5-small-v2` or `facebook/rag-token-nq@refs/pr/3`.

    Raises:
        InputError: there is no such folder, and the hub has no such model or revision, or cannot
            be reached.
        UsageError: the name is a URL that may contain a secret, or names a model behind an
            endpoint.
    """
    if Path(name).is_dir():
        return Path(name).resolve()
    refuse_secret(str(name))
    if str(name).startswith(ENDPOINT_PREFIX):
        raise UsageError(
            f"{name} is a model behind an endpoint, which cannot be used here: give a folder or a hub name"
        )
    hub_name = None if isinstance(name, Path) else HubName.parse(name)
    if hub_name is None:
        raise InputError(f"there is no model folder {name}: give a folder, or a hub name such as intfloat/e5-small-v2")
    return download(hub_name)


def download(hub_name: HubName, patterns: Sequence[str] = DOWNLOAD_PATTERNS) -> Path:
    """Fetch the files of a hub model that match `patterns`; return their folder in the hub's cache.

    Without a network, files that were downloaded before are used.

    Raises:
        InputError: the hub has no such model or revision, or cannot be reached.
    """
    hub = require("huggingface_hub", "model")
    repository, revision = hub_name.repository, hub_name.revision
    try:
        return Path(
            hub.snapshot_download(
                repository,
                revision=revision,
                allow_patterns=[*patterns],
                ignore_patterns=_RUNTIME_EXPORTS,
                endpoint=os.environ.get("HF_ENDPOINT") or None,
            )
        )
    except hub.errors.RevisionNotFoundError as error:
        raise InputError(
            f"model {repository} has no revision {revision} on the hub: give a branch, a tag, a "
            "commit or refs/pr/NUMBER after the @, or omit it"
        ) from error
    except Exception as error:  # the hub may also raise any exception of its HTTP library
        # The hub's client raises these errors if the hub does not answer and the model was not
        # downloaded before.
        is_hub_unreachable = isinstance(error, hub.errors.LocalEntryNotFoundError | hub.errors.OfflineModeIsEnabled)
        failure_cause = f"the hub cannot be reached from here ({_summarize_error(error.__cause__ or error)})"
        if not is_hub_unreachable:
            failure_cause = f"the hub refuses the download ({_summarize_error(error)})"
        raise InputError(
            f"model {hub_name} is not a local folder, and {failure_cause}: check the "
            f"{'network' if is_hub_unreachable else 'name and the token'}, or give a local folder"
            f"{_DEMO_ADVICE.get(repository, '')}"
        ) from error


def find_hub_name(folder: Path) -> str:
    """Return `NAME@COMMIT` for a folder in the hub's cache; an empty string for any other folder.

    >>> find_hub_name(Path("/cache/models--me--tiny/snapshots") / ("0123456789" * 4))
    'me/tiny@0123456789012345678901234567890123456789'
    """
    hub_match = _HUB_FOLDER.fullmatch("/".join(folder.parts[-3:]))
    return f"{hub_match['owner']}/{hub_match['model']}@{hub_match['commit']}" if hub_match else ""


def pin_hub_name(name: str) -> str:
    """Return a hub name with its current commit; other names are returned unchanged.

    Raises:
        InputError: as for `resolve_folder`.
    """
    if Path(name).is_dir() or HubName.parse(name) is None:
        return name
    return find_hub_name(resolve_folder(name)) or name


def _summarize_error(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    first_line = next(iter(str(error).strip().splitlines()), "")[:120]
    return f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__


def derive_question_encoder_name(name: str) -> str:
    """Return the name of the question encoder of a passage encoder; usually the two are equal.

    >>> derive_question_encoder_name("facebook/dpr-ctx_encoder-single-nq-base")
    'facebook/dpr-question_encoder-single-nq-base'

    Raises:
        UsageError: the name has a revision, which applies only to the passage encoder.
    """
    hub_name = HubName.parse(name)
    owner, slash, model_name = (hub_name.repository if hub_name else name.rstrip("/")).rpartition("/")
    if "ctx_encoder" not in model_name:
        return name.rstrip("/")
    question_encoder = owner + slash + model_name.replace("ctx_encoder", "question_encoder")
    if hub_name and hub_name.revision and not Path(name).is_dir():
        # In the other repository, a pull request with the same number may be by a different author.
        raise UsageError(
            f"the revision of {name} does not apply to its question encoder, which is another "
            "model: write "
            f'question_encoder = "{question_encoder}@REVISION" in the recipe, or give folders of both'
        )
    return question_encoder


def list_tokenizer_files(folder: Path) -> list[Path]:
    """List the files that determine the tokens of a text: only `tokenizer.json` if it exists.

    Raises:
        InputError: there are no such files.
    """
    if (folder / TOKENIZER).is_file():
        return [folder / TOKENIZER]
    legacy_files = [folder / name for name in _LEGACY_TOKENIZER_FILES if (folder / name).is_file()]
    if not legacy_files:
        raise InputError(f"encoder {folder} has no {TOKENIZER}: give the folder of a Hugging Face model")
    settings = folder / "tokenizer_config.json"
    return [*legacy_files, settings] if settings.is_file() else legacy_files


def read_vocabulary_size(folder: Path) -> int:
    """Return the vocabulary size of the model in `folder`.

    Raises:
        InputError: the model's config has no vocabulary size.
    """
    vocab_size = read_json_object(folder / CONFIG).get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise InputError(f"model file {folder / CONFIG} has no vocab_size: give the folder of a masked-language model")
    return vocab_size


def find_onnx_file(folder: Path) -> Path | None:
    """Return the ONNX file of a model's folder, or None."""
    return next((folder / name for name in _ONNX_FILES if (folder / name).is_file()), None)
