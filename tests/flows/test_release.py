"""The flow `release`, which rebuilds, trains, evaluates, and moves the ref that services follow."""

import bz2
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema

from flows.release import ReleaseTraining, find_initial_move, find_withdrawal, move_refs
from flows.release import release as flow
from flows.start_reindex import start_reindex
from rag_model.errors import RefConflictError, RefusedError
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.gate import ReleaseCriteria
from rag_model.store.store import Store
from rag_model.store.versions.models import ModelMetadata, put_model
from rag_model.store.versions.moves import tag
from tests.fixtures.forked_processes import ForkedCommand
from tests.fixtures.store_files import publish_blobs, publish_empty, put_weights
from tests.fixtures.tiny_generators import save_bart
from tests.fixtures.tiny_rag import save_tiny_rag

TRAINING = """
kind = "rag-sequence"
name = "reader"
max_steps = 1
train = "{train}"
dev = "{dev}"
generator = "{generator}"

[recipe.loop]
learning_rate = 1e-3
cpu = true

[recipe.rag]
k = 2
batch_size = 2
answered = 2
max_new_tokens = 3
refuse_collapse = false
"""


@pytest.fixture(scope="module")
def grown_dump(demo_dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The next dump, with a few more pages."""
    path = tmp_path_factory.mktemp("grown") / "grown.xml.bz2"
    pages = bz2.decompress(demo_dump.read_bytes()).split(b"</page>\n")[:55]
    path.write_bytes(bz2.compress(b"</page>\n".join([*pages, b"</mediawiki>\n"])))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    answers = {"What is anarchism?": "anarchism", "What is autism?": "autism", "Where is Albedo used?": "albedo"}
    rows = [{"question": question, "answers": [answer]} for question, answer in answers.items()]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def release(
    bookwheel: Callable[..., Any], store: Path, tiny: Path, recipe: Path, questions: Path, mini_dump: Path
) -> Callable[..., Any]:
    """Run `release --json`, by default on the copy of the library."""

    def run(*flags: object, dump: Path = mini_dump, into: Path = store) -> Any:
        options = {"dump": dump, "store": into, "questions": questions, "encoder": tiny, "recipe": recipe}
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        return bookwheel("release", *words, *flags, "--json")

    return run


def read_refs(store: Path) -> dict[str, tuple[int, str]]:
    """Return the number and the snapshot of the current move of each ref."""
    opened_store = Store.open(str(store))
    moves = {name: opened_store.refs.find_current(name) for name in opened_store.refs.list_names()}
    return {name: (move.number, move.snapshot) for name, move in moves.items() if move}


def read_mtimes(store: Path) -> dict[str, float]:
    paths = [path for path in store.rglob("*.json") if path.parent.name not in ("intents", "sweeps")]
    return {str(path): path.stat().st_mtime for path in paths}


@pytest.mark.usefixtures("prefect_server")
def test_first_release_moves_ref_and_second_does_nothing(
    release: Callable[..., Any], tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    fresh = tmp_path / "fresh"
    result = release("--floor", "Success@20=0.1", into=fresh)
    assert result.code == 0, result.err
    first = result.json
    assert first["done"] == {"reindex": True, "evaluate": True, "move": True}
    assert (first["number"], first["present"], first["nothing_new"]) == (1, None, False)
    assert read_refs(fresh) == dict.fromkeys(["latest", "latest-candidate"], (1, first["snapshot"]))
    (move,) = bookwheel("log", "--store", fresh, "--json").json
    assert move["note"] == f"release, evaluation {first['evaluation'][:12]}"
    (listed,) = bookwheel("show", "--store", fresh, "--json").json["evaluations"]
    assert listed["id"] == first["evaluation"]

    mtimes_before = read_mtimes(fresh)
    second = release("--floor", "Success@20=0.1", into=fresh).json
    assert second["done"] == {"reindex": False, "evaluate": False, "move": False}
    assert (second["nothing_new"], second["number"], second["evaluation"]) == (True, 1, first["evaluation"])
    assert read_mtimes(fresh) == mtimes_before
    with get_client(sync_client=True) as client:
        query = {"artifacts": {"key": {"like_": "release-steps"}}, "sort": "CREATED_DESC", "limit": 1}
        (artifact,) = client.request("POST", "/artifacts/filter", json=query).json()
    assert {"what": "reindex", "value": "as before"} in json.loads(artifact["data"])
    assert "latest@1 names it" in artifact["description"]


def test_refused_candidate_stays_and_is_released_later(
    release: Callable[..., Any], store: Path, grown_dump: Path, bookwheel: Callable[..., Any]
) -> None:
    refs_before = read_refs(store)
    refused = release("--floor", "RR@20=0.999", dump=grown_dump)
    assert refused.code == 3
    reply = refused.json
    assert reply["snapshot"] != refs_before["latest"][1]
    assert read_refs(store) == {**refs_before, "latest-candidate": (1, reply["snapshot"])}
    assert f"latest did not move to snapshot {reply['snapshot'][:12]}: RR@20 is " in refused.err
    assert f"`show evaluation:{reply['evaluation'][:12]}`" in refused.err
    assert bookwheel("show", f"evaluation:{reply['evaluation']}", "--store", store).code == 0
    assert reply["done"] == {"reindex": True, "evaluate": True, "move": False}
    parents = bookwheel("show", "latest-candidate", "--store", store, "--json").json["parents"]
    assert parents == [refs_before["latest"][1]]

    comparison = bookwheel(
        "diff", f"evaluation:{reply['present'][:12]}", f"evaluation:{reply['evaluation'][:12]}", "--store", store
    )
    assert comparison.code == 0, comparison.err

    accepted = release("--tolerance", 1, dump=grown_dump).json
    assert accepted["done"] == {"reindex": False, "evaluate": False, "move": True}
    assert accepted["evaluation"] == reply["evaluation"]
    assert read_refs(store)["latest"] == (2, reply["snapshot"])
    (check,) = accepted["gate"]["checks"]
    assert (check["name"], check["passed"]) == ("Success@20 against the present one", True)
    assert release("--tolerance", 1, dump=grown_dump).json["nothing_new"]


def test_loss_against_present_snapshot_is_refused(
    release: Callable[..., Any], store: Path, mini_dump: Path, tmp_path: Path
) -> None:
    """The candidate has no article about one of the three questions."""
    pages = bz2.decompress(mini_dump.read_bytes()).replace(b"utism", b"uxism").replace(b"AUTISM", b"AUXISM")
    (tmp_path / "poor.xml.bz2").write_bytes(bz2.compress(pages))
    latest_before = read_refs(store)["latest"]
    result = release(dump=tmp_path / "poor.xml.bz2")
    assert result.code == 3, result.out
    assert "Success@20 against the present one is -0.333 [-1.000, +0.000], from 1.000 to 0.667" in result.err
    assert read_refs(store)["latest"] == latest_before
    assert release("--tolerance", -1, dump=tmp_path / "poor.xml.bz2").json["number"] == 2


def test_rolled_back_snapshot_is_not_released_again(
    release: Callable[..., Any], store: Path, grown_dump: Path, bookwheel: Callable[..., Any]
) -> None:
    old_snapshot = read_refs(store)["latest"][1]
    new_snapshot = release("--tolerance", 1, dump=grown_dump).json["snapshot"]
    bookwheel("rollback", "latest", "--store", store)
    assert read_refs(store)["latest"] == (3, old_snapshot)
    result = release("--tolerance", 1, dump=grown_dump)
    assert result.code == 3
    assert "the candidate is a snapshot that the ref left after latest@2, wanted a" in result.err
    assert read_refs(store)["latest"] == (3, old_snapshot)
    assert bookwheel("tag", new_snapshot, "latest", "--store", store).code == 0
    assert release("--tolerance", 1, dump=grown_dump).json["nothing_new"]


def test_concurrent_release_of_same_snapshot_is_no_rollback(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    first = store.refs.move("latest", "a" * 64, 0)
    store.refs.move("latest", "b" * 64, first.number)  # Another release moves the ref first.
    current_move = find_initial_move(store.refs, "latest", "b" * 64, first)
    assert current_move is not None
    assert (current_move.number, find_withdrawal(store, "latest", "b" * 64, current_move)) == (2, "")
    assert find_initial_move(store.refs, "latest", "c" * 64, first) == first
    assert find_withdrawal(store, "latest", "a" * 64, current_move) == "latest@1"


@pytest.mark.parametrize("moved_ref", ["latest", "reader"])
def test_release_that_lost_the_race_for_a_ref_moves_none(tmp_path: Path, moved_ref: str) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    present, candidate, other = (publish_empty(store, name) for name in ("present", "candidate", "other"))
    current_move = store.refs.move("latest", present, 0)
    models = [put_weights(store, name, ref).model for name, ref in (("new", "reader-candidate"), ("other", "spare"))]
    put_weights(store, "present", "reader")
    model_move = store.models.refs.find_current("reader")
    tag(store, *((other, "latest") if moved_ref == "latest" else (f"model:{models[1]}", "reader")))
    moves_before = store.refs.read_history("latest"), store.models.refs.read_history("reader")
    with pytest.raises(RefConflictError, match=f"another writer moved ref {moved_ref} .* first"):
        move_refs(store, candidate, "latest", models[0], "reader", current_move, model_move, "release")
    assert (store.refs.read_history("latest"), store.models.refs.read_history("reader")) == moves_before


@pytest.mark.parametrize("has_present_model", [False, True])
def test_model_is_moved_back_if_snapshot_is_refused(tmp_path: Path, has_present_model: bool) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    blob = store.blobs.put_bytes(b"index")
    candidate = publish_blobs(store, blob)
    store.files.remove(blob.path)
    model = put_weights(store, "new", "reader-candidate").model
    if has_present_model:
        put_weights(store, "present", "reader")
    model_move = store.models.refs.find_current("reader")
    with pytest.raises(RefusedError, match="ref latest was not moved"):
        move_refs(store, candidate, "latest", model, "reader", None, model_move, "release")
    moved_back = store.models.refs.find_current("reader")
    assert (moved_back and moved_back.snapshot) == (model_move and model_move.snapshot)
    assert [move.snapshot for move in store.models.refs.read_history("reader")][-2] == model


def test_model_is_trained_on_candidate(
    release: Callable[..., Any], store: Path, questions: Path, tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    paths = {"train": questions, "dev": questions, "generator": save_bart(tmp_path / "bart")}
    (tmp_path / "training.toml").write_text(TRAINING.format(**paths))
    flags = ("--training", tmp_path / "training.toml", "--tolerance", 1)
    first = release(*flags)
    assert first.code in {0, 3}, first.err
    reply = first.json
    opened_store = Store.open(str(store))
    candidate = opened_store.models.refs.find_current("reader-candidate")
    assert candidate is not None
    assert candidate.snapshot == reply["model"]
    assert reply["done"]["finetune"]
    assert {"Success@20", "EM"} <= reply["figures"].keys()
    reader = opened_store.models.refs.find_current("reader")
    assert (reader is None) == (first.code == 3)
    second = release(*flags).json
    assert second["done"] == {**dict.fromkeys(reply["done"], False)}
    assert second["evaluation"] == reply["evaluation"]


def test_release_evaluates_stored_model(release: Callable[..., Any], store: Path, tiny: Path, tmp_path: Path) -> None:
    rag = save_tiny_rag(tmp_path / "rag", tiny)
    put_model(Store.open(str(store)), rag, ModelMetadata("rag-sequence", None, {}), "reader")
    result = release("--model", "reader")
    reply = result.json
    assert {"Success@20", "EM", "F1"} <= reply["figures"].keys()
    assert reply["present"] == reply["evaluation"], "the snapshot and the model are the same"
    assert release("--model", "reader").json["nothing_new"]
    assert [check["name"] for check in reply["gate"]["checks"]][:1] == ["EM against the present one"]


def test_release_stops_if_build_gate_refuses(release: Callable[..., Any], store: Path) -> None:
    refs_before = read_refs(store)
    result = release("--limit", 1)
    assert (result.code, "passages lost since the parent is" in result.err) == (3, True)
    assert read_refs(store) == refs_before


def test_trust_file_requires_signed_evaluations(
    release: Callable[..., Any], trust_file: Path, bookwheel: Callable[..., Any], tmp_path: Path
) -> None:
    fresh = tmp_path / "fresh"
    first = release("--trust", trust_file, into=fresh).json
    assert release("--trust", trust_file, into=fresh).json["nothing_new"]
    version = f"evaluation:{first['evaluation']}"
    assert bookwheel("verify", version, "--store", fresh, "--trust", trust_file).code == 0
    (signature,) = fresh.glob("evaluations/*.sig")
    signature.unlink()
    assert bookwheel("verify", version, "--store", fresh, "--trust", trust_file).code == 3
    second = release("--trust", trust_file, into=fresh).json
    assert second["done"] == {"reindex": False, "evaluate": True, "move": False}
    assert bookwheel("verify", version, "--store", fresh, "--trust", trust_file).code == 0


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_killed_release_continues(
    release: Callable[..., Any],
    store: Path,
    grown_dump: Path,
    tiny: Path,
    recipe: Path,
    questions: Path,
    tmp_path: Path,
) -> None:
    latest_before, evaluations_before = read_refs(store)["latest"], set(store.glob("evaluations/*.json"))
    options = {"dump": grown_dump, "store": store, "questions": questions, "encoder": tiny, "recipe": recipe}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    running = ForkedCommand(["release", *arguments, "--tolerance", "1"], tmp_path)
    while set(store.glob("evaluations/*.json")) <= evaluations_before:
        assert running.poll() is None, "the process ended before the moment to kill it"
        time.sleep(0.001)
    running.kill()
    running.wait()
    assert read_refs(store)["latest"] == latest_before
    result = release("--tolerance", 1, dump=grown_dump)
    assert result.code == 0, result.err
    assert read_refs(store)["latest"] == (latest_before[0] + 1, result.json["snapshot"])
    assert release("--tolerance", 1, dump=grown_dump).json["nothing_new"]


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--floor", "Success@20"], 2, "is not MEASURE=VALUE"),
        (["--floor", "Success@20=60"], 2, "give a number from 0 to 1"),
        (["--floor", "Sucess@20=0.6"], 2, "'Sucess@20' was not measured: choose from Success@1"),
        (["--ref", f"{'r' * 95}"], 2, "is not a ref name"),
        (["--judge", "pages"], 2, "names no pages"),
        (["--floor", "EM=0.5"], 2, "'EM' was not measured: choose from Success@1"),
        (["--reader", "concat"], 2, "--reader only applies to a model: add --model or --training"),
        (["--order", "ends", "--model", "reader"], 2, "--order only applies to a reader with one prompt for all passa"),
    ],
)
def test_wrong_options_are_refused(
    release: Callable[..., Any], store: Path, flags: list[str], code: int, message: str
) -> None:
    refs_before = read_refs(store)
    result = release(*flags)
    assert (result.code, message in result.complaint) == (code, True), result.err
    assert {**read_refs(store), **refs_before} == read_refs(store)


def test_misspelt_measure_is_refused_before_build(release: Callable[..., Any], store: Path, grown_dump: Path) -> None:
    snapshots_before = sorted(path.name for path in (store / "snapshots").iterdir())
    result = release("--floor", "Sucess@20=0.6", dump=grown_dump)
    assert (result.code, "'Sucess@20' was not measured" in result.complaint) == (2, True), result.err
    assert sorted(path.name for path in (store / "snapshots").iterdir()) == snapshots_before
    fresh = store.with_name("fresh")
    for measure in ("nDGC@10", "Success@7"):  # An evaluation has Success@7 only if it was requested.
        first = release("--floor", f"{measure}=0.1", "--floor", "Success@5=0.1", dump=grown_dump, into=fresh)
        assert (first.code, f"{measure!r} was not measured" in first.complaint) == (2, True), first.err
    assert not (fresh / "snapshots").exists()


def test_reader_options_reach_evaluation(release: Callable[..., Any], store: Path, tmp_path: Path) -> None:
    model = save_bart(tmp_path / "bart")
    result = release("--model", model, "--reader", "concat", "--cite", "-k", 2, "--tolerance", -1, "--floor", "EM=0")
    assert result.code in {0, 3}, result.err
    subject = Store.open(str(store)).evaluations.get(result.json["evaluation"]).content.subject
    assert (subject.settings["readers"], subject.settings["concat"]["cite"]) == (["concat"], True)


@pytest.mark.parametrize(
    ("kind", "extra", "message"),
    [
        ("dpr", "", "trains no model that answers questions"),
        ("rag-end2end", "", "builds a separate index for its model"),
        ("rag-sequence", "model", "leave one out"),
        ("rag-sequence", "steps = 1", "has no setting 'steps'"),
    ],
)
def test_unsuitable_training_is_refused_before_build(
    release: Callable[..., Any], store: Path, tmp_path: Path, kind: str, extra: str, message: str
) -> None:
    path = tmp_path / "training.toml"
    path.write_text(f'kind = "{kind}"\n{extra if "=" in extra else ""}\n')
    mtimes_before = read_mtimes(store)
    result = release("--training", path, *(["--model", "reader"] if extra == "model" else []))
    assert (result.code, message in result.complaint) == (2, True), result.err
    assert read_mtimes(store) == mtimes_before


def test_touched_dump_is_read_again(release: Callable[..., Any], mini_dump: Path, tmp_path: Path) -> None:
    dump = Path(shutil.copy(mini_dump, tmp_path / "dump.xml.bz2"))
    first = release(dump=dump).json
    assert not release(dump=dump).json["done"]["reindex"]
    os.utime(dump, (1, 1))
    touched = release(dump=dump).json
    assert touched["done"] == {"reindex": True, "evaluate": False, "move": False}
    assert touched["snapshot"] == first["snapshot"]


def test_form_parameters_become_settings_objects() -> None:
    required = {"dump": "d", "store": "s", "questions": "q"}
    training = {"kind": "rag-token", "recipe": {"loop": {"seed": 1}}}
    acceptance, settings = {"floors": {"EM": 0.5}}, {"depth": 5}
    form = {**required, "training": training, "acceptance": acceptance, "settings": settings}
    parameters = flow.validate_parameters(form)
    assert parameters["training"] == ReleaseTraining("rag-token", recipe={"loop": {"seed": 1}})
    assert parameters["acceptance"] == ReleaseCriteria({"EM": 0.5})
    assert parameters["settings"] == EvaluationSettings(depth=5)
    with pytest.raises(ParameterTypeError, match=r"training\.kind"):
        flow.validate_parameters({**required, "training": {"kind": "magic"}})


def test_release_accepts_parameters_of_start_reindex_and_watch() -> None:
    """They pass the parameters of a rebuild; the deployment has the questions."""
    start_parameters = set(parameter_schema(start_reindex).properties) - {"deployment", "most", "hours"}
    schema = parameter_schema(flow)
    assert start_parameters <= set(schema.properties)
    assert set(schema.required) - start_parameters == {"questions"}
