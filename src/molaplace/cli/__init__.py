"""The `molaplace` command line. `molaplace.cli.commands` has a function for each command; its docstring is the command's help."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from molaplace import __version__
from molaplace.errors import MolaError, OptionError, importing

with importing("the molaplace command", "cyclopts", "cli"):
    from cyclopts import App, CycloptsError

from molaplace.cli import commands
from molaplace.cli.options import DEFAULT, OPTIONS, read_run_file

__all__ = ["app", "run"]

USAGE_ERROR, INTERRUPTED = 2, 130
"""Exit codes of a command with a wrong option, and of one that the user interrupted."""

ARGUMENTS = {"confidence": "--threshold", "val_loader": "--val", "train_loader": "--train"}
"""Arguments of the library whose flags have other names."""

SHARED = ("fit", "predict", "evaluate")
"""Commands whose work several processes can share. Any other command would repeat all of its work in each process."""

app = App(
    name="molaplace",
    help="""Post-hoc uncertainty for trained PyTorch networks: calibration, OOD detection and selective prediction.

Start with `molaplace demo`, which also trains networks, then fit and evaluate a posterior:

molaplace fit demo-results/networks --network mlp --train digits:train --val digits:val

molaplace evaluate posterior --test digits:test

With torchrun, several processes can share the work of fit, evaluate and predict:
torchrun --nproc-per-node=4 -m molaplace fit ...

Commands use one thread for each processor that they may use; OMP_NUM_THREADS sets another number.

Exit codes: 0 success; 1 error, with one line on stderr; 2 usage error; 3 success, but some inputs were left out or, for
watch, an alarm; 130 interrupted.""",
    version=f"molaplace {__version__}",
    help_format="plaintext",
    default_parameter=DEFAULT,
    group_parameters=OPTIONS,
    config=read_run_file,
    suppress_keyboard_interrupt=False,
)
for order, command in enumerate(commands.COMMANDS):
    app.command(command, sort_key=order)  # type: ignore[call-overload]


def run(tokens: Sequence[str]) -> int:
    """Run a command and return its exit code; raise `MolaError` for any error that is not about its usage."""
    name = tokens[0] if tokens else ""
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" and name not in SHARED:
        raise OptionError(
            f"molaplace {name} runs in one process, but torchrun started {size} processes. Run it without torchrun. Only "
            f"{', '.join(SHARED)} can run in several processes."
        )
    try:
        return int(app(tokens, exit_on_error=False, print_error=False, result_action="return_value") or 0)
    except CycloptsError as error:
        tokens = getattr(getattr(error, "argument", None), "tokens", ())
        files = [token.source for token in (*tokens, getattr(error, "token", None)) if token and token.source != "cli"]
        if files:
            raise OptionError(f"{files[0]}: {error}") from error
        sys.stderr.write(f"Usage: molaplace {name} [OPTIONS]; see molaplace {name} --help\nmolaplace: {error}\n")
        return USAGE_ERROR
    except MolaError as error:
        options = app[name].assemble_argument_collection(parse_docstring=False)
        flags = {option.field_info.name: option.name for option in options} | ARGUMENTS
        error.argument = flags.get(error.argument or "", error.argument)
        raise
    except KeyboardInterrupt:
        sys.stderr.write("molaplace: stopped. Complete files are unchanged. Run the command again.\n")
        return INTERRUPTED
