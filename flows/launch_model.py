"""Start a fine-tuning or an evaluation on a machine of the right size: weigh its models, data and snapshot first.

Purpose: what a person starts where runs get machines of their own (Docker, Kubernetes), and where a run that cannot fit
should be refused before it waits for a machine.
Caching: none: nothing is trained or answered here.
Requires: the extras model and train; the deployment that shall run; the examples or questions, the models' files and
the store in reach of this run.
"""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.finetune import Given, prepare
from flows.machine.pools import Launched, Most, Room, room_of, start
from flows.stage import deployed, stage
from rag_model.evaluation.needs import needs_of as of_evaluation
from rag_model.evaluation.questions import read_questions
from rag_model.evaluation.settings import Evaluation
from rag_model.generate.folder import rag_settings
from rag_model.generate.named import rag_id
from rag_model.machine import Needs
from rag_model.store.store import Store
from rag_model.store.versions.models import model_folder
from rag_model.store.versions.snapshot import Snapshot
from rag_model.training.needs import needs_of as of_training
from rag_model.training.recipes import Kind

FINETUNE, EVALUATE = "finetune/library", "evaluate/library"


@deployed("launch-finetune")
def launch_finetune(
    kind: Kind,
    store: str,
    train: str,
    dev: str,
    ref: str = "latest",
    encoder: str | None = None,
    generator: str | None = None,
    recipe: dict[str, dict[str, Any]] | None = None,
    name: str | None = None,
    max_steps: int | None = None,
    deployment: str = FINETUNE,
    most: Most | None = None,
    hours: float | None = None,
) -> Launched:
    """Estimate what a fine-tuning needs, and start one with that much memory, and so many cores or a GPU.

    Args:
        kind: `dpr` (a question and a passage encoder), `rag-sequence` or `rag-token` (a question encoder and a
            generator).
        store: URL or folder of the store.
        train: examples to learn from: DPR's JSON, question CSV or JSONL, triples, KILT, or a BEIR folder.
        dev: examples to choose the best weights by.
        ref: a ref, ref@number, an id or a unique prefix of a snapshot.
        encoder: what the encoders begin as: a folder, a hub name, or `model:NAME`; else what the snapshot carries.
        generator: what the generator begins as: a folder or a hub name.
        recipe: tables of settings, as a TOML file has them (`flows.training`); else the papers'.
        name: the name among models to move; else `kind`.
        max_steps: train so many steps, whatever the recipe says.
        deployment: what to start, FLOW/NAME; its work pool decides how a machine is asked for.
        most: what one run may be given; else what this machine has.
        hours: how long the training may take, about: more cores, or a GPU, where fewer would take longer. Else 6, and
            as short as can be where runs share this machine.

    Raises:
        ResourceError: it would not fit; nothing was started.
        UsageError: there is no such deployment, or its pool is not this machine's and no limits are given.
        BookwheelError: what `finetune` would refuse before it trains.
    """
    room = room_of(deployment, most, hours)
    what: dict[str, Any] = {"kind": kind, "store": store, "train": train, "dev": dev, "ref": ref}
    begin = {"encoder": encoder, "generator": generator, "recipe": recipe, "max_steps": max_steps}
    return start(deployment, {**what, **begin, "name": name}, room, weigh_training(what, begin, room))


@deployed("launch-evaluate")
def launch_evaluate(
    store: str,
    model: str,
    questions: str,
    ref: str = "latest",
    settings: Evaluation | None = None,
    rows: str | None = None,
    kilt: str | None = None,
    report: str | None = None,
    asks: str | None = None,
    deployment: str = EVALUATE,
    most: Most | None = None,
    hours: float | None = None,
) -> Launched:
    """Estimate what an evaluation needs, and start one with that much memory, and so many cores or a GPU.

    Args:
        store: URL or folder of the store.
        model: a RAG model of the store (a ref, ref@number, an id, a unique prefix), or a folder of one.
        questions: DPR's CSV, JSONL with `question` and `answers`, or KILT's JSONL; a path or URL.
        ref: a ref, ref@number, an id or a unique prefix of a snapshot.
        settings: everything else, the retriever among it; the default settings if none are given.
        rows: write one JSON object a question to this file.
        kilt: write KILT's prediction file to this one.
        report: write the HTML report to this one.
        asks: of a model that does not say so, the passage encoder whose passages it asks: a folder or a hub name.
        deployment: what to start, FLOW/NAME; its work pool decides how a machine is asked for.
        most: what one run may be given; else what this machine has.
        hours: how long it may take, about: more cores, or a GPU, where fewer would take longer. Else 6, and as short as
            can be where runs share this machine.

    Raises:
        ResourceError: it would not fit; nothing was started.
        UsageError: there is no such deployment, or its pool is not this machine's and no limits are given.
        BookwheelError: there are no such questions, model or snapshot.
    """
    room = room_of(deployment, most, hours)
    needs = weigh_evaluation(store, model, questions, ref, settings or Evaluation(), room)
    files = {"rows": rows, "kilt": kilt, "report": report}
    given = {"store": store, "model": model, "questions": questions, "ref": ref, "asks": asks, **files}
    return start(deployment, {**given, "settings": settings and asdict(settings)}, room, needs)


@stage
def weigh_training(what: Mapping[str, Any], begin: Mapping[str, Any], room: Room) -> Needs:
    """Estimate what a fine-tuning needs: the settings are settled and the examples read as it will do it."""
    told = Given(begin["encoder"], begin["generator"], begin["recipe"] or {}, begin["max_steps"])
    job = prepare(Store.open(what["store"]), what["kind"], what["train"], what["dev"], what["ref"], told)
    return of_training(job, room.limits, room.hours)


@stage
def weigh_evaluation(store: str, model: str, questions: str, ref: str, settings: Evaluation, room: Room) -> Needs:
    """Estimate what an evaluation needs."""
    opened, asked = Store.open(store), read_questions(questions)
    named = rag_id(opened, model)
    folder = Path(named) if Path(named).is_dir() else model_folder(opened, named)
    k = settings.k or rag_settings(folder).k
    snapshot = Snapshot.from_store(opened, ref)
    return of_evaluation(snapshot, folder, k, len(asked.questions), settings, room.limits, room.hours)
