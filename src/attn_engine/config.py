"""Threads, instruction set tier and build information: the only state of the package."""

import os
import platform
import re
from importlib.util import find_spec
from math import ceil
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from . import _core
from .inputs.options import check_threads

_THREADS_VARIABLE = "ATTN_ENGINE_NUM_THREADS"
_ISA_VARIABLE = "ATTN_ENGINE_ISA"

# Threads of calls without num_threads; with 0 the core asks the system at every call.
chosen_threads = 0
_threads_from_environment = 0
_isa_reason = "best supported"
# Errors in environment variables, raised by the first call rather than by the import.
_faults: dict[str, str] = {}


def check_environment() -> None:
    """Raise ValueError for an invalid variable, unless a setter has overruled it."""
    for fault in _faults.values():
        raise ValueError(fault)


def set_num_threads(num_threads: int | None) -> None:
    """Set the number of threads of calls without `num_threads`.

    Parameters
    ----------
    num_threads : int or None
        Upper bound for each call, used as given. None restores ``ATTN_ENGINE_NUM_THREADS`` or, if
        that is not set, the smallest of OpenMP's maximum, the CPU affinity and the cgroup quota at
        the time of each call.

    Raises
    ------
    ValueError
        The number is not positive, or None restores a variable that is not a positive number.
    TypeError
        An argument has a wrong type.

    Notes
    -----
    After a call the threads spin for about 30 us and then sleep. The import of the package sets
    this for GCC's OpenMP runtime, unless the environment has ``GOMP_SPINCOUNT`` or
    ``OMP_WAIT_POLICY``, and it applies to all users of that runtime in the process. If another
    library has loaded the runtime before, threads spin for several ms by default, which slows down
    NumPy's products between calls. Import attn_engine first, or set the variable.
    """
    global chosen_threads
    if num_threads is not None:
        chosen_threads = check_threads("num_threads", num_threads)
        _faults.pop(_THREADS_VARIABLE, None)
    elif _THREADS_VARIABLE in _faults:
        raise ValueError(_faults[_THREADS_VARIABLE])
    else:
        chosen_threads = _threads_from_environment


def get_num_threads() -> int:
    """Return the number of threads used by calls without `num_threads`."""
    check_environment()
    return chosen_threads or _core.default_threads()


def resolve_threads(num_threads: Any) -> int:
    """Return the number of threads of a call: its own `num_threads` or the chosen number."""
    if _faults:  # spares the fast path a call
        check_environment()
    return chosen_threads if num_threads is None else check_threads("num_threads", num_threads)


def set_isa(name: str | None) -> None:
    """Choose the instruction set tier of all later calls.

    Parameters
    ----------
    name : {"scalar", "avx2", "avx512"} or None
        In upper or lower case. None is the best tier that this CPU supports. Both overrule
        ``ATTN_ENGINE_ISA``, even an invalid one.

    Raises
    ------
    ValueError
        The tier is unknown, not part of this build or not supported by this CPU; there is no
        fallback.
    TypeError
        An argument has a wrong type.
    """
    global _isa_reason
    if name is None:
        _core.set_isa(_core.supported_isas()[-1])
        _isa_reason = "best supported"
    else:
        _core.set_isa(_check_isa("isa", name))
        _isa_reason = "set_isa"
    _faults.pop(_ISA_VARIABLE, None)


def get_isa() -> str:
    """Return the instruction set tier of all later calls."""
    check_environment()
    return _core.get_isa()


def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Show how the package was built, what this machine has, and what was chosen and why.

    Parameters
    ----------
    mode : {"stdout", "dicts"}
        Print it, in a form for bug reports, or return it.

    Returns
    -------
    dict or None
        With ``mode="dicts"``: version, platform, python, numpy, ml_dtypes (whether there),
        compiler, openmp (its date, 0 = none), dtypes, isa (compiled, supported, selected, reason),
        threads (number, reason, affinity, quota; 0 = no quota) and faults, a sentence for each
        environment variable that is invalid. Every other call raises these.

    Raises
    ------
    ValueError
        The mode is unknown.
    """
    if mode not in ("stdout", "dicts"):
        raise ValueError(f'mode: got {mode!r}, expected "stdout" or "dicts"')
    build = _core.build_info()
    config = {
        "version": build["version"],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": find_spec("ml_dtypes") is not None,
        "compiler": build["compiler"],
        "openmp": build["openmp"],
        "dtypes": list(build["dtypes"]),
        "isa": {
            "compiled": list(build["isas"]),
            "supported": list(_core.supported_isas()),
            "selected": _core.get_isa(),
            "reason": "see faults" if _ISA_VARIABLE in _faults else _isa_reason,
        },
        "threads": {
            "number": chosen_threads or _core.default_threads(),
            "reason": _threads_reason(),
            "affinity": _affinity(),
            "quota": _quota,
        },
        "faults": list(_faults.values()),
    }
    if mode == "dicts":
        return config
    print("\n".join(_as_lines(config)))
    return None


def cpu_quota(root: Path = Path("/")) -> int:
    """Return the CPUs that this process's cgroups (v1, v2) allow, rounded up; 0 = no limit.

    The limit of a group applies to all groups in it, so the result is the smallest limit from the
    process's own group up to the root. `root` is the directory that has /proc and /sys.
    """
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be the host's: then only the root group exists here.
        names = [name for name in PurePosixPath(path).parts if name not in ("/", "..")]
        for mount in {"cpu", controllers} if controllers else {""}:
            for depth in range(len(names) + 1):
                group = root.joinpath("sys/fs/cgroup", mount, *names[:depth])
                quotas.append(_group_quota(group, version=1 if controllers else 2))
    return min(filter(None, quotas), default=0)


def _group_quota(group: Path, version: int) -> int:
    """Return the CPUs that one control group allows; 0 = no limit."""
    files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    fields = " ".join(_read(group / file) for file in files).split()
    try:
        quota, period = (int(field) for field in fields)
    except ValueError:  # "max", or no such group
        return 0
    return ceil(quota / period) if quota > 0 and period > 0 else 0


def _read(file: Path) -> str:
    """Return the text of a small file, "" if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _check_isa(argument: str, name: Any) -> str:
    """Return the name of a tier in lower case; raise if it cannot run here."""
    if not isinstance(name, str):
        raise TypeError(f"{argument}: got {name!r}, expected the name of a tier or None")
    supported, tier = ", ".join(_core.supported_isas()), name.lower()
    if tier not in _core.ISAS:
        raise ValueError(f"{argument}: {name!r} is not in this build; this CPU can run {supported}")
    if tier not in _core.supported_isas():
        raise ValueError(f"{argument}: this CPU cannot run {name!r}; it can run {supported}")
    return tier


def _threads_reason() -> str:
    """Return the source of the number of `get_num_threads`."""
    if _THREADS_VARIABLE in _faults:
        return "see faults"
    if chosen_threads == 0:
        return "smallest of OpenMP's maximum, CPU affinity and cgroup quota"
    return _THREADS_VARIABLE if chosen_threads is _threads_from_environment else "set_num_threads"


def _affinity() -> int:
    """Return the CPUs that the process may use, even if OpenMP has bound this thread to fewer."""
    return _core.usable_cpus() or os.cpu_count() or 1


def _as_lines(config: dict[str, Any], indent: str = "") -> list[str]:
    """Format a nested dict as aligned lines."""
    width = max(map(len, config))
    lines = []
    for name, value in config.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *_as_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name:{width}}  {_as_text(value)}")
    return lines


def _as_text(value: list[str] | bool | int | str) -> str:
    """Format one value of the report."""
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value or "none")


def _apply_threads(text: str) -> None:
    """Use the number of threads of the environment variable."""
    global _threads_from_environment, chosen_threads
    if not text.strip().isdecimal():
        raise ValueError(f"{_THREADS_VARIABLE}: got {text!r}, expected a whole number above 0")
    chosen_threads = _threads_from_environment = check_threads(_THREADS_VARIABLE, int(text))


def _apply_isa(name: str) -> None:
    """Use the tier of the environment variable."""
    global _isa_reason
    _core.set_isa(_check_isa(_ISA_VARIABLE, name))
    _isa_reason = _ISA_VARIABLE


def _apply_environment() -> None:
    """Read the variables once; an empty one counts as unset."""
    for variable, apply in ((_THREADS_VARIABLE, _apply_threads), (_ISA_VARIABLE, _apply_isa)):
        if text := os.environ.get(variable):
            try:
                apply(text)
            except ValueError as error:
                _faults[variable] = str(error)


def _openmp_stack() -> int:
    """Return the largest thread stack size of OpenMP's variables, in bytes; 0 = the default."""
    sizes = [0]
    for variable in ("OMP_STACKSIZE", "GOMP_STACKSIZE", "KMP_STACKSIZE"):
        if size := re.fullmatch(
            r"\s*(\d+)\s*([BKMG]?)\s*", os.environ.get(variable, ""), re.IGNORECASE
        ):
            sizes.append(int(size[1]) << {"B": 0, "M": 20, "G": 30}.get(size[2].upper(), 10))
    return min(max(sizes), 2**62)


_quota = cpu_quota()
_core.set_thread_stack(_openmp_stack())
_core.set_cpu_quota(_quota)
_apply_environment()
