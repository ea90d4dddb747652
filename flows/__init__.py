"""Prefect flows and the `bookwheel` command line. This package holds no algorithm and no DoFn.

Command line:
    cli: the `bookwheel` command and its settings.
    verbs: one module per verb, which calls a flow or the library.
    command: options, replies and output formats that verbs share.

Builds:
    reindex, add_index, import_library: build a snapshot from a dump, another snapshot (with other
        indexes or another encoder), or from existing vectors.
    finish: the stages that all builds share, from the indexes to the ref.
    index: one index over vectors from files.
    takedown, maintain: remove pages; rebuild and expire by schedule.

Models and evaluation:
    finetune, training: train a model; its settings and their form.
    rebuild: rebuild the index of a training in a child process.
    compare, evaluate, evaluation_records: measure retrievers and models, and record the results.
    release: rebuild, train, evaluate, and move the ref if it is accepted.

Shared:
    stage, parameters: the decorators of flows and stages, progress, and failed runs.
    outcome, artifacts: results, and their tables in the Prefect UI.
    launch, launch_model: start a run on a machine of the estimated size.
    machine: local services, work pools, automations and `doctor`.
    demo: a small real library.
"""

from rag_model.process import configure_native_libraries

configure_native_libraries()
