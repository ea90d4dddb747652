"""The chain from a dump to the ref that services follow: rebuild, train, evaluate, judge, move."""

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

from flows.launch import launch
from flows.release import ReleaseTraining, find_initial_move, find_withdrawal
from flows.release import release as flow
from rag_model.evaluation.answers.settings import EvaluationSettings
from rag_model.evaluation.gate import ReleaseCriteria
from rag_model.store.store import Store
from rag_model.store.versions.models import ModelMetadata, put_model
from tests.fixtures.forked_processes import ForkedCommand
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
    """The next dump: a few more pages."""
    path = tmp_path_factory.mktemp("grown") / "grown.xml.bz2"
    pages = bz2.decompress(demo_dump.read_bytes()).split(b"</page>\n")[:55]
    path.write_bytes(bz2.compress(b"</page>\n".join([*pages, b"</mediawiki>\n"])))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    asked = {"What is anarchism?": "anarchism", "What is autism?": "autism", "Where is Albedo used?": "albedo"}
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"question": one, "answers": [two]}) + "\n" for one, two in asked.items()))
    return path


@pytest.fixture
def release(
    bookwheel: Callable[..., Any], store: Path, tiny: Path, recipe: Path, questions: Path, mini_dump: Path
) -> Callable[..., Any]:
    """Run `release --json` over the store's copy."""

    def run(*flags: object, dump: Path = mini_dump, into: Path = store) -> Any:
        given = {"dump": dump, "store": into, "questions": questions, "encoder": tiny, "recipe": recipe}
        return bookwheel(
            "release", *(word for name, one in given.items() for word in (f"--{name}", one)), *flags, "--json"
        )

    return run


def named(store: Path) -> dict[str, tuple[int, str]]:
    """The refs of a store: the number of their moves, and what they name."""
    opened = Store.open(str(store))
    found = {name: opened.refs.find_current(name) for name in opened.refs.list_names()}
    return {name: (move.number, move.snapshot) for name, move in found.items() if move}


def files(store: Path) -> dict[str, float]:
    passing = ("intents", "sweeps")
    return {str(path): path.stat().st_mtime for path in store.rglob("*.json") if path.parent.name not in passing}


@pytest.mark.usefixtures("prefect_server")
def test_a_first_release_moves_the_ref_and_a_second_one_has_nothing_to_do(
    release: Callable[..., Any], tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    fresh = tmp_path / "fresh"
    result = release("--floor", "Success@20=0.1", into=fresh)
    assert result.code == 0, result.err
    first = result.json
    assert first["done"] == {"reindex": True, "evaluate": True, "move": True}
    assert (first["number"], first["present"], first["nothing_new"]) == (1, None, False)
    assert named(fresh) == dict.fromkeys(["latest", "latest-candidate"], (1, first["snapshot"]))
    (move,) = bookwheel("log", "--store", fresh, "--json").json
    assert move["note"] == f"release, evaluation {first['evaluation'][:12]}"
    (listed,) = bookwheel("show", "--store", fresh, "--json").json["evaluations"]
    assert listed["id"] == first["evaluation"]

    before = files(fresh)
    again = release("--floor", "Success@20=0.1", into=fresh).json
    assert again["done"] == {"reindex": False, "evaluate": False, "move": False}
    assert (again["nothing_new"], again["number"], again["evaluation"]) == (True, 1, first["evaluation"])
    assert files(fresh) == before
    with get_client(sync_client=True) as client:
        asked = {"artifacts": {"key": {"like_": "release-steps"}}, "sort": "CREATED_DESC", "limit": 1}
        (artifact,) = client.request("POST", "/artifacts/filter", json=asked).json()
    assert {"what": "reindex", "value": "as before"} in json.loads(artifact["data"])
    assert "latest@1 names it" in artifact["description"]


def test_a_refused_candidate_is_kept_to_look_at_and_released_when_it_is_accepted(
    release: Callable[..., Any], store: Path, grown_dump: Path, bookwheel: Callable[..., Any]
) -> None:
    served = named(store)
    refused = release("--floor", "RR@20=0.999", dump=grown_dump)
    assert refused.code == 3
    reply = refused.json
    assert reply["snapshot"] != served["latest"][1]
    assert named(store) == {**served, "latest-candidate": (1, reply["snapshot"])}
    assert f"latest did not move to snapshot {reply['snapshot'][:12]}: RR@20 is " in refused.err
    assert f"`show evaluation:{reply['evaluation'][:12]}`" in refused.err
    assert bookwheel("show", f"evaluation:{reply['evaluation']}", "--store", store).code == 0
    assert reply["done"] == {"reindex": True, "evaluate": True, "move": False}
    parents = bookwheel("show", "latest-candidate", "--store", store, "--json").json["parents"]
    assert parents == [served["latest"][1]]

    lost = bookwheel(
        "diff", f"evaluation:{reply['present'][:12]}", f"evaluation:{reply['evaluation'][:12]}", "--store", store
    )
    assert lost.code == 0, lost.err

    accepted = release("--tolerance", 1, dump=grown_dump).json
    assert accepted["done"] == {"reindex": False, "evaluate": False, "move": True}
    assert accepted["evaluation"] == reply["evaluation"]
    assert named(store)["latest"] == (2, reply["snapshot"])
    (check,) = accepted["gate"]["checks"]
    assert (check["name"], check["passed"]) == ("Success@20 against the present one", True)
    assert release("--tolerance", 1, dump=grown_dump).json["nothing_new"]


def test_a_loss_against_the_present_snapshot_is_refused(
    release: Callable[..., Any], store: Path, mini_dump: Path, tmp_path: Path
) -> None:
    """The candidate lacks the article that one of three questions is about."""
    lines = bz2.decompress(mini_dump.read_bytes()).replace(b"utism", b"uxism").replace(b"AUTISM", b"AUXISM")
    (tmp_path / "poor.xml.bz2").write_bytes(bz2.compress(lines))
    served = named(store)["latest"]
    result = release(dump=tmp_path / "poor.xml.bz2")
    assert result.code == 3, result.out
    assert "Success@20 against the present one is -0.333 [-1.000, +0.000], from 1.000 to 0.667" in result.err
    assert named(store)["latest"] == served
    assert release("--tolerance", -1, dump=tmp_path / "poor.xml.bz2").json["number"] == 2


def test_what_people_rolled_back_is_not_released_again(
    release: Callable[..., Any], store: Path, grown_dump: Path, bookwheel: Callable[..., Any]
) -> None:
    old = named(store)["latest"][1]
    new = release("--tolerance", 1, dump=grown_dump).json["snapshot"]
    bookwheel("rollback", "latest", "--store", store)
    assert named(store)["latest"] == (3, old)
    again = release("--tolerance", 1, dump=grown_dump)
    assert again.code == 3
    assert "the candidate is a snapshot that the ref left after latest@2, wanted a" in again.err
    assert named(store)["latest"] == (3, old)
    assert bookwheel("tag", new, "latest", "--store", store).code == 0
    assert release("--tolerance", 1, dump=grown_dump).json["nothing_new"]


def test_a_release_of_the_same_that_was_first_is_no_rollback(tmp_path: Path) -> None:
    store = Store.open(str(tmp_path / "store"), create=True)
    first = store.refs.move("latest", "a" * 64, 0)
    store.refs.move("latest", "b" * 64, first.number)  # meanwhile, by another release
    now = find_initial_move(store, "latest", "b" * 64, first)
    assert now is not None
    assert (now.number, find_withdrawal(store, "latest", "b" * 64, now)) == (2, "")
    assert find_initial_move(store, "latest", "c" * 64, first) == first
    assert find_withdrawal(store, "latest", "a" * 64, now) == "latest@1"


def test_a_model_is_trained_on_the_candidate_and_moves_with_it(
    release: Callable[..., Any], store: Path, questions: Path, tmp_path: Path, bookwheel: Callable[..., Any]
) -> None:
    given = {"train": questions, "dev": questions, "generator": save_bart(tmp_path / "bart")}
    (tmp_path / "training.toml").write_text(TRAINING.format(**given))
    words = ("--training", tmp_path / "training.toml", "--tolerance", 1)
    first = release(*words)
    assert first.code in {0, 3}, first.err
    reply = first.json
    opened = Store.open(str(store))
    candidate = opened.models.refs.find_current("reader-candidate")
    assert candidate is not None
    assert candidate.snapshot == reply["model"]
    assert reply["done"]["finetune"]
    assert {"Success@20", "EM"} <= reply["figures"].keys()
    reader = opened.models.refs.find_current("reader")
    assert (reader is None) == (first.code == 3)
    again = release(*words).json
    assert again["done"] == {**dict.fromkeys(reply["done"], False)}
    assert again["evaluation"] == reply["evaluation"]


def test_a_model_of_the_store_answers(release: Callable[..., Any], store: Path, tiny: Path, tmp_path: Path) -> None:
    put_model(
        Store.open(str(store)), save_tiny_rag(tmp_path / "rag", tiny), ModelMetadata("rag-sequence", None, {}), "reader"
    )
    result = release("--model", "reader")
    reply = result.json
    assert {"Success@20", "EM", "F1"} <= reply["figures"].keys()
    assert reply["present"] == reply["evaluation"]  # the same snapshot and model
    assert release("--model", "reader").json["nothing_new"]
    assert [check["name"] for check in reply["gate"]["checks"]][:1] == ["EM against the present one"]


def test_indexes_are_judged_beside_what_is_served(release: Callable[..., Any], store: Path) -> None:
    served = named(store)
    result = release("--limit", 1)
    assert (result.code, "passages lost since the parent is" in result.err) == (3, True)
    assert named(store) == served


def test_with_a_trust_file_only_signed_evaluations_count(
    release: Callable[..., Any], trusted: Path, bookwheel: Callable[..., Any], tmp_path: Path
) -> None:
    fresh = tmp_path / "fresh"
    first = release("--trust", trusted, into=fresh).json
    assert release("--trust", trusted, into=fresh).json["nothing_new"]
    made = f"evaluation:{first['evaluation']}"
    assert bookwheel("verify", made, "--store", fresh, "--trust", trusted).code == 0
    (signature,) = fresh.glob("evaluations/*.sig")
    signature.unlink()
    assert bookwheel("verify", made, "--store", fresh, "--trust", trusted).code == 3
    again = release("--trust", trusted, into=fresh).json
    assert again["done"] == {"reindex": False, "evaluate": True, "move": False}
    assert bookwheel("verify", made, "--store", fresh, "--trust", trusted).code == 0


@pytest.mark.slow
@pytest.mark.xdist_group("processes")
def test_a_release_that_was_killed_goes_on(
    release: Callable[..., Any],
    store: Path,
    grown_dump: Path,
    tiny: Path,
    recipe: Path,
    questions: Path,
    tmp_path: Path,
) -> None:
    served, evaluations = named(store)["latest"], set(store.glob("evaluations/*.json"))
    options = {"dump": grown_dump, "store": store, "questions": questions, "encoder": tiny, "recipe": recipe}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    running = ForkedCommand(["release", *words, "--tolerance", "1"], tmp_path)
    while set(store.glob("evaluations/*.json")) <= evaluations:
        assert running.poll() is None, "the moment was not seen before the process ended"
        time.sleep(0.001)
    running.kill()
    running.wait()
    assert named(store)["latest"] == served
    result = release("--tolerance", 1, dump=grown_dump)
    assert result.code == 0, result.err
    assert named(store)["latest"] == (served[0] + 1, result.json["snapshot"])
    assert release("--tolerance", 1, dump=grown_dump).json["nothing_new"]


@pytest.mark.parametrize(
    ("flags", "code", "why"),
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
def test_what_cannot_be_is_one_sentence(
    release: Callable[..., Any], store: Path, flags: list[str], code: int, why: str
) -> None:
    served = named(store)
    result = release(*flags)
    assert (result.code, why in result.complaint) == (code, True), result.err
    assert {**named(store), **served} == named(store)


def test_a_misspelt_measure_is_told_before_anything_is_built(
    release: Callable[..., Any], store: Path, grown_dump: Path
) -> None:
    before = sorted(path.name for path in (store / "snapshots").iterdir())
    result = release("--floor", "Sucess@20=0.6", dump=grown_dump)
    assert (result.code, "'Sucess@20' was not measured" in result.complaint) == (2, True), result.err
    assert sorted(path.name for path in (store / "snapshots").iterdir()) == before
    fresh = store.with_name("fresh")
    for measure in ("nDGC@10", "Success@7"):  # no evaluation reports Success@7 by itself
        first = release("--floor", f"{measure}=0.1", "--floor", "Success@5=0.1", dump=grown_dump, into=fresh)
        assert (first.code, f"{measure!r} was not measured" in first.complaint) == (2, True), first.err
    assert not (fresh / "snapshots").exists(), "nothing is known yet to compare with, and nothing is built"


def test_a_model_reads_as_evaluate_is_told(release: Callable[..., Any], store: Path, tmp_path: Path) -> None:
    model = save_bart(tmp_path / "bart")
    result = release("--model", model, "--reader", "concat", "--cite", "-k", 2, "--tolerance", -1, "--floor", "EM=0")
    assert result.code in {0, 3}, result.err
    subject = Store.open(str(store)).evaluations.get(result.json["evaluation"]).content.subject
    assert (subject.settings["readers"], subject.settings["concat"]["cite"]) == (["concat"], True)


@pytest.mark.parametrize(
    ("kind", "more", "why"),
    [
        ("dpr", "", "trains no model that answers questions"),
        ("rag-end2end", "", "builds a separate index for its model"),
        ("rag-sequence", "model", "leave one out"),
        ("rag-sequence", "steps = 1", "has no setting 'steps'"),
    ],
)
def test_a_training_that_does_not_fit_is_refused_first(
    release: Callable[..., Any], store: Path, tmp_path: Path, kind: str, more: str, why: str
) -> None:
    path = tmp_path / "training.toml"
    path.write_text(f'kind = "{kind}"\n{more if "=" in more else ""}\n')
    before = files(store)
    result = release("--training", path, *(["--model", "reader"] if more == "model" else []))
    assert (result.code, why in result.complaint) == (2, True), result.err
    assert files(store) == before


def test_a_dump_that_was_touched_is_read_again_and_gives_the_same(
    release: Callable[..., Any], mini_dump: Path, tmp_path: Path
) -> None:
    dump = Path(shutil.copy(mini_dump, tmp_path / "dump.xml.bz2"))
    first = release(dump=dump).json
    assert not release(dump=dump).json["done"]["reindex"]
    os.utime(dump, (1, 1))
    again = release(dump=dump).json
    assert again["done"] == {"reindex": True, "evaluate": False, "move": False}
    assert again["snapshot"] == first["snapshot"]


def test_a_form_gives_a_release_its_records() -> None:
    given = {
        "dump": "d",
        "store": "s",
        "questions": "q",
        "training": {"kind": "rag-token", "recipe": {"loop": {"seed": 1}}},
    }
    found = flow.validate_parameters({**given, "acceptance": {"floors": {"EM": 0.5}}, "settings": {"depth": 5}})
    assert found["training"] == ReleaseTraining("rag-token", recipe={"loop": {"seed": 1}})
    assert found["acceptance"] == ReleaseCriteria({"EM": 0.5})
    assert found["settings"] == EvaluationSettings(depth=5)
    with pytest.raises(ParameterTypeError, match=r"training\.kind"):
        flow.validate_parameters({**given, "training": {"kind": "magic"}})


def test_a_launch_and_a_watch_may_start_a_release() -> None:
    """They give a run the parameters of a rebuild; the questions are the deployment's own."""
    given = set(parameter_schema(launch).properties) - {"deployment", "most", "hours"}
    schema = parameter_schema(flow)
    assert given <= set(schema.properties)
    assert set(schema.required) - given == {"questions"}
