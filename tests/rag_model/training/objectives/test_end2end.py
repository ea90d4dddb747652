"""The objective `rag-end2end`: its work estimate, its key, its statements, and its settings."""

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
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("given"))


def build_job(folder: Path, **changes: Any) -> Job[End2EndTraining]:
    store = Store.open(str(folder / "store"))
    snapshot = Snapshot.from_store(store)
    origins = END2END.origins(store, snapshot, NamedModels(generator=str(folder / "bart")))
    examples = {"train": EXAMPLES, "dev": DEV}
    return Job(store, snapshot, origins, replace(SETTINGS, **changes), examples, work=folder / "training")


def test_estimate_includes_the_rebuilds(inputs: Path) -> None:
    jobs = [Finetuning(END2END, build_job(inputs, moving=MovingSettings(steps))) for steps in (2, 0)]
    with_rebuilds, without_rebuilds = map(estimate_work, jobs)
    encoder = (32 * 32 * 4 + 2 * 32 * 64 + 32 * 9 + 64) * 2 + 2 * 2 * 32 + 64 * 2 * 32 + 2 * 2 * 32
    rebuild = (with_rebuilds.operations - without_rebuilds.operations) / 2
    assert rebuild == pytest.approx(12 * PASSAGE_TOKENS * encoder, rel=0.02), "12 passages, and steps 2 and 4 of 6"
    rebuild_size = with_rebuilds.sizes["rebuilds of the index"]
    assert rebuild_size == f"3, each {rebuild / CORE_FLOPS:,.0f} s of a core"
    assert without_rebuilds.sizes["rebuilds of the index"].startswith("1, "), "the index is rebuilt at the end"


def test_estimate_adds_memory_and_disk_of_a_rebuild_during_training(inputs: Path) -> None:
    job = Finetuning(END2END, build_job(inputs))
    rebuild = WorkEstimate({}, {"embed": 1 << 30, "merge": 3 << 30}, disk=7 << 30)
    alone, with_rebuild = estimate_work(job), estimate_work(job, rebuild)
    peak = max(rebuild.compute_stage_memory(1).values())
    assert with_rebuild.stages == {**alone.stages, "rebuild": max(alone.stages.values()) + peak}
    assert with_rebuild.disk == alone.disk + (7 << 30)
    assert with_rebuild.sizes["a rebuild takes"] == "4.0 GB of memory, 7.5 GB of disk"
    assert "a rebuild takes" not in alone.sizes


def test_statements_are_part_of_the_key(inputs: Path, tmp_path: Path) -> None:
    path = tmp_path / "statements.jsonl"
    path.write_text('{"statement": "the king was aaa."}\n')
    job = build_job(inputs, reconstruction=ReconstructionSettings(str(path)))
    keys = [Finetuning(END2END, job).key, Finetuning(END2END, build_job(inputs)).key]
    assert [statement.text for statement in load_statements(job)] == ["the king was aaa."]
    path.write_text('{"statement": "the king was bbb."}\n')
    job = build_job(inputs, reconstruction=ReconstructionSettings(str(path)))
    keys.append(Finetuning(END2END, job).key)
    assert len({*keys}) == 3


def test_statements_are_leads_or_none(inputs: Path, tmp_path: Path) -> None:
    leads = load_statements(build_job(inputs))
    assert (len(leads), leads[0].text) == (12, "the king of city a was aaa.")
    assert load_statements(build_job(inputs, reconstruction=ReconstructionSettings("none"))) == []
    (tmp_path / "work").mkdir()
    for articles in ({"York": "the king of the city."}, {"York": "king.", "Oslo": "river."}):
        store = Store.open(str(tmp_path / f"store-{len(articles)}"), create=True)
        snapshot = publish_tiny(store, inputs / "encoder", articles, tmp_path / "work")
        job = replace(build_job(inputs), store=store, snapshot=snapshot)
        if len(articles) == 1:
            assert load_statements(job) == [], "a single passage has no others to retrieve for its statement"
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
