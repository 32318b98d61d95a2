"""The C checks of all primitives and kernels, built and run as CONTRIBUTING.md describes."""

import os
import subprocess
from pathlib import Path

import pytest
from support.programs import needs

from attn_engine import _core

CHECKOUT = Path(__file__).parents[2]
COMPILERS = ("cc", "gcc", "clang")


@pytest.fixture(scope="module")
def check_kernels(tmp_path_factory):
    """The program, built by cmake alone from the sources beside the tests."""
    cmake = needs("cmake")
    if "CC" not in os.environ:
        needs(*COMPILERS)
    build = tmp_path_factory.mktemp("check_kernels")
    configure = [cmake, "-S", CHECKOUT, "-B", build, "-DATTN_CHECK_KERNELS=ON"]
    for command in (configure, [cmake, "--build", build, "--parallel", str(os.cpu_count())]):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "warning:" not in done.stderr + done.stdout, done.stdout + done.stderr
    return build / "check_kernels"


def test_every_primitive_and_kernel_of_every_tier_is_right(check_kernels):
    done = subprocess.run([check_kernels], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    for isa in _core.supported_isas():
        for dtype in ("f32", "f64", "f16", "bf16"):
            for kernel in ("prefill", "decode", "softmax", "additive_backward", "threads"):
                assert any(
                    line.split()[:3] == [f"{dtype}_{isa}", kernel, "ok"]
                    for line in done.stdout.splitlines()
                ), f"{dtype}_{isa} {kernel} was not checked:\n{done.stdout}"


def test_a_tier_that_inherits_is_as_small_as_what_it_overrides(check_kernels):
    """The tier `pairs` compiles one kernel, and takes all others from the tier before."""
    objects = [*check_kernels.parent.glob("CMakeFiles/*_pairs.dir/**/*.c.o")]
    assert [path.name.split(".")[0] for path in objects] == ["prefill"]
    assert objects[0].stat().st_size < 64 * 1024
    done = subprocess.run(
        [check_kernels, "--only", "bf16_pairs"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[:3] for line in done.stdout.splitlines()[:-1]] == [
        ["bf16_pairs", group, "ok"] for group in ("decode", "prefill", "inherits")
    ]


def test_a_filter_that_fits_nothing_is_an_error(check_kernels):
    command = [check_kernels, "--only", "no such group"]
    done = subprocess.run(command, check=False, capture_output=True)
    assert done.returncode == 2
