"""The contract of `docs/extend/retriever.md`, checked for every built-in retriever and for the examples."""

import os
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rag_model.corpus.ragged_file import TokenWriter
from rag_model.corpus.records import Passage
from rag_model.encoders.encoder import Encoder, load_any_encoder
from rag_model.encoders.token_encoder import TokenEncoder, collect_token_encoder_files, compute_token_space
from rag_model.errors import RefusedError
from rag_model.index.build import run_stages
from rag_model.index.kind import get_kind_for_factory
from rag_model.index.recipe import IndexRecipe
from rag_model.retrieve.context import RetrieverContext
from rag_model.retrieve.factory import CALLS, build_retriever, open_retriever, plan_retriever
from rag_model.retrieve.retriever import Queries
from rag_model.store.pulling.pull import pull
from rag_model.store.store import Store
from rag_model.store.versions.manifest import EMBEDDINGS, Content, Manifest, question_encoder_path
from rag_model.store.versions.snapshot import Snapshot
from tests.fixtures import diversity_retriever, interleave_retriever
from tests.fixtures.plugin_package import install_package
from tests.fixtures.tiny import save_cross_encoder
from tests.fixtures.tiny_colbert import save_colbert
from tests.rag_model.retrieve.test_factory import CountingEncoder

QUERIES = ["who wrote animal farm?", "which unit measures electric current", "what relieves pain?"]
# An expression for each call. A new built-in call must be added here.
BUILT_IN = {
    "interpolate": "interpolate(hnsw, ivfpq, 1.3)",
    "maxsim": "maxsim(ivfpq:4, tokens, 8)",
    "rerank": "rerank(hnsw, {model}, 6)",
    "rrf": "rrf(hnsw, ivfpq, weights=[1, 2])",
    "where": "where(hnsw, kind=prose)",
}
INDEXES = {name: name for name in ("hnsw", "ivfpq", "exact", "tokens")}
PLUGINS = {"interleave": "interleave(hnsw, exact)", "diversify": "diversify(hnsw, 8)"}
EXPRESSIONS = [*INDEXES.values(), "hnsw:5", *BUILT_IN.values(), *PLUGINS.values(), "rrf(diversify(hnsw), ivfpq)"]


@pytest.fixture(scope="module")
def library(
    content: tuple[Store, Content], passages: list[Passage], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Store, Snapshot]:
    """Publish the snapshot of the other tests with an index of token vectors."""
    store, base_content = content
    work = tmp_path_factory.mktemp("tokens")
    encoder = TokenEncoder.load(save_colbert(work / "colbert"))
    with TokenWriter(work / "tokens.arrow", encoder.dim, "float16") as writer:
        writer.write(
            encoder.encode_passages([passage.title for passage in passages], [passage.text for passage in passages])
        )
    plan = get_kind_for_factory("MaxSim").plan(IndexRecipe("MaxSim,PQ8", over="tokens"), len(passages), encoder.dim)
    run_stages(plan, [work / "tokens.arrow"], work / "index", work)
    space = compute_token_space(encoder.folder, encoder.spec)
    files = {"index/tokens.safetensors": work / "index"}
    for name, path in collect_token_encoder_files(encoder.folder, encoder.spec, space, work).items():
        files[f"{question_encoder_path('tokens')}/{name}"] = path
    extended = replace(
        base_content,
        files={**base_content.files, **{name: store.blobs.put_file(path) for name, path in files.items()}},
        representations={**base_content.representations, "tokens": {"kind": "tokens", "space": space.to_json()}},
        indexes={**base_content.indexes, "tokens": plan.entry() | {"file": "index/tokens.safetensors"}},
    )
    return store, Snapshot.from_store(store, store.snapshots.publish(Manifest(extended)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a cross-encoder."""
    return save_cross_encoder(tmp_path_factory.mktemp("cross") / "model")


@pytest.fixture(scope="module", autouse=True)
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the examples as packages."""
    folder = tmp_path_factory.mktemp("plugins")
    entry_points = "interleave = interleave_retriever:build\ndiversify = diversity_retriever:build"
    install_package(folder, "retrievers", entry_points, interleave_retriever.__file__, diversity_retriever.__file__)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(CALLS, "_loaded", {})
        yield
    for name in ("interleave_retriever", "diversity_retriever"):
        sys.modules.pop(name, None)


def test_every_registered_call_has_an_expression_here() -> None:
    assert {*BUILT_IN, *PLUGINS} == {*CALLS.list_names()}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_planning_opens_nothing(library: tuple[Store, Snapshot], model: Path, expression: str) -> None:
    store, snapshot = library
    bare = Snapshot.from_manifest(store, Manifest(replace(snapshot.manifest.content, files={})))
    text = expression.format(model=model)
    assert plan_retriever(bare, text) == plan_retriever(snapshot, text)
    context = RetrieverContext(bare)
    composed = build_retriever(context, text, products=True)
    assert composed.retriever.most > 0
    assert context.loaded_encoder is None


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("hnsw:5", "hnsw"),
        ("rrf(hnsw, ivfpq, k=60, weights=[1, 1]):9", "rrf(hnsw, ivfpq)"),
        ("rrf(hnsw:5, ivfpq, weights=[2,1], k=1)", "rrf(hnsw:5, ivfpq, weights=[2, 1], k=1)"),
        ("rrf(rrf(hnsw, exact, k=60):7, hnsw(efSearch=9):5)", "rrf(rrf(hnsw, exact):7, hnsw(efSearch=9):5)"),
        ("interpolate(hnsw:5, rrf(hnsw, exact, k=2), alpha=.5)", "interpolate(hnsw:5, rrf(hnsw, exact, k=2), 0.5)"),
        ("rerank(hnsw, '/a folder/m', 50)", "rerank(hnsw, '/a folder/m')"),
        ("rerank(rrf(hnsw, ivfpq:4, k=9):20, model:ce, 6)", "rerank(rrf(hnsw, ivfpq:4, k=9):20, model:ce, 6)"),
        ("maxsim(ivfpq, tokens, 500, rounds=1)", "maxsim(ivfpq, tokens)"),
        ("maxsim(ivfpq:4, tokens, 8, graph=hnsw, rounds=2)", "maxsim(ivfpq:4, tokens, 8, graph=hnsw, rounds=2)"),
    ],
)
def test_name_has_all_settings_except_defaults(library: tuple[Store, Snapshot], expression: str, name: str) -> None:
    context = RetrieverContext(library[1])
    assert build_retriever(context, expression).retriever.name == name
    assert build_retriever(context, name).retriever.name == name, "the name is an expression of the same retriever"


@pytest.mark.parametrize(
    "expression", [*INDEXES.values(), "rrf(hnsw:{n}, ivfpq)", "rrf(hnsw, exact)", "maxsim(hnsw, tokens, {n})"]
)
def test_a_search_of_any_depth_is_full(library: tuple[Store, Snapshot], encoder: Encoder, expression: str) -> None:
    _, snapshot = library
    retriever = open_retriever(snapshot, expression.format(n=snapshot.n), embeddings_encoder=encoder)
    for k in range(1, snapshot.n + 1):
        assert [len(hits) for hits in retriever.search(QUERIES, k)] == [k] * len(QUERIES)


def test_encoder_is_used_only_for_indexes_in_its_space(library: tuple[Store, Snapshot]) -> None:
    _, snapshot = library
    folders = {name: snapshot.folder(question_encoder_path(name)) for name in (EMBEDDINGS, "tokens")}
    encoders = {name: CountingEncoder(load_any_encoder(folder)) for name, folder in folders.items()}
    for representation, expressions in {
        EMBEDDINGS: ("hnsw", "rrf(hnsw, tokens)", "maxsim(ivfpq:4, tokens, 8)"),
        "tokens": ("tokens", "rrf(hnsw, tokens)", "maxsim(ivfpq:4, tokens, 8)"),
    }.items():
        for expression in expressions:
            expected = open_retriever(snapshot, expression).search(QUERIES, 4)
            for encoder in (encoders[representation], str(folders[representation])):
                assert open_retriever(snapshot, expression, encoder=encoder).search(QUERIES, 4) == expected
        assert encoders[representation].calls == [len(QUERIES)] * len(expressions)
    for representation, expression in ((EMBEDDINGS, "tokens"), ("tokens", "hnsw")):
        for encoder in (encoders[representation], str(folders[representation])):
            with pytest.raises(RefusedError, match="cannot search a snapshot of encoder"):
                open_retriever(snapshot, expression, encoder=encoder)
            # The inner products with the vectors need queries in the space of these vectors.
            open_retriever(snapshot, "tokens", encoder=encoder, products=True).search(QUERIES, 4)


@pytest.fixture(scope="module")
def encoder_folder(library: tuple[Store, Snapshot], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pull passages and encoders, of 90 MB, into a folder that the tests link instead of pulling them again."""
    store, snapshot = library
    folder = tmp_path_factory.mktemp("encoders")
    pull(store, snapshot.id, folder, select=lambda path: path.startswith(("passages/", "encoder")))
    return folder


@pytest.mark.parametrize("products", [False, True])
@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_needs_are_all_files_that_a_search_reads(
    library: tuple[Store, Snapshot],
    encoder: Encoder,
    model: Path,
    encoder_folder: Path,
    tmp_path: Path,
    expression: str,
    products: bool,
) -> None:
    """A folder with passages, encoders and the needed files answers like the store."""
    store, snapshot = library
    text = expression.format(model=model)
    needs = plan_retriever(snapshot, text, products=products)
    files = needs.files(snapshot)
    dest = shutil.copytree(encoder_folder, tmp_path / "dest", symlinks=True, copy_function=os.link)
    pull(store, snapshot.id, dest, select=files.__contains__)
    with Snapshot.from_folder(dest) as pulled:
        results = open_retriever(pulled, text, products=products).search(QUERIES, 4)
    assert results == open_retriever(snapshot, text, embeddings_encoder=encoder, products=products).search(QUERIES, 4)
    assert needs.reads_vectors(snapshot.manifest.content) == any(path.startswith("embeddings/") for path in files)
    if products:
        assert all(hit.inner_product is not None for hits in results for hit in hits)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_rows_are_distinct_and_queries_independent(
    library: tuple[Store, Snapshot], encoder: Encoder, model: Path, expression: str
) -> None:
    _, snapshot = library
    retriever = open_retriever(snapshot, expression.format(model=model), embeddings_encoder=encoder)
    k = min(5, retriever.most)
    ranking = retriever.find(Queries(QUERIES), k)
    assert ranking.rows.shape == ranking.scores.shape
    assert ranking.rows.shape[1] <= k
    for row_list, scores in zip(ranking.rows, ranking.scores, strict=True):
        valid = row_list >= 0
        assert not valid[np.argmin(valid) :].any() or valid.all(), "-1 is only after the last row"
        assert len(set(row_list[valid].tolist())) == valid.sum()
        assert (np.diff(scores[valid]) <= 0).all()
    with ThreadPoolExecutor(4) as pool:
        singles = list(pool.map(lambda text: retriever.search([text], k)[0], QUERIES * 3))
    for single, hits in zip(singles, retriever.search(QUERIES, k) * 3, strict=True):
        assert [hit.row for hit in single] == [hit.row for hit in hits]
        assert {leg.leg for hit in single for leg in hit.legs} <= {step.name for step in ranking.iter_lists()}
