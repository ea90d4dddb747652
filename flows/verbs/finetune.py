"""`bookwheel finetune`: train a model on a snapshot."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.command.reply import Common, Reply
from flows.finetune import FinetuneOutcome
from flows.finetune import finetune as finetune_flow
from flows.parameters import derive_command
from flows.stage import run_flow
from rag_model.errors import UsageError
from rag_model.training.objectives.objective import get_objective
from rag_model.training.settings import render_settings


@derive_command(finetune_flow, "kind", excluded=["store", "work"])
def finetune(
    arguments: dict[str, Any],
    *,
    store: str | None = None,
    work: Path | None = None,
    print_settings: bool = False,
    common: Common | None = None,
) -> Reply | None:
    """Train a model on a snapshot and put it into the store.

    An interrupted run continues when the same command is run again; a finished one is not repeated.
    Until the model is published its newest checkpoint is in the store, so that the run may also
    continue on another machine; `stored = false` in [loop] switches this off. The checkpoint takes
    no additional space in a store on the same disk; in any other store it takes about 3 times the
    weights, and twice that while it is replaced.

    For several GPUs, run it with `torchrun --nproc-per-node=gpu --no-python bookwheel finetune …`.

    Use a pair of encoders, or a SiDR, with `bookwheel reindex --encoder model:NAME`; a RAG or
    RA-DIT model with `bookwheel answer --model NAME`, and with `--ref NAME` too if rag-end2end
    built its own index; a cross-encoder with `bookwheel search --retriever "rerank(hnsw,
    model:NAME, 50)"`.

    Args:
        store: The store of snapshots: a folder, s3://…, gs://… or az://…. Required for a training.
        work: Keep checkpoints and curves in this folder; the newest checkpoint is in the store
            as well.
        print_settings: Print a file for --training with all settings, defaults and sources;
            train nothing.
    """
    objective = get_objective(arguments["kind"])
    if print_settings:
        text = render_settings(objective)
        return Reply({"kind": objective.name, "settings": text}, text.rstrip())
    option_names = ("train", "dev") if objective.takes_examples else ()
    required_options = {"--store": store, **{f"--{name}": arguments[name] for name in option_names}}
    if store is None or None in required_options.values():
        missing_options = [name for name, value in required_options.items() if value is None]
        raise UsageError(f"{' and '.join(missing_options)} {'is' if len(missing_options) == 1 else 'are'} required")
    arguments |= {"store": store, "work": str(work) if work else None}
    # Only the first process reports to a server, which then shows one run for the training.
    is_leader = os.environ.get("RANK", "0") == "0"
    outcome = run_flow(finetune_flow, **arguments) if is_leader else finetune_flow.fn(**arguments)
    if outcome is None:
        return None
    return Reply(asdict(outcome), "\n".join(_format_outcome(outcome)))


def _format_outcome(outcome: FinetuneOutcome) -> list[str]:
    initial_metrics, best_metrics = outcome.metrics["before"], outcome.metrics["after"]
    steps_text = f"{outcome.steps:,} steps" if outcome.trained else f"{outcome.steps:,} steps, by an earlier run"
    return [
        f"model     {outcome.model}",
        f"name      {outcome.name}@{outcome.number}",
        f"snapshot  {outcome.snapshot}",
        *(
            [f"index     {outcome.index} ({outcome.name}): search it with --ref {outcome.name}"]
            if outcome.index
            else []
        ),
        f"trained   {steps_text}; the best weights are those of step {outcome.best_step:,}",
        *(
            f"{measure:<16}{initial_value:>10.4g} before {best_metrics[measure]:>10.4g} after"
            for measure, initial_value in initial_metrics.items()
        ),
    ]
