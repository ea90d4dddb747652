"""The `bookwheel` command: a thin layer, each verb one call.

Settings come from the flag, then the environment (`BOOKWHEEL_STORE`, …), then `bookwheel.toml` here or in a
parent folder, then the default.
Exit codes: 0 ok, 1 failure, 2 usage, 3 a gate or a verification said no.
"""

import atexit
import gc
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

try:
    from cyclopts import App, CycloptsError
    from cyclopts.argument import ArgumentCollection, update_argument_collection
    from cyclopts.config import Env, Toml
except ModuleNotFoundError:  # the core alone
    sys.exit("bookwheel: the command line is not installed: run `pip install 'bookwheel[pipeline]'` and try again")

from flows.command.reply import Common, Reply
from rag_model.errors import BookwheelError, RefusedError

USAGE = 2
_ENVIRONMENT = {  # before Prefect, transformers and the like are imported; what is set already wins
    "PREFECT_LOGGING_LEVEL": "CRITICAL",  # a failure is told once, in one sentence
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # a busy machine needs more than Prefect's 20
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",  # a process a core does that already
    "TRANSFORMERS_VERBOSITY": "error",
}


_RETRIEVER = {"--retriever", "--index"}


def _settable(commands: tuple[str, ...], arguments: ArgumentCollection) -> ArgumentCollection:
    """Leave out what settings mean otherwise: `index` there is a snapshot's, and no factory; `questions` are texts.

    And a retriever where one is given already, by either of its two names: a flag goes before a setting.
    """
    left_out = {"--index", "--questions"} if commands == ("index",) else set[str]()
    if any(argument.tokens for argument in arguments if _RETRIEVER & set(argument.names)):
        left_out |= _RETRIEVER
    settable = arguments.copy()
    settable[:] = [argument for argument in arguments if not left_out & set(argument.names)]
    return settable


class _Environment(Env):
    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        super().__call__(app, commands, _settable(commands, arguments))


class _Settings(Toml):
    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in what the file says; cyclopts itself would drop a key that is called as a verb is, such as `index`."""
        settable = _settable(commands, arguments)
        update_argument_collection(self.config, self.source, settable, root_keys=(), allow_unknown=True)

    def _load_config(self, path: Path) -> dict[str, Any]:
        try:
            return super()._load_config(path)
        except (OSError, ValueError) as broken:
            raise CycloptsError(msg=f"{path} cannot be read as TOML ({broken}): mend it or remove it") from broken


app = App(
    name="bookwheel",
    help="Turn a Wikipedia dump into a checked, versioned, searchable retrieval index.",
    help_epilogue="Exit codes: 0 ok, 1 failure, 2 usage, 3 a gate or a verification said no.",
    version=lambda: version("bookwheel"),
    config=[
        _Environment("BOOKWHEEL_", command=False),
        _Settings("bookwheel.toml", search_parents=True),
    ],
)
app.command("flows.verbs.demo:demo", help="Build, check and search a small real library: no account, no network.")
app.command("flows.verbs.reindex:reindex", help="Build a snapshot from a dump, check it, publish it, move the ref.")
app.command("flows.verbs.search:search", help="Answer questions with passages of a snapshot.")
app.command("flows.verbs.answer:answer", help="Answer questions with a RAG model, from passages of a snapshot.")
app.command("flows.verbs.evaluate:evaluate", help="Measure retrieval on questions with known answers.")
app.command("flows.verbs.finetune:finetune", help="Train encoders or a RAG model on a snapshot; keep it in the store.")
app.command("flows.verbs.index:index", help="Build one index over anyone's vectors, or plan it.")
app.command("flows.verbs.add_index:add_index", name="add-index", help="Build indexes over a snapshot that exists.")
app.command("flows.verbs.log:log", help="List the moves of a ref, newest first.")
app.command("flows.verbs.show:show", help="Show what a snapshot holds and the recipe that rebuilds it.")
app.command("flows.verbs.diff:diff", help="Compare two snapshots: articles, passages, settings, bytes to pull.")
app.command("flows.verbs.tag:tag", help="Give a snapshot a name: create a ref, or move it.")
app.command("flows.verbs.rollback:rollback", help="Move a ref back to a snapshot that it named before.")
app.command("flows.verbs.takedown:takedown", help="Take pages out of every snapshot, and keep them out.")
app.command("flows.verbs.verify:verify", help="Read every byte of a snapshot again and name what is wrong.")
app.command("flows.verbs.expire:expire", help="Forget old moves of refs, and snapshots that nothing names any more.")
app.command("flows.verbs.gc:gc", help="Delete what no snapshot and no running build needs.")
app.command("flows.verbs.pull:pull", help="Copy a snapshot to a folder: only what is missing, verified, atomic.")
app.command("flows.verbs.serve:serve", help="Answer questions over HTTP from a snapshot; follow its ref.")
app.command("flows.verbs.doctor:doctor", help="Say what this machine, a store and the servers lack before a run.")
app.command("flows.verbs.export:export", help="Write a snapshot in a layout that other tools read.")
app.command("flows.verbs.adopt:adopt", name="import", help="Start a snapshot from passages and vectors there are.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its code; a failure prints one sentence, `--debug` the trace as well."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    gc.set_threshold(50_000, 10, 10)  # what is imported stays: looking at it again and again takes a fifth of its time
    atexit.register(gc.freeze)  # and taking it apart at the end takes a second
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.ERROR)  # Beam's import warns of clients of Google's that nobody asked for
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one verb; print its reply; return the exit code.

    Returns:
        0 ok, 1 failure, 2 usage, 3 a gate or a verification said no, 130 interrupted.
    """
    common = Common()
    try:
        verb, bound, _ = app.parse_args(argv, exit_on_error=False, print_error=False)
        common = bound.arguments.get("common", common)
        with interruptible():
            reply = verb(*bound.args, **bound.kwargs)
    except CycloptsError as error:
        return _fail(" ".join(str(error).split()), USAGE)
    except BookwheelError as error:
        if common.debug:
            traceback.print_exc()
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted: what was finished is recorded; run the same command again to go on", 130)
    except Exception as error:
        if common.debug:
            raise
        return _fail(f"unexpected {type(error).__name__}: {error}; run again with --debug for the trace", 1)
    return _print(reply, common)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let an interrupt end the verb wherever it is.

    asyncio would put a handler of its own in the place of Python's: it cancels the task at hand, and where that task
    ends all the same (a call to Prefect's server, say) the interrupt is lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _fail(sentence: str, code: int) -> int:
    print(f"bookwheel: {sentence}", file=sys.stderr)
    return code


def _print(reply: Any, common: Common) -> int:
    if not isinstance(reply, Reply):  # --help and --version print for themselves
        return 0
    try:
        print(
            json.dumps(reply.document, ensure_ascii=False, indent=2) if common.json else reply.text,
            flush=True,
        )
    except BrokenPipeError:  # `bookwheel log | head`
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - so that the interpreter's own flush is quiet
    return _fail(reply.refusal, RefusedError.exit_code) if reply.refusal else 0
