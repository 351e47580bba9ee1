"""The `slipstream` command: its verbs, and the one place where an error becomes a sentence and an exit code.

`slipstream generate --prompt "Once upon a time"`
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from slipstream.cli import bench, chat, compare, convert, demo, generate, inspect, quantize, serve, smoke
from slipstream.errors import SlipstreamError
from slipstream.version import __version__

BAD_INPUT = 2
INTERRUPTED = 130

app = typer.Typer(
    help="DFlash speculative decoding: the same text as plain decoding, in fewer steps.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)
app.command("generate")(generate.command)
app.command("chat")(chat.command)
app.command("serve")(serve.command)
app.command("smoke")(smoke.command)
app.command("bench")(bench.command)
app.command("inspect")(inspect.command)
app.command("convert")(convert.command)
app.command("quantize")(quantize.command)
app.command("compare")(compare.command)
app.command("demo")(demo.command)


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


def _complain(message: str) -> None:
    print(f"slipstream: {' '.join(message.split())}", file=sys.stderr)


def run() -> None:
    """Runs the command line and exits: 0, 2 with one sentence on bad input, or 130 when interrupted."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character must not end the program.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        code = typer.main.get_command(app).main(prog_name="slipstream", standalone_mode=False)
        sys.stdout.flush()
    except SlipstreamError as error:
        _complain(str(error))
        code = BAD_INPUT
    except typer.TyperException as error:
        _complain(error.format_message())
        code = BAD_INPUT
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head`); Python would complain again when it flushes stdout on the way out.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    run()
