"""Threads, tiers, and what was built, found and chosen: the only state of the package."""

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

# Threads of calls that name none; 0 leaves it to the core, which asks the system at every call.
chosen_threads = 0
_threads_from_environment = 0
_isa_reason = "best supported"
# What is wrong with a variable: said by whatever is called first, not by an import.
_faults: dict[str, str] = {}


def check_environment() -> None:
    """Raise ValueError if a variable holds what cannot be obeyed, and nothing else was chosen."""
    for fault in _faults.values():
        raise ValueError(fault)


def set_num_threads(num_threads: int | None) -> None:
    """Choose how many threads calls use that do not say so themselves.

    Parameters
    ----------
    num_threads : int or None
        Upper bound of a call, taken as given. None goes back to ``ATTN_ENGINE_NUM_THREADS`` or,
        where that is not set, to the smallest of OpenMP's maximum, the CPU affinity and the cgroup
        quota at the time of each call.

    Raises
    ------
    ValueError
        The number is not positive, or None goes back to a variable that has no such number.
    TypeError
        It is not an integer.

    Notes
    -----
    Between calls the threads wait awake for some 30 us, then they sleep. That is set for GCC's
    OpenMP runtime while the package is imported, unless the environment has ``GOMP_SPINCOUNT`` or
    ``OMP_WAIT_POLICY``, and holds for all users of that runtime in the process. Where another
    library has loaded the runtime before, it stays as that has found it: several ms by default,
    in which NumPy's products find a core taken. Import attn_engine first, or set the variable.
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
    """How many threads a call may use now that does not say so itself."""
    check_environment()
    return chosen_threads or _core.default_threads()


def resolve_threads(num_threads: Any) -> int:
    """A call's `num_threads`: its own, or the chosen one."""
    if _faults:  # asked here too: this is on the way of the shortest calls
        check_environment()
    return chosen_threads if num_threads is None else check_threads("num_threads", num_threads)


def set_isa(name: str | None) -> None:
    """Choose the instruction set tier of all later calls.

    Parameters
    ----------
    name : {"scalar", "avx2", "avx512"} or None
        In any case of letters. None is the best that this CPU supports. Either overrules
        ``ATTN_ENGINE_ISA``, also one that cannot be obeyed.

    Raises
    ------
    ValueError
        The tier is unknown, not part of this build or not supported by this CPU; there is no
        fallback.
    TypeError
        `name` is not a string.
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
    """The instruction set tier of all later calls."""
    check_environment()
    return _core.get_isa()


def show_config(mode: str = "stdout") -> dict[str, Any] | None:
    """Show what was built, what was found on this machine and what was chosen, and why.

    Parameters
    ----------
    mode : {"stdout", "dicts"}
        Print it, fit for a bug report, or return it.

    Returns
    -------
    dict or None
        With ``mode="dicts"``: version, platform, python, numpy, ml_dtypes (whether there),
        compiler, openmp (its date, 0 = none), dtypes, isa (compiled, supported, selected, reason),
        threads (number, reason, affinity, quota; 0 = no quota) and faults, a sentence for each
        variable of the environment that cannot be obeyed. Every other call raises those.

    Raises
    ------
    ValueError
        The mode is another one.
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
    """CPUs that the cgroups (v1 and v2) of this process allow, rounded up; 0 = no limit.

    A limit of any group holds for those in it, so all from the process's own up to the root count.
    `root` is where /proc and /sys are.
    """
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        # In a container the path may be the host's: its groups are missing here, the root is ours.
        names = [name for name in PurePosixPath(path).parts if name not in ("/", "..")]
        for mount in {"cpu", controllers} if controllers else {""}:
            for depth in range(len(names) + 1):
                group = root.joinpath("sys/fs/cgroup", mount, *names[:depth])
                quotas.append(_group_quota(group, version=1 if controllers else 2))
    return min(filter(None, quotas), default=0)


def _group_quota(group: Path, version: int) -> int:
    """CPUs that one control group allows; 0 = no limit."""
    files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    fields = " ".join(_read(group / file) for file in files).split()
    try:
        quota, period = (int(field) for field in fields)
    except ValueError:  # "max", or no such group
        return 0
    return ceil(quota / period) if quota > 0 and period > 0 else 0


def _read(file: Path) -> str:
    """A small file's text; nothing if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _check_isa(argument: str, name: Any) -> str:
    """A tier that runs here."""
    if not isinstance(name, str):
        raise TypeError(f"{argument}: got {name!r}, expected the name of a tier or None")
    supported, tier = ", ".join(_core.supported_isas()), name.lower()
    if tier not in _core.ISAS:
        raise ValueError(f"{argument}: {name!r} is not in this build; this CPU can run {supported}")
    if tier not in _core.supported_isas():
        raise ValueError(f"{argument}: this CPU cannot run {name!r}; it can run {supported}")
    return tier


def _threads_reason() -> str:
    """Where `get_num_threads` has its number from."""
    if _THREADS_VARIABLE in _faults:
        return "see faults"
    if chosen_threads == 0:
        return "smallest of OpenMP's maximum, CPU affinity and cgroup quota"
    return _THREADS_VARIABLE if chosen_threads is _threads_from_environment else "set_num_threads"


def _affinity() -> int:
    """CPUs that threads may run on, whether or not OpenMP has bound this one to some of them."""
    return _core.usable_cpus() or os.cpu_count() or 1


def _as_lines(config: dict[str, Any], indent: str = "") -> list[str]:
    """A nested dict as aligned text."""
    width = max(map(len, config))
    lines = []
    for name, value in config.items():
        if isinstance(value, dict):
            lines += [f"{indent}{name}", *_as_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{name:{width}}  {_as_text(value)}")
    return lines


def _as_text(value: list[str] | bool | int | str) -> str:
    """One value of the report, for people."""
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value or "none")


def _apply_threads(text: str) -> None:
    """The number of threads that the environment asks for."""
    global _threads_from_environment, chosen_threads
    if not text.strip().isdecimal():
        raise ValueError(f"{_THREADS_VARIABLE}: got {text!r}, expected a whole number above 0")
    chosen_threads = _threads_from_environment = check_threads(_THREADS_VARIABLE, int(text))


def _apply_isa(name: str) -> None:
    """The tier that the environment asks for."""
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
    """Bytes of the stacks of OpenMP's threads, the most any runtime is told; 0 = the default."""
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
