"""`bookwheel import`: make a snapshot from existing passages and vectors."""

from itertools import takewhile
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from flows.command.reply import Common, Reply, StoreUrl
from flows.import_library import import_library as import_flow
from flows.outcome import BuildOutcome, build_and_reply
from rag_model.errors import format_count
from rag_model.snapshots.recipe import read_recipe


def import_library(
    passages: str,
    /,
    *vectors: Annotated[
        str, Parameter(help="Row i for passage i; by default read from PASSAGES. Beam's options after `--`.")
    ],
    store: StoreUrl,
    encoder: Annotated[str, Parameter(help="The encoder that made the vectors: a folder or a hub name.")],
    recipe: Annotated[Path | None, Parameter(help="A TOML file with indexes and a gate.")] = None,
    index_file: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            help="NAME=FILE: take this faiss HNSW, IVF or Flat file as index NAME; repeat it for more.",
        ),
    ] = (),
    ref: Annotated[str, Parameter(help="The ref to move to the new snapshot.")] = "latest",
    common: Common | None = None,
) -> Reply:
    """Make a snapshot from passages and vectors; encode only a few, to check the encoder.

    Parameters
    ----------
    passages
        Path, URL or glob of passages or documents in a format of `reindex --dump`.
    vectors
        .npy, Parquet or faiss Flat files, or folders of them.
    """
    files = tuple(takewhile(lambda word: not word.startswith("-"), vectors))
    beam_options = vectors[len(files) :]
    settings = read_recipe(recipe) if recipe or not index_file else None
    arguments = passages, files, store, encoder, settings, ref, index_file, beam_options
    return build_and_reply(_format_outcome, import_flow, *arguments)


def _format_outcome(outcome: BuildOutcome) -> str:
    move_sentence = f"{outcome.ref}@{outcome.number} is" if outcome.number else f"{outcome.ref} did not move to"
    passages_text = format_count(outcome.counts["passages"], "passage")
    return f"{move_sentence} snapshot {outcome.snapshot}: {passages_text}; see {outcome.report}"
