"""`bookwheel import`: make a snapshot from existing passages and vectors."""

from itertools import takewhile
from typing import Any

from flows.command.reply import Common, Reply
from flows.import_library import import_library as import_flow
from flows.outcome import BuildOutcome, build_and_reply
from flows.parameters import derive_command
from rag_model.errors import format_count


@derive_command(import_flow, "passages", excluded=["vectors"])
def import_library(
    arguments: dict[str, Any],
    *vectors: str,
    common: Common | None = None,
) -> Reply:
    """Make a snapshot from passages and vectors; encode only a few, to check the encoder.

    Args:
        vectors: .npy, Parquet or faiss Flat files, or folders of them; row i for passage i. By
            default read from PASSAGES. Beam's options after `--`.
    """
    files = tuple(takewhile(lambda word: not word.startswith("-"), vectors))
    arguments |= {"vectors": files, "beam_options": vectors[len(files) :]}
    return build_and_reply(_format_outcome, import_flow, **arguments)


def _format_outcome(outcome: BuildOutcome) -> str:
    move_sentence = f"{outcome.ref}@{outcome.number} is" if outcome.number else f"{outcome.ref} did not move to"
    passages_text = format_count(outcome.counts["passages"], "passage")
    return f"{move_sentence} snapshot {outcome.snapshot}: {passages_text}; see {outcome.report}"
