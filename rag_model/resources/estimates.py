"""Estimate the work of builds and evaluations from the sizes of their inputs.

The work of a build is estimated from the sizes of its dump and its encoder, without reading them.
The estimate is an upper bound: the share of prose in the dump is unknown, so almost the whole dump
is assumed to be prose. After chunking, `snapshots.planning` uses the real number of passages.
"""

from collections.abc import Collection, Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_model.corpus.dump_formats.document_files import find_dump_files
from rag_model.corpus.records import SiteSettings, is_wiki_site
from rag_model.corpus.source import basename, get_size
from rag_model.encoders.architecture import Architecture, read_architecture
from rag_model.encoders.files import CONFIG, read_dim
from rag_model.encoders.spec import DIM, read_encoder_spec
from rag_model.index.kind import get_kind, get_kind_for_factory
from rag_model.index.plan import IndexPlan
from rag_model.index.postings.impact import ROW_FILE_BYTES
from rag_model.index.recipe import IndexRecipe
from rag_model.index.tokens.kind import TOKENS_PER_PASSAGE
from rag_model.resources import (
    CHUNK_SECONDS,
    MEMORY_MARGIN,
    PASSAGE_TOKENS,
    PROCESS_BYTES,
    PROMPT_TOKENS,
    QUESTION_TOKENS,
    STATIC_ENCODE_SECONDS,
    WorkEstimate,
    estimate_decoding_bytes,
    estimate_weight_bytes,
)
from rag_model.retrieve.expression import Call, Node, Word
from rag_model.retrieve.factory import plan_retriever
from rag_model.retrieve.rerank import DEFAULT_MAXSIM_DEPTH, MAX_MAXSIM_DEPTH
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EXACT
from rag_model.store.versions.model_manifest import GENERATOR, QUESTION
from rag_model.store.versions.snapshot import Snapshot

if TYPE_CHECKING:
    from rag_model.evaluation.answers.settings import EvaluationSettings

DEFAULT_MAX_WORDS = 120  # maximum words of a passage for which the constants below were measured
# Upper bound of the mean number of passages per article; it is 54 in the demo's long articles.
_PASSAGES_PER_ARTICLE = 60
# Source bytes per passage of the default chunker, by file ending. Measured on the demo's dump,
# which is mostly prose, and on psgs_w100.tsv; a whole Wikipedia has twice as many bytes per
# passage.
_BYTES_PER_PASSAGE = {
    **{".bz2": 312, ".gz": 320, ".xz": 300, ".zst": 320, ".7z": 300},
    **{".parquet": 240, ".xml": 1124, ".tsv": 650},
}
_DEFAULT_BYTES_PER_PASSAGE = 520  # for sources with other file endings

_BATCH_QUESTIONS = 8  # number of questions that are decoded at once, as in `MarginalReader`
_HIT_BYTES = 4000  # bytes of a retrieved passage in memory
# A core compares vectors with this many floating-point operations per second, and reads and decodes
# the token vectors of one candidate in this many seconds (measured in docs/howto/reproduce.md).
_COMPARE_RATE, _DECODE_SECONDS = 7e10, 1e-4
# The architecture of a generator behind an endpoint, which uses no local resources.
_REMOTE_GENERATOR = Architecture(parameters=0, layers=0, hidden=0, heads=0, vocabulary=0)


def estimate_passages(dump: str, max_words: int, limit: int | None = None) -> int:
    """Return an approximate upper bound of the number of passages.

    Args:
        dump: URL, path or glob, as for `reindex`.
        max_words: maximum words of a passage.
        limit: maximum number of articles.

    Raises:
        InputError: there is no such dump.
    """
    if is_wiki_site(dump):
        from rag_model.corpus.dump_formats.wiki_site import plan_site_dry_run  # noqa: PLC0415 - imports httpx

        return max(1, ceil(plan_site_dry_run(dump, SiteSettings())[1] / _BYTES_PER_PASSAGE[".xml"]))
    urls = find_dump_files(dump).urls
    n_passages = sum(
        get_size(url) / _BYTES_PER_PASSAGE.get(Path(basename(url)).suffix.lower(), _DEFAULT_BYTES_PER_PASSAGE)
        for url in urls
    )
    if limit is not None:
        n_passages = min(n_passages, limit * _PASSAGES_PER_ARTICLE)
    return max(1, ceil(n_passages * DEFAULT_MAX_WORDS / max_words))


def estimate_row_bytes(representation_type: str, d: int) -> int:
    """Estimate the bytes of a passage's row in a file.

    A row is its text, weighted terms, or vectors of `d` components in float16.
    """
    return {
        "text": _BYTES_PER_PASSAGE[".parquet"],
        "sparse": ROW_FILE_BYTES,
        "vectors": 2 * d,
        "tokens": 2 * d * TOKENS_PER_PASSAGE,
    }[representation_type]


# Largest relative error of an estimated build time (all stages together), by index kind. Measured
# on builds of 20,000, 60,000 and 200,000 vectors of 96 dimensions, and of 20,000 and 60,000 vectors
# of 768 dimensions (`tests/benchmarks/bench_plan.py`).
SECONDS_ERROR = {"hnsw": 0.12}


def estimate_stage_seconds(plan: IndexPlan, d: int = 0) -> dict[str, float]:
    """Return the seconds that each stage takes on one core, for vectors of `d` components (0 for
    text indexes).

    The rates were measured on one processor with AVX512; other processors may need twice the time.
    """
    kind, tasks_by_stage = get_kind(plan.kind), {"train": 1, "scatter": 1, "shard": plan.shards, "merge": 1}
    input_bytes = plan.n * estimate_row_bytes(kind.represents, d)
    return {stage: n * kind.seconds(plan, stage, plan.n // n, input_bytes) for stage, n in tasks_by_stage.items() if n}


def estimate_query_seconds(tree: Node, n_passages: int, d: int, token_indexes: Collection[str]) -> float:
    """Estimate the seconds that exact search and MaxSim take for one query, on one core.

    Other indexes take milliseconds and are not counted, and neither are reranking models.

    Args:
        tree: the parsed expression of the retriever.
        n_passages: number of passages.
        d: dimension of their vectors.
        token_indexes: names of the indexes over token vectors.

    Raises:
        UsageError: the number of passages of a `maxsim` call is invalid.
    """
    n_candidates = 0
    maxsim_operations = QUESTION_TOKENS * TOKENS_PER_PASSAGE * 2.0 * DIM  # per passage
    if isinstance(tree, Word):
        name = tree.split_depth()[0]
        if name in token_indexes:
            return n_passages * maxsim_operations / _COMPARE_RATE
        return 2.0 * d * n_passages / _COMPARE_RATE if name == EXACT else 0.0
    if not isinstance(tree, Call):
        return 0.0
    child_nodes = tree.arguments
    if tree.name == "maxsim":
        n_candidates = min(n_passages, tree.get_int(2, DEFAULT_MAXSIM_DEPTH, 1, MAX_MAXSIM_DEPTH))
        child_nodes = child_nodes[:1]
    seconds = n_candidates * (maxsim_operations / _COMPARE_RATE + _DECODE_SECONDS)
    return seconds + sum(estimate_query_seconds(child_node, n_passages, d, token_indexes) for child_node in child_nodes)


def estimate_build(
    n_passages: int,
    encoder: Path,
    indexes: Mapping[str, IndexRecipe],
    memory: int | None,
    settings: Mapping[str, Any] | None = None,
) -> WorkEstimate:
    """Estimate the work of a build, by stage.

    Args:
        n_passages: number of passages.
        encoder: folder of the passage encoder.
        indexes: the recipes of the indexes, by name.
        memory: memory limit in bytes, for which the indexes are planned; None if unknown.
        settings: fields of the encoder's spec that the recipe sets.

    Raises:
        InputError: The folder is not an encoder.
        ResourceError: An index does not fit into memory; the message proposes one that does.
    """
    model = read_architecture(encoder)
    d = read_encoder_spec(encoder, settings).truncate_dim or (read_dim(encoder) if model.layers else model.hidden)
    return estimate_build_for_architecture(n_passages, model, d, indexes, memory)


def estimate_build_for_architecture(
    n_passages: int, architecture: Architecture, d: int, indexes: Mapping[str, IndexRecipe], memory: int | None
) -> WorkEstimate:
    """Estimate the work of a build with an encoder of the given architecture and `d` dimensions.

    Raises:
        ResourceError: An index does not fit into memory; the message proposes one that does.
    """
    memory_by_stage = {"chunk": PROCESS_BYTES, "embed": PROCESS_BYTES + 2 * estimate_weight_bytes(architecture)}
    seconds, disk_bytes = n_passages * (CHUNK_SECONDS + STATIC_ENCODE_SECONDS), 0
    # At least PROCESS_BYTES, because the encoder needs that much.
    index_memory_bytes = max(PROCESS_BYTES, int(memory / MEMORY_MARGIN) - PROCESS_BYTES) if memory else None
    for recipe in indexes.values():
        kind = get_kind_for_factory(recipe.factory)
        dim = {"vectors": d, "tokens": DIM}.get(kind.represents, 0)
        plan = kind.plan(recipe, n_passages, dim, memory=index_memory_bytes)
        index_estimate = kind.estimate(plan)
        disk_bytes += index_estimate.work_bytes
        seconds += sum(estimate_stage_seconds(plan, dim).values())
        memory_by_stage |= {
            stage: max(task_bytes, memory_by_stage.get(stage, 0)) for stage, task_bytes in index_estimate.stages.items()
        }
    work_sizes = {"passages, about": f"{n_passages:,}"}
    return WorkEstimate(
        work_sizes,
        memory_by_stage,
        n_passages * PASSAGE_TOKENS * architecture.operations_per_token,
        seconds,
        disk_bytes,
        workers=True,
    )


def estimate_retriever_bytes(snapshot: Snapshot, retriever: str | None) -> int:
    """Estimate the memory of a retriever's indexes: the bytes of their files and of the vectors
    they read.

    `retriever` is an expression; None: the snapshot's default. Reranking models are not counted.

    Raises:
        UsageError: The expression is invalid, or the snapshot has no such index.
    """
    return sum(plan_retriever(snapshot, retriever).files(snapshot).values())


def estimate_evaluation(
    store: str, model: str, questions: str, ref: str, settings: "EvaluationSettings | None", **_: Any
) -> WorkEstimate:
    """Estimate the work of an evaluation from the parameters of the flow `evaluate`.

    Raises:
        BookwheelError: A model, the snapshot or the questions cannot be read, or an index is
            missing.
    """
    # Imported here because they import torch, which estimates of builds do not need.
    from rag_model.evaluation.answers.settings import EvaluationSettings  # noqa: PLC0415
    from rag_model.evaluation.questions import read_questions  # noqa: PLC0415
    from rag_model.generate.rag_folder import is_rag_folder, read_rag_settings  # noqa: PLC0415
    from rag_model.reading.concat import CONCAT_K  # noqa: PLC0415
    from rag_model.reading.model import find_model_folder, resolve_model_id  # noqa: PLC0415

    opened_store, settings = Store.open(store), settings or EvaluationSettings()
    n_questions = len(read_questions(questions).questions)
    folder = find_model_folder(opened_store, resolve_model_id(opened_store, model))
    snapshot = Snapshot.from_store(opened_store, ref)
    k = settings.k or (read_rag_settings(folder).k if folder and is_rag_folder(folder) else CONCAT_K)
    architectures = _list_architectures(folder)
    # Number of passages that each condition reads; a prompt with k passages counts as k prompts
    # with one passage. The reader `auto` adds the answers without passages.
    passage_counts = [1 if name == "auto" else k for name in settings.build_reader_settings(model)]
    if settings.ablations:
        # Closed book, gold passage, shuffled passages, and the sweep over k.
        passage_counts += [1, 1, k, *settings.ablations.sweep]
    generator, beams, answer_tokens = architectures[-1], settings.decoding.beams, settings.decoding.token_limit
    retrieval_bytes = (
        estimate_weight_bytes(*architectures)
        + estimate_retriever_bytes(snapshot, settings.expression)
        + n_questions * settings.search_depth(k) * _HIT_BYTES
    )
    decoding_bytes = estimate_decoding_bytes(generator, _BATCH_QUESTIONS * max(passage_counts) * beams, answer_tokens)
    n_tokens = PROMPT_TOKENS + answer_tokens * (beams + max(passage_counts))  # per passage
    work_sizes = {"questions": f"{n_questions:,}", "conditions": f"{len(passage_counts):,}"}
    memory_by_stage = {"retrieve": retrieval_bytes, "answer": retrieval_bytes + decoding_bytes}
    n_operations = n_questions * sum(passage_counts) * n_tokens * generator.operations_per_token
    return WorkEstimate(work_sizes, memory_by_stage, n_operations)


def _list_architectures(folder: Path | None) -> list[Architecture]:
    """Return the architectures of a model's parts, with the generator at the end."""
    from rag_model.generate.rag_folder import is_rag_folder  # noqa: PLC0415 - imports torch

    if folder is None:
        return [_REMOTE_GENERATOR]
    if not is_rag_folder(folder):
        return [read_architecture(folder)]
    if (folder / CONFIG).is_file():  # transformers' layout
        return [read_architecture(folder, part) for part in ("question_encoder", "generator")]
    return [read_architecture(folder / model_part) for model_part in (QUESTION, GENERATOR)]
