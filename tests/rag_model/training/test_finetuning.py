"""One fine-tuning with a toy objective: its key, the published model, and an objective that saves too little."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rag_model.errors import UsageError
from rag_model.store.store import Store
from rag_model.store.versions.models import ModelMetadata, put_model
from rag_model.training.data.examples import Example
from rag_model.training.data.negatives import NegativesRecipe, SearchName
from rag_model.training.finetuning import Finetuning
from rag_model.training.loop.loop_settings import LoopSettings
from rag_model.training.objectives.objective import Job
from rag_model.training.objectives.openrag import OPENRAG, OpenRagRecipe, OpenRagTraining
from rag_model.training.objectives.rag import SEQUENCE, RagRecipe, RagTraining
from rag_model.training.origins import InitialModels
from tests.fixtures.tiny import save_cross_encoder
from tests.fixtures.tiny_snapshot import publish_tiny
from tests.fixtures.toy_objective import TOY, Toy, ToyTraining


@pytest.fixture
def job(tiny: Path, kings: list[Example], tmp_path: Path) -> Job[ToyTraining]:
    (tmp_path / "work").mkdir()
    articles = {king.positives[0].title: king.positives[0].text for king in kings}
    store = Store.open(str(tmp_path / "store"), create=True)
    snapshot = publish_tiny(store, tiny, articles, tmp_path / "work")
    settings = ToyTraining(loop=LoopSettings(max_steps=2, cpu=True))
    return Job(store, snapshot, InitialModels({}), settings, {"train": kings[:8], "dev": kings[8:]})


def test_published_result_is_found_by_its_inputs(job: Job[ToyTraining], tmp_path: Path) -> None:
    first = Finetuning(TOY, job)
    assert first.find_result() is None
    result, publication = first.publish(first.run(tmp_path / "one"), tmp_path / "one", "toy", {})
    assert Finetuning(TOY, job).find_result() == result
    manifest = job.store.models.get(publication.model)
    assert (manifest.content.kind, manifest.content.space) == ("toy", None), "it has no question encoder"
    assert [searched["snapshot"] for searched in manifest.provenance["asked"]] == [job.snapshot.id]
    assert "train loss by steps" in (tmp_path / "one" / "training.html").read_text()
    other_job = replace(job, settings=replace(job.settings, loop=LoopSettings(max_steps=3, cpu=True)))
    assert Finetuning(TOY, other_job).find_result() is None


def test_new_version_of_an_objective_has_another_key(job: Job[ToyTraining]) -> None:
    class NewerToy(Toy):
        version = 1

    assert Finetuning(NewerToy(), job).key != Finetuning(TOY, job).key


@dataclass(frozen=True, slots=True)
class MiningToyTraining(ToyTraining):
    negatives: NegativesRecipe = field(default_factory=NegativesRecipe)


def test_model_of_a_retriever_expression_is_an_input(job: Job[ToyTraining], tmp_path: Path) -> None:
    def tag_judge(seed: int) -> str:
        save_cross_encoder(tmp_path / f"judge{seed}" / "cross-encoder", seed)
        return put_model(job.store, tmp_path / f"judge{seed}", ModelMetadata("cross-encoder", None, {}), "judge").model

    def create(expression: str | None, search: SearchName = "snapshot") -> Finetuning:
        settings = MiningToyTraining(job.settings.loop, negatives=NegativesRecipe(search, expression))
        return Finetuning(TOY, replace(job, settings=settings))

    reranking = "rerank(hnsw, model:judge, 5)"
    first_judge, first = tag_judge(3), create(reranking)
    first.publish(first.run(tmp_path / "one"), tmp_path / "one", "toy", {})
    assert create(reranking).find_result() is not None
    second_judge, second = tag_judge(4), create(reranking)
    assert second.find_result() is None, "model:judge names another model now"
    assert [finetuning.prepare().digests["model:judge"] for finetuning in (first, second)] == [
        first_judge,
        second_judge,
    ]
    for finetuning in (create("hnsw"), create(None), create(reranking, "own")):
        assert "retriever_models" not in finetuning.inputs, "keys of trainings without such models stay the same"
    assert SEQUENCE.list_retrievers(RagTraining(rag=RagRecipe(retriever=reranking))) == [reranking]
    assert OPENRAG.list_retrievers(OpenRagTraining(openrag=OpenRagRecipe(retriever=reranking))) == [reranking]
    assert OPENRAG.list_retrievers(OpenRagTraining()) == [], "it searches a bag index"


def test_declared_part_that_is_not_saved_is_refused(job: Job[ToyTraining], tmp_path: Path) -> None:
    class IncompleteToy(Toy):
        result = replace(Toy.result, parts=frozenset({"words", "question"}))

    finetuning = Finetuning(IncompleteToy(), job)
    trained = finetuning.run(tmp_path / "one")
    with pytest.raises(UsageError, match=r"objective 'toy' saved no question in .*: write them in its `save`"):
        finetuning.publish(trained, tmp_path / "one", "toy", {})
    assert job.store.models.list_ids() == []


def test_curves_of_a_refused_training_are_drawn(job: Job[ToyTraining], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").write_text('{"kind": "dev", "step": 0, "error": 2.0}\n')
    (tmp_path / "one" / "training.json").write_text("{}")
    with pytest.raises(UsageError, match="another training"):
        Finetuning(TOY, job).run(tmp_path / "one")
    assert "dev error by steps" in (tmp_path / "one" / "training.html").read_text()
