"""A fork of the tests' own process, in which code may load our package anew, miss other packages,
and die.

Other packages stay loaded: an interpreter that starts from nothing takes seconds for PyTorch alone.
"""

import gc
import os
import subprocess
import sys
import tempfile
import traceback
import warnings

CLOSED = -1


def forked(code, *hidden, stdout=None, stderr=None, env=None):
    """Run `code` as subprocess.run would: our package is not loaded yet, the `hidden` ones are not
    installed.

    What it writes goes to the files `stdout` and `stderr`, or into the result, or nowhere if they
    are `CLOSED`. In its environment, `env` is added; a variable that is None there is removed.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = [
            temporary if given is None else given
            for given, temporary in ((stdout, out), (stderr, err))
        ]
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of Python 3.12, where other threads run
            child = os.fork()
        if not child:
            _run(code, hidden, files, env or {})
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = [(file.seek(0), file.read().decode())[1] for file in (out, err)]
    return subprocess.CompletedProcess(code, status, *said)


def command(*words, **how):
    """Call `scaffpd` with these words in a fork."""
    return forked(
        f"import sys; sys.argv = {['scaffpd', *words]}; from scaffpd.cli import main; main()", **how
    )


def _run(code, hidden, files, env):
    status = 1
    try:
        gc.disable()  # it would copy what is shared with the parent
        for name, value in env.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        sys.stdout, sys.stderr = (
            _opened(file, number) for number, file in enumerate(files, start=1)
        )
        for name in [name for name in sys.modules if name.partition(".")[0] == "scaffpd"]:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(hidden))
        exec(compile(code, "forked", "exec", dont_inherit=True), {"__name__": "forked"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(_flushed(status))


def _opened(file, number):
    """The stream on a file of the process, as the interpreter opens it; none where it is closed."""
    if file == CLOSED:
        os.close(number)
        return None
    os.dup2(file if isinstance(file, int) else file.fileno(), number)
    return open(
        number,
        "w",
        encoding="utf-8",
        errors="backslashreplace" if number == 2 else "strict",
        closefd=False,
    )


def _flushed(status):
    """The interpreter's last act: what cannot be written then is said, and makes the status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            os.write(2, f"Exception ignored in: {stream}\n{traceback.format_exc()}".encode())
            status = 120
    return status
