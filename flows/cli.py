"""The `bookwheel` command: a thin layer in which each verb is one call.

Settings come from the flag, then the environment (`BOOKWHEEL_STORE`, …), then `bookwheel.toml` in this or a
parent folder, then the default.
Exit codes: 0 ok, 1 failure, 2 usage, 3 a gate or a verification failed.
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
except ModuleNotFoundError:  # only the core is installed
    sys.exit("bookwheel: the command line is not installed: run `pip install 'bookwheel[pipeline]'` and try again")

from flows.command.reply import Common, Reply
from rag_model.errors import BookwheelError, RefusedError, reason
from rag_model.secrets import refuse_url, without_secrets
from rag_model.store.versions.signatures import TRUST, Trust
from rag_model.terminal import printable

USAGE = 2
_ENVIRONMENT = {  # set before Prefect and transformers are imported; values that are set already are kept
    "PREFECT_LOGGING_LEVEL": "CRITICAL",  # a failure is reported once, in one sentence
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",  # a busy machine needs more than Prefect's 20
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",  # there is one process per core already
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # one a file, over each other
}


_RETRIEVER = {"--retriever", "--index"}


def _settable(commands: tuple[str, ...], arguments: ArgumentCollection) -> ArgumentCollection:
    """Leave out arguments whose name means something else in settings: `index`, of a snapshot, and `questions`.

    Leave out the retriever too if a flag gives one by either of its two names: a flag takes precedence over a setting.
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
        """Fill in the values of the file; cyclopts itself would drop a key with the name of a verb, such as `index`."""
        settable = _settable(commands, arguments)
        update_argument_collection(self.config, self.source, settable, root_keys=(), allow_unknown=True)

    def _load_config(self, path: Path) -> dict[str, Any]:
        try:
            return super()._load_config(path)
        except (OSError, ValueError) as broken:
            raise CycloptsError(msg=f"{path} cannot be read as TOML ({broken}): correct it or remove it") from broken


app = App(
    name="bookwheel",
    help="Turn a Wikipedia dump into a checked, versioned, searchable retrieval index.",
    help_epilogue="Exit codes: 0 ok, 1 failure, 2 usage, 3 a gate or a verification failed.",
    version=lambda: version("bookwheel"),
    config=[
        _Environment("BOOKWHEEL_", command=False),
        _Settings("bookwheel.toml", search_parents=True),
    ],
)
app.command("flows.verbs.demo:demo", help="Build, check and search a small real library: no account, no network.")
app.command("flows.verbs.reindex:reindex", help="Build a snapshot from a dump, check it, publish it, move the ref.")
app.command("flows.verbs.search:search", help="Find passages of a snapshot for questions.")
app.command("flows.verbs.answer:answer", help="Answer questions with a model that reads passages of a snapshot.")
app.command("flows.verbs.evaluate:evaluate", help="Measure retrieval, or a model, on questions with known answers.")
app.command(
    "flows.verbs.finetune:finetune",
    help="Train encoders, a reranker or a RAG model on a snapshot; keep it in the store.",
)
app.command("flows.verbs.release:release", help="Rebuild, evaluate, and move the ref if the evaluation is accepted.")
app.command("flows.verbs.index:index", help="Build one index over vectors of any origin, or plan it.")
app.command("flows.verbs.add_index:add_index", name="add-index", help="Build indexes over an existing snapshot.")
app.command("flows.verbs.log:log", help="List the moves of a ref, newest first.")
app.command("flows.verbs.show:show", help="Show the content of a snapshot and the recipe that rebuilds it.")
app.command("flows.verbs.diff:diff", help="Compare two snapshots: articles, passages, settings, bytes to pull.")
app.command("flows.verbs.tag:tag", help="Give a snapshot a name: create a ref, or move it.")
app.command("flows.verbs.rollback:rollback", help="Move a ref back to a snapshot that it named before.")
app.command("flows.verbs.takedown:takedown", help="Take pages out of every snapshot, and keep them out.")
app.command("flows.verbs.verify:verify", help="Hash all files of a snapshot again and list what is damaged.")
app.command("flows.verbs.expire:expire", help="Delete old moves of refs, and snapshots that no move names.")
app.command("flows.verbs.gc:gc", help="Delete files that no snapshot and no running build needs.")
app.command("flows.verbs.pull:pull", help="Copy a snapshot to a folder: only what is missing, verified, atomic.")
app.command("flows.verbs.serve:serve", help="Answer questions over HTTP from a snapshot; follow its ref.")
app.command("flows.verbs.doctor:doctor", help="Check this machine, a store and the servers before a run.")
app.command("flows.verbs.export:export", help="Write a snapshot in a layout that other tools read.")
app.command("flows.verbs.adopt:adopt", name="import", help="Make a snapshot from existing passages and vectors.")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one verb and exit with its code; a failure prints one sentence, `--debug` the trace as well."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    gc.set_threshold(50_000, 10, 10)  # imported objects stay: collecting them takes a fifth of the time of imports
    atexit.register(gc.freeze)  # and freeing them at exit takes a second
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.ERROR)  # Beam's import warns of unused Google clients
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def run(argv: Sequence[str]) -> int:
    """Run one verb; print its reply; return the exit code.

    Returns:
        0 ok, 1 failure, 2 usage, 3 a gate or a verification failed, 130 interrupted.
    """
    common = Common()
    try:
        verb, bound, _ = app.parse_args(argv, exit_on_error=False, print_error=False)
        common = bound.arguments.get("common") or common
        for path in bound.arguments.values():
            if isinstance(path, Path):
                refuse_url(path)
        with interruptible(), _trusting(common.trust):
            reply = verb(*bound.args, **bound.kwargs)
    except CycloptsError as error:
        return _fail(reason(error), USAGE)
    except BookwheelError as error:
        if common.debug:
            traceback.print_exc()
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("interrupted: finished work is recorded; run the same command again to continue", 130)
    except Exception as error:
        if common.debug:
            raise
        return _fail(f"unexpected {type(error).__name__}: {error}; run again with --debug for the trace", 1)
    return _print(reply, common)


@contextmanager
def _trusting(file: Path | None) -> Iterator[None]:
    """Set the trust file in the environment, for every store that this process and those it starts will open.

    It is read once here, so that a wrong one is refused before anything begins.
    """
    before = os.environ.get(TRUST)
    if file is not None:
        os.environ[TRUST] = str(file.absolute()) if file.name else ""  # Path("") is the present folder
    try:
        Trust.given()
        yield
    finally:
        if file is not None:
            os.environ.pop(TRUST)
            os.environ.update({TRUST: before} if before is not None else {})


@contextmanager
def interruptible() -> Iterator[None]:
    """Let an interrupt end the verb at any time.

    asyncio would replace Python's handler by its own, which cancels the current task; if that task ends anyway (for
    example a call to Prefect's server) the interrupt is lost.
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
    print(f"bookwheel: {printable(without_secrets(sentence))}", file=sys.stderr)
    return code


def _print(reply: Any, common: Common) -> int:
    if not isinstance(reply, Reply):  # --help and --version print their own output
        return 0
    try:
        print(
            printable(json.dumps(reply.document, ensure_ascii=False, indent=2) if common.json else reply.text),
            flush=True,
        )
    except BrokenPipeError:  # `bookwheel log | head`
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - so that the interpreter's last flush does not fail
    return _fail(reply.refusal, RefusedError.exit_code) if reply.refusal else 0


if __name__ == "__main__":
    main()
