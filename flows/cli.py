"""The `bookwheel` command: a thin layer in which each subcommand is one function call.

A setting comes from the flag, else from the environment (`BOOKWHEEL_STORE`, …), else from
`bookwheel.toml` in this or a parent folder, else from the default.
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
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path
from typing import Any

try:
    from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownCommandError, UnusedCliTokensError
    from cyclopts.argument import Argument, ArgumentCollection, update_argument_collection
    from cyclopts.config import Env, Toml
except ModuleNotFoundError:  # only the core package is installed, without the extra `pipeline`
    sys.exit("bookwheel: the command line is not installed: run `pip install 'bookwheel[pipeline]'` and try again")

from flows.command.reply import Common, Reply
from rag_model.errors import BookwheelError, format_error
from rag_model.process import INTERRUPTED
from rag_model.secrets import mask_secrets, refuse_url_as_path
from rag_model.store.versions.signatures import TRUST_VARIABLE, TrustedKeys
from rag_model.untrusted_text import escape_controls

_USAGE_EXIT_CODE, _INTERRUPT_EXIT_CODE = 2, 130
_MIN_INTERRUPT_SECONDS = 1.0  # time after which another Ctrl-C ends the process at once
# These variables are set before Prefect and transformers are imported. Values that the user has set
# are kept.
_ENVIRONMENT = {
    "PREFECT_LOGGING_LEVEL": "CRITICAL",  # a failure is reported once, in one sentence
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # Prefect's default of 20 seconds is too short on a busy machine
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",  # bookwheel already runs one process per core
    "TRANSFORMERS_VERBOSITY": "error",
    # without this, the progress bars of several files overwrite each other
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}


# Subcommands that build indexes. Their idle threads sleep, because busy waiting costs CPU time.
_BUILD_VERBS = {"reindex", "release", "add-index", "import", "takedown", "index", "demo"}
_BUILD_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}
_RETRIEVER_OPTIONS = {"--retriever", "--index"}
_BEAM_OPTIONS = "BEAM_OPTIONS"


def select_settable(commands: tuple[str, ...], arguments: ArgumentCollection) -> ArgumentCollection:
    """Return the arguments that may get their values from the environment or from `bookwheel.toml`.

    These are the options, and the positional argument `beam_options`. Other positional arguments,
    such as REF of `tag`, must be given on the command line, because `BOOKWHEEL_REF` is the ref that
    a service follows. The subcommand `index` ignores the settings `index` and `questions`, which
    other subcommands take as the name of a snapshot's index and as a file of questions. It also
    ignores `beam_options`, because it builds in a folder of this machine, which the workers of a
    cluster cannot reach. `--retriever` and `--index` both choose the retriever: if one is given as
    a flag, a setting of the other is ignored. `--yes` counts only as a flag, because a forgotten
    setting would turn off all dry runs. `--keep` of `expire` counts only as a flag, too, because
    `keep` of other subcommands is the number of pulled snapshots on a disk.
    """
    excluded_names = {"--yes"}
    if commands == ("expire",):
        excluded_names |= {"--keep"}
    if commands == ("index",):
        excluded_names |= {"--index", "--questions", "--beam-options"}
    if any(argument.tokens for argument in arguments if _RETRIEVER_OPTIONS & set(argument.names)):
        excluded_names |= _RETRIEVER_OPTIONS
    settable = arguments.copy()
    settable[:] = [
        argument
        for argument in arguments
        if not excluded_names & set(argument.names)
        and any(name.startswith("-") or name == _BEAM_OPTIONS for name in argument.names)
    ]
    return settable


def select_environment_options(commands: tuple[str, ...], arguments: ArgumentCollection) -> ArgumentCollection:
    """Return the arguments that may get their values from environment variables.

    These are all that `select_settable` returns, except `--cache-bytes`: the cache itself reads
    `BOOKWHEEL_CACHE_BYTES`, and the option is refused without `--from-store`.
    """
    settable = select_settable(commands, arguments)
    settable[:] = [argument for argument in settable if "--cache-bytes" not in argument.names]
    return settable


class _Environment(Env):
    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        super().__call__(app, commands, select_environment_options(commands, arguments))

    def _convert_argument(self, commands: tuple[str, ...], argument: Argument) -> str:
        """Return the variable that help shows for an argument; hide it if it does not set the argument."""
        arguments = ArgumentCollection()  # type: ignore[no-untyped-call]
        arguments.append(argument)
        if not select_environment_options(commands, arguments):
            argument.parameter = Parameter.combine(argument.parameter, Parameter(show_env_var=False))
        return super()._convert_argument(commands, argument)


class _TomlSettings(Toml):
    def __call__(self, app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
        """Fill in the arguments that have a value in the file.

        Cyclopts itself would drop a key that is also the name of a subcommand, such as `index`.
        """
        settable = select_settable(commands, arguments)
        update_argument_collection(self.config, self.source, settable, root_keys=(), allow_unknown=True)

    def _load_config(self, path: Path) -> dict[str, Any]:
        try:
            return super()._load_config(path)
        except (OSError, ValueError) as error:
            raise CycloptsError(msg=f"{path} cannot be read as TOML ({error}): correct it or remove it") from error


app = App(
    name="bookwheel",
    help="Turn a Wikipedia dump into a checked, versioned, searchable retrieval index.",
    help_epilogue="Exit codes: 0 ok, 1 failure, 2 usage, 3 a gate or a verification failed.",
    version=lambda: version("bookwheel"),
    default_parameter=Parameter(negative=()),
    config=[
        _Environment("BOOKWHEEL_", command=False),
        _TomlSettings("bookwheel.toml", search_parents=True),
    ],
)
app.command("flows.verbs.demo:demo", help="Build, check and search a small real library: no account, no network.")
app.command("flows.verbs.builds:reindex", help="Build a snapshot from a dump, check it, publish it, move the ref.")
app.command("flows.verbs.search:search", help="Find passages of a snapshot for questions.")
app.command("flows.verbs.answer:answer", help="Answer questions with a model that reads passages of a snapshot.")
app.command("flows.verbs.evaluate:evaluate", help="Measure retrieval, or a model, on questions with known answers.")
app.command(
    "flows.verbs.finetune:finetune",
    help="Train encoders, a reranker or a RAG model on a snapshot; keep it in the store.",
)
app.command("flows.verbs.release:release", help="Rebuild, evaluate, and move the ref if the evaluation is accepted.")
app.command("flows.verbs.reproduce:reproduce", help="Reproduce a published table: dpr, rag, or a file of rows.")
app.command("flows.verbs.index:index", help="Build one index over vectors of any origin, or plan it.")
app.command("flows.verbs.builds:add_index", name="add-index", help="Build indexes over an existing snapshot.")
app.command("flows.verbs.refs:log", help="List the moves of a ref, newest first.")
app.command("flows.verbs.show:show", help="Show the content of a snapshot and the recipe that rebuilds it.")
app.command("flows.verbs.show:diff", help="Compare two snapshots: articles, passages, settings, bytes to pull.")
app.command("flows.verbs.refs:tag", help="Give a snapshot a name: create a ref, or move it.")
app.command("flows.verbs.refs:rollback", help="Move a ref back to a snapshot that it named before.")
app.command("flows.verbs.takedown:takedown", help="Take pages out of every snapshot, and keep them out.")
app.command("flows.verbs.upkeep:verify", help="Hash all files of a snapshot again and list damaged files.")
app.command("flows.verbs.upkeep:expire", help="Delete old moves of refs, and snapshots that no remaining move names.")
app.command("flows.verbs.upkeep:gc", help="Delete files that no snapshot and no running build needs.")
app.command("flows.verbs.copies:pull", help="Fetch the missing files of a snapshot into a folder, verified and atomic.")
app.command("flows.verbs.serve:serve", help="Answer questions over HTTP from a snapshot; follow its ref.")
app.command("flows.machine.doctor:doctor", help="Check this machine, a store and the servers before a run.")
app.command("flows.verbs.copies:export", help="Write a snapshot in a layout that other tools read.")
app.command(
    "flows.verbs.copies:convert_weights",
    name="convert-weights",
    help="Write a copy of a model whose pickled weights become safetensors.",
)
app.command(
    "flows.verbs.builds:import_library",
    name="import",
    help="Make a snapshot from existing passages and vectors.",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one subcommand and exit with its exit code.

    After a failure, print one sentence; with `--debug` also print the stack trace.
    """
    command_words = sys.argv[1:] if argv is None else argv
    for name, value in {**_ENVIRONMENT, **(_BUILD_ENVIRONMENT if _BUILD_VERBS & {*command_words[:1]} else {})}.items():
        os.environ.setdefault(name, value)
    # With the default threshold, a fifth of the import time is garbage collection that finds
    # nothing.
    gc.set_threshold(250_000, 10, 10)
    atexit.register(gc.freeze)  # otherwise freeing the imported objects at exit takes a second
    if logging.lastResort is not None:
        logging.lastResort.setLevel(logging.ERROR)  # Beam's import warns of unused Google clients
    exit_code = run(command_words)
    if exit_code == _INTERRUPT_EXIT_CODE:
        INTERRUPTED.set()  # Python waits for threads, which may wait for a store
        signal.signal(signal.SIGINT, _interrupt)
    sys.exit(exit_code)


def run(argv: Sequence[str]) -> int:
    """Run one subcommand, print its reply, and return the exit code.

    Returns:
        0 ok, 1 failure, 2 usage, 3 a gate or a verification failed, 130 interrupted.
    """
    common = Common(json="--json" in argv)
    try:
        verb, bound_arguments, _ = app.parse_args(argv, exit_on_error=False, print_error=False)
        common = bound_arguments.arguments.get("common") or common
        for argument_value in bound_arguments.arguments.values():
            if isinstance(argument_value, Path):
                refuse_url_as_path(argument_value)
        with handle_interrupts(), _set_trust_file(common.trust):
            reply = verb(*bound_arguments.args, **bound_arguments.kwargs)
    except CycloptsError as error:
        return _report_failure(_describe_usage_error(error, argv), _USAGE_EXIT_CODE, as_json=common.json)
    except BookwheelError as error:
        if common.debug:
            traceback.print_exc()
        return _report_failure(str(error), error.exit_code, as_json=common.json)
    except KeyboardInterrupt:
        return _report_failure(
            "interrupted: finished work is recorded; run the same command again to continue",
            _INTERRUPT_EXIT_CODE,
            as_json=common.json,
        )
    except Exception as error:
        if common.debug:
            raise
        cause = error.__cause__  # the ImportError, if the subcommand's module cannot be imported
        if isinstance(cause, ModuleNotFoundError):
            error_message = f"{cause.name} is not installed: install bookwheel again, with the extras that you use"
        else:
            error_message = f"unexpected {type(error).__name__}: {error}"
        return _report_failure(f"{error_message}; run again with --debug for the trace", 1, as_json=common.json)
    return _print_reply(reply, common)


def _describe_usage_error(error: CycloptsError, argv: Sequence[str]) -> str:
    """Return the parser's message, or a clearer one for an unknown command or a missing or surplus argument."""
    if isinstance(error, UnknownCommandError) and error.unused_tokens:
        # The parser's own message imports all subcommands, which takes seconds.
        unknown_name = error.unused_tokens[0]
        hints = [f"did you mean {name!r}?" for name in get_close_matches(unknown_name, list(app), n=1)]
        return " ".join([f"there is no command {unknown_name!r}:", *hints, "`bookwheel --help` lists all commands"])
    parser_message = format_error(error)
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        verb = " ".join(error.command_chain or ())
        return f"{verb} takes no argument {error.unused_tokens[0]!r}: `bookwheel {verb} --help` lists its arguments"
    if not isinstance(error, MissingArgumentError) or error.argument is None or error.argument.tokens:
        return parser_message
    if any(argument in error.argument.names for argument in argv):
        return f"{parser_message} Write a value that begins with `-` as {error.argument.name}=VALUE."
    verb = " ".join(error.command_chain or ())
    parser_sentence = f'Command "{verb}" parameter {error.argument.name} requires an argument.'
    return parser_message.replace(
        parser_sentence, f"{verb} needs {error.argument.name}: `bookwheel {verb} --help` describes it."
    )


@contextmanager
def _set_trust_file(trust_file: Path | None) -> Iterator[None]:
    """Set the trust file in the environment, for the stores of this process and of its children.

    The file is read once here, so that an invalid file is refused before the subcommand begins.
    """
    previous_value = os.environ.get(TRUST_VARIABLE)
    if trust_file is not None:
        # `absolute` would turn an empty path, which is refused below, into the current folder
        os.environ[TRUST_VARIABLE] = str(trust_file.absolute()) if trust_file.name else ""
    try:
        TrustedKeys.from_environment()
        yield
    finally:
        if trust_file is not None:
            os.environ.pop(TRUST_VARIABLE)
            os.environ.update({TRUST_VARIABLE: previous_value} if previous_value is not None else {})


@contextmanager
def handle_interrupts() -> Iterator[None]:
    """Let an interrupt (Ctrl-C) end the subcommand at any time.

    asyncio would replace Python's signal handler by one that cancels the current task. If that task
    is about to end anyway (for example a call to Prefect's server), the interrupt is lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)
        INTERRUPTED.clear()


_first_interrupt_time = [0.0]  # by `time.monotonic`


def _interrupt(signal_number: int, frame: object) -> None:
    """End the subcommand; at a Ctrl-C more than a second later, end the process without waiting for
    its threads.
    """
    if not INTERRUPTED.is_set():
        INTERRUPTED.set()
        _first_interrupt_time[0] = time.monotonic()
        raise KeyboardInterrupt
    # Most commands end within a second, and the keyboard repeats a key that is held.
    if time.monotonic() - _first_interrupt_time[0] > _MIN_INTERRUPT_SECONDS:
        show_cursor = b"\x1b[?25h" if sys.stderr.isatty() else b""
        os.write(2, show_cursor + b"\nbookwheel: ended at once; run the same command again to continue\n")
        os._exit(_INTERRUPT_EXIT_CODE)


def _report_failure(sentence: str, exit_code: int, *, as_json: bool = False) -> int:
    safe_sentence = escape_controls(mask_secrets(sentence))
    if as_json:
        _write_line(json.dumps({"error": safe_sentence, "exit_code": exit_code}, indent=2))
    print(f"bookwheel: {safe_sentence}", file=sys.stderr)
    return exit_code


def _print_reply(reply: Any, common: Common) -> int:
    if not isinstance(reply, Reply):  # --help and --version print their own output
        return 0
    _write_line(
        escape_controls(json.dumps(reply.document, ensure_ascii=False, indent=2) if common.json else reply.text)
    )
    return _report_failure(reply.refusal, reply.refusal_code) if reply.refusal else 0


def _write_line(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reading program has ended, as in `bookwheel log | head`
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - so that the interpreter's last flush does not fail


if __name__ == "__main__":
    main()
