"""How commands of the shell end: errors on one line, or whole with --debug.

What enters: a command's arguments. What leaves: an exit code. It knows no command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from .errors import SpecbenchError

UNREADABLE = 2  # also what wrong arguments end with
DEBUG = "--debug"
WrongArguments: Any = typer.BadParameter.__mro__[1]  # click's UsageError, whichever click typer brings
HELP = "NoArgsIsHelpError"  # no error, but how click shows help


class Group(TyperGroup):
    """Commands whose errors are one line; --debug may stand anywhere and shows where an error came from."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        debug = DEBUG in args[:end]
        if debug:
            args = [DEBUG, *(arg for i, arg in enumerate(args) if arg != DEBUG or i > end)]
        parse = super().parse_args
        parsed: list[str] = _one_line(lambda: parse(ctx, args), debug)
        return parsed

    def invoke(self, ctx: Any) -> Any:
        run = super().invoke
        return _one_line(lambda: run(ctx), bool(ctx.params.get("debug")))


def _one_line(call: Callable[[], Any], debug: bool) -> Any:
    try:
        return call()
    except WrongArguments as error:
        if debug or type(error).__name__ == HELP:
            raise
        where = error.ctx.command_path if error.ctx else "specbench"
        _say(f"{error.format_message()} (see {where} --help)")
    except SpecbenchError as error:
        if debug:
            raise
        _say(f"{type(error).__name__}: {error}")
    except BrokenPipeError:  # the reader of the output has enough
        sys.stderr.close()
        raise typer.Exit(0) from None
    raise typer.Exit(UNREADABLE)


def _say(text: str) -> None:
    typer.echo(f"specbench: {' '.join(text.split())}", err=True)
