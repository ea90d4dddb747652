"""`bookwheel finetune`: one call of the flow."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.reply import Common, Reply, SnapshotName, StoreUrl
from flows.finetune import Finetuned
from flows.finetune import finetune as finetune_flow
from flows.stage import run_flow
from flows.training import KindName, read_tables
from rag_model.training.objectives.registry import objectives

_OFFERED = "; ".join(
    f"`{one.name}`: {one.summary}{''.join(f', `--{option}`' for option in sorted(one.options))}" for one in objectives()
)


def finetune(
    kind: Annotated[KindName, Parameter(help=_OFFERED)],
    /,
    *,
    store: StoreUrl,
    train: Annotated[str, Parameter(help="DPR's JSON, a question CSV or JSONL, triples, KILT, or a BEIR folder.")],
    dev: Annotated[str, Parameter(help="The same, to choose the best weights by.")],
    ref: SnapshotName = "latest",
    encoder: Annotated[
        str | None,
        Parameter(help="Begin as this: a folder, a hub name, or `model:NAME`; else as what the snapshot carries."),
    ] = None,
    generator: Annotated[str | None, Parameter(help="Begin as this: a folder or a hub name.")] = None,
    max_steps: Annotated[int | None, Parameter(help="Steps to train, whatever the recipe says.")] = None,
    name: Annotated[str | None, Parameter(help="The model's name in the store; by default its kind.")] = None,
    training: Annotated[
        Path | None, Parameter(help="A TOML file of settings; what it leaves out keeps its default.")
    ] = None,
    work: Annotated[Path | None, Parameter(help="Keep checkpoints and curves in this folder.")] = None,
    common: Common | None = None,
) -> Reply:
    """Train a model on a snapshot and put it into the store.

    A run that was interrupted goes on when the same command is run again; one that ended is looked up. Then a DPR pair
    is used by `bookwheel reindex --encoder model:NAME`, a RAG model by `bookwheel answer --model NAME`.
    """
    tables: Any = read_tables(training)
    folder = str(work) if work else None
    outcome = run_flow(finetune_flow, kind, store, train, dev, ref, encoder, generator, tables, name, max_steps, folder)
    return Reply(outcome.to_json(), "\n".join(_lines(outcome)))


def _lines(outcome: Finetuned) -> list[str]:
    before, after = outcome.metrics["before"], outcome.metrics["after"]
    trained = f"{outcome.steps:,} steps" if outcome.trained else f"{outcome.steps:,} steps, by an earlier run"
    return [
        f"model     {outcome.model}",
        f"name      {outcome.name}@{outcome.number}",
        f"snapshot  {outcome.snapshot}",
        f"trained   {trained}; the best weights are those of step {outcome.best_step:,}",
        *(f"{measure:<16}{value:>10.4g} before {after[measure]:>10.4g} after" for measure, value in before.items()),
    ]
