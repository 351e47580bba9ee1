"""The `slipstream` command: its verbs, and the one place that turns an error into a sentence and an exit code.

`slipstream generate --prompt "Once upon a time"`
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Annotated, TextIO

import typer

from slipstream.cli import bench, chat, compare, convert, demo, generate, inspect, quantize, serve, smoke
from slipstream.errors import SlipstreamError, SourceError
from slipstream.version import __version__

BAD_INPUT = 2  # exit code when a sentence on stderr says what is wrong
INTERRUPTED = 130  # exit code after Ctrl-C, as shells use it (128 + SIGINT)
# Parts of the messages by which the system, torch on a CPU or GPU, and the loader of shared libraries report that
# memory is used up. A message that matches none of them is shown as an unknown error with its traceback.
_NO_MEMORY = (os.strerror(errno.ENOMEM), "can't allocate memory", "out of memory", "failed to map segment")

app = typer.Typer(
    help="DFlash speculative decoding: the same text as plain decoding, in fewer steps.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
for verb in (generate, chat, serve, smoke, bench, inspect, convert, quantize, compare, demo):
    app.command(verb.__name__.rpartition(".")[2])(verb.command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"slipstream {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """Runs the command line and exits with the verb's code, with 2 and one sentence about what is wrong, or with 130.

    The code is 130 if the user has interrupted the program. If the program that reads the output has ended, as in
    `| head`, the exit is silent and the code is 1.
    """
    try:
        _prepare_streams()
        code = typer.main.get_command(app).main(prog_name="slipstream", standalone_mode=False)
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        code = 1
    except Exception as error:
        explained = _explain(error)
        if explained is None:
            raise
        with suppress(OSError):  # if stderr cannot be written, there is nowhere else to report it
            print(f"slipstream: {' '.join(explained.split())}", file=sys.stderr)
        code = BAD_INPUT
    for stream in (sys.stdout, sys.stderr):
        _settle(stream)
    sys.exit(code if isinstance(code, int) else 0)


def _prepare_streams() -> None:
    if sys.stderr is None:
        # Without this, a file that is opened later would get the number of standard error and receive its messages.
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # it stays open as long as the process runs
    if sys.stdout is None:
        raise SourceError("standard output is closed", "send it to a file, or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal cannot show must not end the program.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def _explain(error: Exception) -> str | None:
    """One sentence for an error with a known cause; None for any other error, which needs its traceback."""
    if isinstance(error, SlipstreamError):
        return str(error)
    if isinstance(error, typer.TyperException):
        return error.format_message()
    if isinstance(error, MemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return "there is not enough memory (choose a smaller model or --max-context, or raise the limit on memory)"
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror or error} (check the disk, and where the output goes)"
    return None


def _settle(stream: TextIO | None) -> None:
    """Flushes a stream; if it cannot be written any more, sends what is left in its buffer to /dev/null.

    Python would otherwise flush the stream again at exit and report the error a second time.
    """
    if stream is None:
        return
    try:
        stream.flush()
    except ValueError:
        return  # the stream is already closed
    except OSError:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())


if __name__ == "__main__":
    run()
