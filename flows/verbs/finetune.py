"""`bookwheel finetune`: train a model on a snapshot."""

import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.command.reply import Common, Reply, SnapshotName
from flows.finetune import FinetuneOutcome
from flows.finetune import finetune as finetune_flow
from flows.stage import run_flow
from flows.training import KindName, read_tables
from rag_model.errors import UsageError
from rag_model.training.objectives.objective import get_objective, list_objectives
from rag_model.training.settings import render_settings

_OBJECTIVES_HELP = "; ".join(
    f"`{objective.name}`: {objective.summary}{''.join(f', `--{option}`' for option in sorted(objective.options))}"
    for objective in list_objectives()
)


def finetune(
    kind: Annotated[KindName, Parameter(help=_OBJECTIVES_HELP)],
    /,
    *beam_options: Annotated[
        str,
        Parameter(
            help="Options of Beam and its runner, after `--`: for rebuilds of the index, and the scores of `ra-dit`."
        ),
    ],
    store: Annotated[
        str | None, Parameter(help="The store of snapshots: a folder, s3://…, gs://… or az://…. Required.")
    ] = None,
    train: Annotated[
        str | None,
        Parameter(
            help="DPR's JSON, a question CSV or JSONL, triples, KILT, or a BEIR folder. Required, except by `ict` and "
            "`realm`."
        ),
    ] = None,
    dev: Annotated[
        str | None, Parameter(help="Validation set for checkpoint selection; same formats as --train.")
    ] = None,
    ref: SnapshotName = "latest",
    encoder: Annotated[
        str | None,
        Parameter(help="Initial encoder: a folder, a hub name, or `model:NAME`; by default that of the snapshot."),
    ] = None,
    generator: Annotated[
        str | None, Parameter(help="Initial generator: a folder, a hub name, or `model:NAME`.")
    ] = None,
    teacher: Annotated[
        str | None, Parameter(help="Cross-encoder to learn from: a folder, a hub name, or `model:NAME`.")
    ] = None,
    max_steps: Annotated[int | None, Parameter(help="Number of steps of each stage, in place of the recipe's.")] = None,
    name: Annotated[str | None, Parameter(help="The ref of the model in the store; by default its kind.")] = None,
    training: Annotated[
        Path | None, Parameter(help="A TOML file of settings; omitted ones keep their defaults.")
    ] = None,
    work: Annotated[
        Path | None,
        Parameter(help="Keep checkpoints and curves in this folder; the newest checkpoint is in the store as well."),
    ] = None,
    print_settings: Annotated[
        bool,
        Parameter(
            negative="", help="Print a file for --training with all settings, defaults and sources; train nothing."
        ),
    ] = False,
    common: Common | None = None,
) -> Reply | None:
    """Train a model on a snapshot and put it into the store.

    An interrupted run continues when the same command is run again; a finished one is not repeated.
    Until the model is published its newest checkpoint is in the store, so that the run may also
    continue on another machine; `stored = false` in [loop] switches this off. The checkpoint takes
    no additional space in a store on the same disk; in any other store it takes about 3 times the
    weights, and twice that while it is replaced.

    For several GPUs, run it by `torchrun --nproc-per-node=gpu --no-python bookwheel finetune …`.

    Use a pair of encoders, or a SiDR, with `bookwheel reindex --encoder model:NAME`; a RAG or
    RA-DIT model with `bookwheel answer --model NAME`, and with `--ref NAME` too if rag-end2end
    built its own index; a cross-encoder with `bookwheel search --retriever "rerank(hnsw,
    model:NAME, 50)"`.
    """
    if print_settings:
        text = render_settings(get_objective(kind))
        return Reply({"kind": kind, "settings": text}, text.rstrip())
    required = {"--store": store} | ({"--train": train, "--dev": dev} if get_objective(kind).takes_examples else {})
    if store is None or None in required.values():
        missing_options = [name for name, value in required.items() if value is None]
        raise UsageError(f"{' and '.join(missing_options)} {'is' if len(missing_options) == 1 else 'are'} required")
    if beam_options and not beam_options[0].startswith("-"):
        raise UsageError(f"finetune takes no argument {beam_options[0]!r}: examples are given as --train and --dev")
    tables: Any = read_tables(training)
    folder = str(work) if work else None
    initial_models = (encoder, generator, teacher)
    data_arguments = kind, store, train, dev, ref
    arguments = (*data_arguments, *initial_models, tables, name, max_steps, folder, beam_options)
    # A server sees one run of a training, not one a process.
    is_first = os.environ.get("RANK", "0") == "0"
    outcome = run_flow(finetune_flow, *arguments) if is_first else finetune_flow.fn(*arguments)
    if outcome is None:
        return None
    return Reply(outcome.to_json(), "\n".join(_format_outcome(outcome)))


def _format_outcome(outcome: FinetuneOutcome) -> list[str]:
    initial_metrics, best_metrics = outcome.metrics["before"], outcome.metrics["after"]
    trained = f"{outcome.steps:,} steps" if outcome.trained else f"{outcome.steps:,} steps, by an earlier run"
    return [
        f"model     {outcome.model}",
        f"name      {outcome.name}@{outcome.number}",
        f"snapshot  {outcome.snapshot}",
        *(
            [f"index     {outcome.index} ({outcome.name}): search it with --ref {outcome.name}"]
            if outcome.index
            else []
        ),
        f"trained   {trained}; the best weights are those of step {outcome.best_step:,}",
        *(
            f"{measure:<16}{value:>10.4g} before {best_metrics[measure]:>10.4g} after"
            for measure, value in initial_metrics.items()
        ),
    ]
