"""Running a script, module or command as ``python`` itself would, from inside a running
interpreter.

Each function makes a new ``__main__``, sets ``sys.argv`` and ``sys.path[0]``, and executes. What
the code raises comes through, ``SystemExit`` and ``KeyboardInterrupt`` included, so that the
interpreter ends as it would have; only its traceback, when it is printed, begins with the code's
own first frame.
"""
from __future__ import annotations

import builtins
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from importlib.abc import InspectLoader

#: files whose frames stand between the interpreter and the user's code, besides frozen ones; `hide`
#: adds to them
_OURS = {__file__, contextlib.__file__, importlib.util.__file__, pkgutil.__file__}


class CannotRun(Exception):
    """There is nothing to run under that name; the message is what ``python`` would say.
    ``status``: its exit status."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status = status


def hide(*files: str) -> None:
    """Leave frames of these files out of the beginning of tracebacks, too."""
    _OURS.update(files)


def script(path: str, arguments: list[str]) -> None:
    """As ``python path arguments...``: a source or ``.pyc`` file, a folder or zip archive with
    ``__main__.py``, or ``-`` for stdin.

    Raises CannotRun when there is no such file.
    """
    sys.argv[:] = [path, *arguments]
    if path == "-":
        _first_on_path("")
        with _own_frames_only():
            _execute(compile(sys.stdin.read(), "<stdin>", "exec", dont_inherit=True),
                     _main(__file__="<stdin>"))
        return
    file = os.path.join(os.getcwd(), path)
    importer = pkgutil.get_importer(file)
    if hasattr(importer, "find_spec"):  # a folder or an archive
        _place(file)
        with _own_frames_only():
            _run_spec(_spec_in(importer, path))
        return
    _first_on_path(os.path.dirname(os.path.realpath(path)))
    with _own_frames_only():
        code = _read(file)
        _execute(code, _main(__file__=file, __cached__=None,
                             __loader__=importlib.machinery.SourceFileLoader("__main__", file)))


def module(name: str, arguments: list[str]) -> None:
    """As ``python -m name arguments...``: a module, or a package's ``__main__``. Raises CannotRun
    when there is none."""
    sys.argv[:] = ["-m", *arguments]
    with _own_frames_only():
        spec = _find(name)
        sys.argv[0] = str(spec.origin)
        _run_spec(spec)


def command(code: str, arguments: list[str]) -> None:
    """As ``python -c code arguments...``."""
    sys.argv[:] = ["-c", *arguments]
    _first_on_path("")
    with _own_frames_only():
        _execute(compile(code, "<string>", "exec", dont_inherit=True), _main())


# --- what python sets up --------------------------------------------------------------------------

def finished(run: Callable[[str, list[str]], None], name: str, arguments: list[str]) -> int:
    """Runs code by one of the functions above, to its end: 0, also where it ends itself with status
    0. Of code that cannot run it prints why, and returns the status. Another SystemExit comes
    through."""
    try:
        run(name, arguments)
    except CannotRun as problem:
        print(problem, file=sys.stderr)
        return problem.status
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    return 0


def _main(**attributes: Any) -> ModuleType:
    """A new ``__main__``. Processes that multiprocessing spawns look there for what they import
    again."""
    main = ModuleType("__main__")
    main.__dict__.update({"__builtins__": builtins, "__package__": None, "__spec__": None,
                          **attributes})
    sys.modules["__main__"] = main
    return main


def _execute(code: CodeType, main: ModuleType) -> None:
    exec(code, main.__dict__)


def _run_spec(spec: importlib.machinery.ModuleSpec) -> None:
    code = cast("InspectLoader", spec.loader).get_code(spec.name)  # `_find` refuses others
    if code is None:
        raise CannotRun(f"No code object available for {spec.name}", 1)
    _execute(code, _main(__file__=spec.origin, __cached__=spec.cached, __loader__=spec.loader,
                         __package__=spec.parent, __spec__=spec))


def _read(path: str) -> CodeType:
    try:
        with io.open_code(path) as file:
            code = pkgutil.read_code(file)  # compiled already, or None
        if code is None:
            with io.open_code(path) as file:
                text = file.read()
    except OSError as problem:
        raise CannotRun(f"can't open file {path!r}: [Errno {problem.errno}] {problem.strerror}",
                        2) from None
    return code or compile(text, path, "exec", dont_inherit=True)


def _find(name: str) -> importlib.machinery.ModuleSpec:
    if name.startswith("."):
        raise CannotRun("Relative module names not supported", 1)
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as problem:
        if problem.name is None or not (name + ".").startswith(problem.name + "."):
            raise  # a parent package's own import failed
        raise CannotRun(f"Error while finding module specification for {name!r} "
                        f"({type(problem).__name__}: {problem})",
                        1) from None
    if spec is None:
        raise CannotRun(f"No module named {name}", 1)
    if spec.submodule_search_locations is None:
        return spec
    inner = None if name.endswith(".__main__") else importlib.util.find_spec(name + ".__main__")
    if inner is None:
        raise CannotRun(f"No module named {name}.__main__; {name!r} is a package and cannot be "
                        "directly executed", 1)
    return inner


def _spec_in(importer: Any, path: str) -> importlib.machinery.ModuleSpec:
    spec = importer.find_spec("__main__")
    if spec is None or spec.loader is None:
        raise CannotRun(f"can't find '__main__' module in {path!r}", 1)
    return spec


def _first_on_path(folder: str) -> None:
    """``python -m`` has put the working directory there; where it was told not to, nothing is to be
    put there."""
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path[0] = folder


def _place(folder: str) -> None:
    """A folder or archive that is run goes on the path in any case."""
    if getattr(sys.flags, "safe_path", False) or sys.flags.isolated:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder


# --- tracebacks -----------------------------------------------------------------------------------

@contextlib.contextmanager
def _own_frames_only() -> Iterator[None]:
    """What is raised inside goes on its way; when at last the interpreter prints it, frames that
    are not the user's are gone."""
    try:
        yield
    except (SystemExit, CannotRun):
        raise
    except BaseException:
        sys.excepthook = _Trimming(sys.excepthook)
        raise


class _Trimming:
    """An excepthook, the script's own one if it has set any, that is shown the trimmed
    traceback."""

    def __init__(self, hook: Any):
        self._hook = hook

    def __call__(self, kind: type, error: BaseException, traceback: TracebackType | None) -> None:
        while traceback is not None and _not_theirs(traceback.tb_frame.f_code.co_filename):
            traceback = traceback.tb_next
        error.__traceback__ = sys.last_traceback = traceback
        self._hook(kind, error, traceback)


def _not_theirs(file: str) -> bool:
    return file in _OURS or file.startswith(("<frozen runpy", "<frozen importlib"))
