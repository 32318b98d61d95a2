"""Fixtures for every tier this CPU runs, every dtype and both kernels; the final error table."""

import importlib.util
import signal

import numpy as np
import pytest
from hypothesis import settings
from support.oracle import worst
from support.variants import DTYPES, KERNELS

import attn_engine
from attn_engine import _core

# The same problems in every run; --hypothesis-profile=long looks further.
settings.register_profile("usual", max_examples=60, deadline=None, derandomize=True, database=None)
settings.register_profile("long", settings.get_profile("usual"), max_examples=10_000)
settings.load_profile("usual")

# A shell starts background jobs with Ctrl-C ignored, and the programs that tests interrupt would
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=_core.supported_isas())
def isa(request):
    """The tier that runs the test; the one before is restored."""
    before = attn_engine.get_isa()
    attn_engine.set_isa(request.param)
    yield request.param
    attn_engine.set_isa(before)


@pytest.fixture(scope="module")
def example(request):
    """The script that the test module calls EXAMPLE, imported."""
    path = request.module.EXAMPLE
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=DTYPES.values(), ids=DTYPES)
def dtype(request):
    """A storage type."""
    return np.dtype(request.param)


@pytest.fixture(params=KERNELS.values(), ids=KERNELS)
def n_q(request):
    """A number of queries for each of the two kernels."""
    return request.param


def pytest_addoption(parser):
    """Let a run take the variants that semantic tests leave out."""
    parser.addoption(
        "--all-variants",
        action="store_true",
        help="run semantic tests on every tier with every dtype, not on the chosen half",
    )


def pytest_collection_modifyitems(config, items):
    """Keep of semantic tests those on the best tier and those in float32."""
    if config.getoption("--all-variants"):
        return
    best, left_out = _core.supported_isas()[-1], []
    for item in items:
        if item.get_closest_marker("semantic"):
            variant = item.callspec.params
            if variant["isa"] != best and variant["dtype"] != np.float32:
                left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    dropped = set(left_out)
    items[:] = [item for item in items if item not in dropped]


def pytest_terminal_summary(terminalreporter):
    """Print the worst error of every variant as a share of its bound."""
    if not worst:
        return
    terminalreporter.section("worst error as a share of its bound")
    terminalreporter.line(
        f"{'dtype tier kernel':28}{'calls':>8}{'output':>9}{'weights':>9}{'lse':>9}"
    )
    for variant, record in sorted(worst.items()):
        shares = "".join(f"{record[name]:9.3f}" for name in ("output", "weights", "lse"))
        terminalreporter.line(f"{' '.join(variant):28}{record['calls']:8}{shares}")
