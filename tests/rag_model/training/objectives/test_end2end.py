"""The objective `rag-end2end`: its price, its key, its statements, and settings that are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rag_model.errors import UsageError
from rag_model.resources import CORE_FLOPS, PASSAGE_TOKENS, WorkEstimate
from rag_model.store.store import Store
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.finetuning import Finetuning, estimate_work
from rag_model.training.moving_index import MovingSettings
from rag_model.training.objectives.end2end import (
    END2END,
    End2EndRecipe,
    End2EndTraining,
    ReconstructionSettings,
    load_statements,
)
from rag_model.training.objectives.objective import Job
from rag_model.training.objectives.rag import RagRecipe
from rag_model.training.origins import NamedModels
from tests.fixtures.tiny_end2end import DEV, EXAMPLES, SETTINGS, prepare
from tests.fixtures.tiny_snapshot import publish_tiny


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("given"))


def job_of(given: Path, **changed: Any) -> Job[End2EndTraining]:
    store = Store.open(str(given / "store"))
    snapshot = Snapshot.from_store(store)
    origins = END2END.origins(store, snapshot, NamedModels(generator=str(given / "bart")))
    examples = {"train": EXAMPLES, "dev": DEV}
    return Job(store, snapshot, origins, replace(SETTINGS, **changed), examples, work=given / "training")


def test_the_price_of_the_rebuilds_is_shown_before_the_run(given: Path) -> None:
    often, never = (estimate_work(Finetuning(END2END, job_of(given, moving=MovingSettings(n)))) for n in (2, 0))
    encoder = (32 * 32 * 4 + 2 * 32 * 64 + 32 * 9 + 64) * 2 + 2 * 2 * 32 + 64 * 2 * 32 + 2 * 2 * 32
    rebuild = (often.operations - never.operations) / 2
    assert rebuild == pytest.approx(12 * PASSAGE_TOKENS * encoder, rel=0.02), "12 passages, and steps 2 and 4 of 6"
    told = often.sizes["rebuilds of the index"]
    assert told == f"3, each {rebuild / CORE_FLOPS:,.0f} s of a core"
    assert never.sizes["rebuilds of the index"].startswith("1, "), "the one at the end"


def test_a_run_has_memory_and_disk_for_a_rebuild_beside_the_training(given: Path) -> None:
    job, rebuild = (
        Finetuning(END2END, job_of(given)),
        WorkEstimate({}, {"embed": 1 << 30, "merge": 3 << 30}, disk=7 << 30),
    )
    alone, beside = estimate_work(job), estimate_work(job, rebuild)
    peak = max(rebuild.compute_stage_memory(1).values())
    assert beside.stages == {**alone.stages, "rebuild": max(alone.stages.values()) + peak}
    assert beside.disk == alone.disk + (7 << 30)
    assert beside.sizes["a rebuild takes"] == "4.0 GB of memory, 7.5 GB of disk"
    assert "a rebuild takes" not in alone.sizes


def test_statements_are_part_of_the_key(given: Path, tmp_path: Path) -> None:
    path = tmp_path / "statements.jsonl"
    path.write_text('{"statement": "the king was aaa."}\n')
    settings = {"reconstruction": ReconstructionSettings(str(path))}
    keys = [Finetuning(END2END, job_of(given, **settings)).key]
    assert [statement.text for statement in load_statements(job_of(given, **settings))] == ["the king was aaa."]
    path.write_text('{"statement": "the king was bbb."}\n')
    keys += [Finetuning(END2END, job_of(given, **settings)).key, Finetuning(END2END, job_of(given)).key]
    assert len({*keys}) == 3


def test_statements_are_leads_or_none(given: Path, tmp_path: Path) -> None:
    leads = load_statements(job_of(given))
    assert (len(leads), leads[0].text) == (12, "the king of city a was aaa.")
    assert load_statements(job_of(given, reconstruction=ReconstructionSettings("none"))) == []
    (tmp_path / "work").mkdir()
    for articles in ({"York": "the king of the city."}, {"York": "king.", "Oslo": "river."}):
        store = Store.open(str(tmp_path / f"store-{len(articles)}"), create=True)
        snapshot = publish_tiny(store, given / "encoder", articles, tmp_path / "work")
        job = replace(job_of(given), store=store, snapshot=snapshot)
        if len(articles) == 1:
            assert load_statements(job) == [], "nothing to write them from"
        else:
            with pytest.raises(UsageError, match="no page of the snapshot begins with a sentence"):
                load_statements(job)


def test_settings_out_of_bounds_are_refused() -> None:
    with pytest.raises(UsageError, match=r"candidates 3 of \[end2end\] is less than k 5"):
        End2EndTraining(end2end=End2EndRecipe(candidates=3))
    with pytest.raises(UsageError, match="retrieves with the current encoders"):
        End2EndTraining(rag=RagRecipe(retrieve="once"))
    with pytest.raises(UsageError, match=r"weight of \[reconstruction\] is 0: use more than 0"):
        ReconstructionSettings(weight=0)
