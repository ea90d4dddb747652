"""Prefect flows and the `bookwheel` command line. This package contains no algorithm and no DoFn.

Command line:
    cli: the `bookwheel` command and its settings.
    verbs: one module per subcommand, which calls a flow or the library.
    command: options, replies and output formats that the subcommands share.

Builds:
    reindex, add_index, import_library: build a snapshot from a dump, another snapshot (with other
        indexes or another encoder), or from existing vectors.
    finish: the last stages of every build: build the indexes, publish, and move the ref.
    index: build a single index file over vectors from files.
    takedown, maintain: remove pages; rebuild and expire by schedule.

Models and evaluation:
    finetune, training: train a model; the types of its settings, for command line and forms.
    rebuild: rebuild, in a child process, the index that a training searches.
    compare, evaluate, evaluation_records: measure retrievers and models, and record the results.
    release, release_evaluator: rebuild, train, evaluate, and move the ref if the evaluation is
        accepted.
    reproduce, reproduction: reproduce a published table.

Shared:
    stage, parameters: decorators of flows and stages, their parameters, progress, and failed runs.
    outcome, artifacts: the outcomes of flows, and how the Prefect UI shows them.
    start_reindex, start_model_run: start a run on a machine of the estimated size.
    machine: local services, work pools, automations and `doctor`.
    demo: the pages, questions and encoder of `bookwheel demo`.
"""

from rag_model.process import configure_native_libraries

configure_native_libraries()
