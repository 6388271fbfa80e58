"""The `undertow` command: thin commands, each in its own file, over the rooms below.

Exit codes: 0 good, 1 refused (one sentence on standard error), 2 misuse, 130 and 143 after Ctrl-C and SIGTERM. Nothing
here imports torch at the top of a file, so that asking for help costs no second.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__, settings
from ..errors import UndertowError, UnusableTarget
from . import bench, c3, collective, collective_tune, plan
from .demo import demo
from .doctor import doctor
from .profile import profile
from .report import report
from .run import run
from .sim import sim

REFUSED = 1
MISUSED = 2
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


class _Terminated(KeyboardInterrupt):
    """SIGTERM, made to take the way of Ctrl-C: the launcher then ends its ranks gently and leaves nothing behind."""


class _Commands(TyperGroup):
    """Turns what a command raises into an exit code, in one place for all of them."""

    def invoke(self, ctx: Any) -> Any:
        signal.signal(signal.SIGTERM, _on_terminate)
        try:
            return super().invoke(ctx)
        except UnusableTarget as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(MISUSED) from None
        except UndertowError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(REFUSED) from None
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            typer.echo(f"Nothing more can be written: {str(error.strerror).lower()}.", err=True)
            raise typer.Exit(REFUSED) from None
        except _Terminated:
            raise typer.Exit(TERMINATED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


def _on_terminate(number: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt the cleaning up after the first
    raise _Terminated


app = typer.Typer(
    name="undertow",
    cls=_Commands,
    help="Undertow hides multi-GPU communication beneath computation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (demo, run, doctor, profile, sim, report):
    app.command(context_settings={"allow_interspersed_args": _command is not run})(_command)
collective.app.command("tune")(collective_tune.tune)
app.add_typer(collective.app, name="collective")
app.add_typer(plan.app, name="plan")
app.add_typer(c3.app, name="c3")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"undertow {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
    log: Annotated[str, typer.Option("--log", help="Level of messages, such as info, here and in the ranks.")] = "",
) -> None:
    if log:
        from ..fabric import logs

        logs.configure(log)
        os.environ[settings.LOG.name] = log.upper()  # for the ranks


def main() -> None:
    """The entry point of the `undertow` script."""
    if sys.stdout is None:  # closed by whoever started this: what is said to nobody is lost, and no error
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        app(prog_name="undertow")
    except KeyboardInterrupt:  # before or after the command itself
        sys.exit(INTERRUPTED)
