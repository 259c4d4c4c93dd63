"""How every command ends: an exit code, and where it is not 0, one line that says why.

    0    done
    1    a bug: the traceback stands on stderr
    2    the user's input is wrong, or the disk does not take what it should
    3    it does not fit its memory
    130  interrupted

A command is an ordinary `click.command`; its module ends with `run(main)`. It raises `UserError` for what the user can
put right and `DoesNotFit` for what its memory cannot hold, and lets everything else pass: only errors that a user can
cause and remedy are made into a line.
"""

import errno
import sys
from typing import NoReturn, Optional, Sequence

import click
from click.exceptions import NoArgsIsHelpError

from mlx_gemma3n.config import DoesNotFit, UserError

USER_ERROR, DOES_NOT_FIT, INTERRUPTED = 2, 3, 130
# What a full, read-only or foreign disk says. Other OSErrors are a bug until the code that meets them names the file.
_DISK = {
    getattr(errno, name)
    for name in ("ENOSPC", "EDQUOT", "EFBIG", "EROFS", "EACCES", "EPERM", "EIO", "ENAMETOOLONG", "ENOTDIR", "EEXIST")
    if hasattr(errno, name)
}


def fail(message: str, code: int) -> NoReturn:
    """Prints `error: message` as one line on stderr and exits with `code`."""
    click.echo("error: " + " ".join(message.split("\n")).strip(), err=True)
    sys.exit(code)


def run(command: click.Command, args: Optional[Sequence[str]] = None) -> NoReturn:
    """Runs a click command and exits.

    Args:
        command: it exits with 0 unless it raises or calls `context.exit(code)`.
        args: command-line arguments; None for those of the process.
    """
    try:
        code = command.main(args, standalone_mode=False)
    except UserError as e:
        fail(str(e), USER_ERROR)
    except DoesNotFit as e:
        fail(str(e), DOES_NOT_FIT)
    except NoArgsIsHelpError as e:
        e.show()
        sys.exit(USER_ERROR)
    except click.UsageError as e:
        hint = f" (see {e.ctx.command_path} --help)" if e.ctx else ""
        fail(e.format_message().rstrip() + hint, USER_ERROR)
    except click.ClickException as e:
        fail(e.format_message(), USER_ERROR)
    except (click.Abort, KeyboardInterrupt):
        fail("interrupted", INTERRUPTED)
    except OSError as e:
        if e.errno not in _DISK:
            raise
        where = f"{e.filename}: " if e.filename is not None else ""
        fail(f"{where}{e.strerror}", USER_ERROR)
    sys.exit(code if isinstance(code, int) else 0)
