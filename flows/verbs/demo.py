"""`bookwheel demo`: build, measure and search a small real library."""

from pathlib import Path

from flows.command.reply import Common, Reply
from flows.demo import QUESTIONS, demo_dump, demo_encoder
from flows.verbs.builds import reindex
from flows.verbs.evaluate import evaluate
from flows.verbs.search import search

EXAMPLE_QUESTIONS = (
    "Who assassinated Abraham Lincoln?",
    "What is the tallest mountain in Alaska?",
    "Which philosopher was the teacher of Alexander the Great?",
)


def demo(*, folder: str = "bookwheel-demo", common: Common | None = None) -> Reply:
    """Build, measure and search a snapshot of 96 real Wikipedia articles.

    The snapshot has a real encoder, and three questions are searched. The demo takes a few minutes
    on two cores the first time, and seconds after that. It needs the extra `demo`, and no network.

    Args:
        folder: The folder for the demo's store; other stores are not changed.
    """
    build_reply = reindex(dump=demo_dump(), store=folder, encoder=demo_encoder())
    evaluate_reply = evaluate(store=folder, questions=str(QUESTIONS))
    search_reply = search(*EXAMPLE_QUESTIONS, store=folder, k=1)
    document = {"reindex": build_reply.document, "evaluate": evaluate_reply.document, "search": search_reply.document}
    text = "\n\n".join([build_reply.text, evaluate_reply.text, search_reply.text, _format_next_step(folder)])
    return Reply(document, text)


def _format_next_step(folder: str) -> str:
    return f"Ask it yourself:  bookwheel search 'your question' --store {Path(folder)}"
