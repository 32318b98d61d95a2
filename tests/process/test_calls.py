"""Effects of a call on its process: forks, signals, threads, rounding state, memory.

Tests that could hang or end the interpreter run in an interpreter of their own:
support/process_programs.py has the programs with their checks, this file their settings.
"""

import ctypes.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import fork_programs, process_programs

import attn_engine
from attn_engine import _core

TESTS = Path(__file__).parents[1]  # where a program finds support

x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="about x86-64 processors")


def run(program, *args, emulator=(), timeout=120, **environment):
    """Run a program in a fresh interpreter; its failure or hang is the test's."""
    command = [*emulator, sys.executable, "-m", program.__module__, program.__name__]
    command.append(json.dumps(args))
    env = {k: v for k, v in os.environ.items() if not k.startswith("ATTN_ENGINE_")}
    # NumPy's own threads would be counted as ours, and slow down the start of every program
    env |= {"OPENBLAS_NUM_THREADS": "1", **environment}
    options = {"env": env, "timeout": timeout, "cwd": TESTS}
    result = subprocess.run(command, check=False, capture_output=True, text=True, **options)
    assert result.returncode == 0, f"exit {result.returncode}\n{result.stdout}{result.stderr}"


def test_b97_parent_and_child_both_compute_after_a_fork(isa):
    run(fork_programs.fork_again_and_again, 100, ATTN_ENGINE_ISA=isa)


def test_b97_fork_while_other_threads_are_in_a_call():
    run(fork_programs.fork_while_threads_compute, 50)


@pytest.mark.parametrize("isa", ["avx2", "scalar"], ids=str)
def test_fork_in_a_signal_handler_during_a_call_on_two_threads(isa):
    if isa in _core.supported_isas():
        run(fork_programs.fork_in_a_signal_handler, 10, ATTN_ENGINE_ISA=isa)


@pytest.mark.parametrize("how", ["preloaded", "loaded globally"])
def test_fork_where_another_openmp_runtime_serves_the_calls(how):
    library = ctypes.util.find_library("omp")
    if library is None and "CI" in os.environ:
        pytest.fail("LLVM's libomp is required in CI")
    if library is None:
        pytest.skip("LLVM's OpenMP (Debian package libomp5-14) not found")
    if how == "preloaded":
        run(fork_programs.fork_again_and_again, 10, LD_PRELOAD=library)
    else:
        run(fork_programs.fork_beside_a_global_runtime, library, 10)


def test_b97_fork_pool():
    run(fork_programs.fork_pool, 4)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", ["one head", "one query block", "many heads", "decode"])
def test_ctrl_c_ends_a_call_of_30_s_within_200_ms(isa, kind, threads):
    run(process_programs.interrupt, kind, threads, ATTN_ENGINE_ISA=isa)


LONG_PIECES = ["hiding mask", "softmax", "wide keys", "wide values", "wide decode"]


@pytest.mark.parametrize("kind", LONG_PIECES)
def test_ctrl_c_ends_a_call_of_one_long_piece_of_work(isa, kind):
    run(process_programs.interrupt_long, kind, ATTN_ENGINE_ISA=isa)


WIDE_ROWS = {
    "additive": 1 << 22,
    "additive values": 1 << 23,
    "additive backward": 1 << 22,
    "dot backward": 1 << 22,
    "backward": 1 << 21,
    "append": 1 << 21,
    "cached decode": 1 << 21,
    "cached prefill": 1 << 21,
}


@pytest.mark.parametrize("kind, d", WIDE_ROWS.items(), ids=WIDE_ROWS)
def test_ctrl_c_ends_a_call_on_wide_rows(isa, kind, d):
    run(process_programs.interrupt_wide, kind, d, ATTN_ENGINE_ISA=isa)


@pytest.mark.parametrize("kind", ["merge", "rotary"])
def test_ctrl_c_ends_numpys_part_of_a_long_call(kind):
    run(process_programs.interrupt_long, kind)


def test_ctrl_c_ends_a_call_whose_own_thread_has_run_out_of_work():
    run(process_programs.interrupt_while_one_thread_is_left, 12)


def test_ctrl_c_ends_no_call_of_another_thread():
    run(process_programs.interrupt_main_while_a_thread_computes)


def test_a_handler_that_raises_ends_the_call():
    run(process_programs.handle_signal, True)


def test_a_handler_that_returns_lets_the_call_go_on():
    run(process_programs.handle_signal, False)


@pytest.mark.parametrize("num_threads", [1, 2, None])
def test_calls_from_16_python_threads_keep_their_bits(isa, num_threads):
    run(process_programs.call_from_many_threads, 16, 20, num_threads, ATTN_ENGINE_ISA=isa)


@pytest.mark.parametrize("omp", [{}, {"OMP_NUM_THREADS": "64"}], ids=["", "OMP_NUM_THREADS=64"])
def test_b99_no_more_threads_than_cpus(omp):
    cpus = len(os.sched_getaffinity(0))
    run(process_programs.default_call, cpus, min(cpus, _core.default_threads()), **omp)
    run(process_programs.default_call, 1, 1, **omp)


def test_b99_no_more_threads_than_openmp_is_told():
    run(process_programs.default_call, len(os.sched_getaffinity(0)), 1, OMP_NUM_THREADS="1")


@pytest.mark.parametrize("n_kv", [2048, 5003])
def test_b78_decode_has_the_same_bits_for_1_to_64_threads(isa, n_kv):
    run(process_programs.decode_with_1_to_64_threads, n_kv, ATTN_ENGINE_ISA=isa)


@x86_64
def test_b103_floating_point_control_is_left_as_found(isa):
    run(process_programs.keep_floating_point_control, ATTN_ENGINE_ISA=isa)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_b103_subnormal_values_survive_in_every_thread(isa, n_q, dtype):
    query, key, value = process_programs.problem(batch=8, n_q=n_q, n_kv=128, dtype=dtype)
    value[:] = np.finfo(dtype).smallest_subnormal * 1024
    output = attn_engine.scaled_dot_product_attention(0 * query, key, value, num_threads=3)
    np.testing.assert_array_equal(output, value[:, :, :n_q])


@pytest.mark.parametrize("threads", [1, 2])
def test_no_memory_for_scratch_is_a_memory_error(isa, threads):
    run(process_programs.run_out_of_memory, threads, ATTN_ENGINE_ISA=isa)


@pytest.mark.parametrize("omp", [{}, {"OMP_STACKSIZE": "2G"}], ids=["", "OMP_STACKSIZE=2G"])
def test_a_call_runs_on_the_threads_that_can_be_started(omp):
    run(process_programs.run_out_of_threads, **omp)


@pytest.mark.skipif(os.geteuid() != 0, reason="a process limit binds another user than root")
@pytest.mark.parametrize("free", [0, 1, 2, 4])
def test_teams_that_grow_at_once_stay_within_a_process_limit(free):
    run(process_programs.grow_under_a_process_limit, free)


@pytest.mark.parametrize(
    "omp",
    [{"OMP_PROC_BIND": "true"}, {"OMP_PLACES": "cores"}, {"GOMP_CPU_AFFINITY": "0-1023"}],
    ids=str,
)
def test_binding_leaves_a_default_call_its_threads(omp):
    cpus = len(os.sched_getaffinity(0))
    run(process_programs.default_call, cpus, min(cpus, _core.default_threads()), **omp)


@x86_64
@pytest.mark.parametrize("cpu, tier", [("Nehalem", "scalar"), ("Haswell", "avx2")])
def test_b102_older_processors_meet_no_newer_instruction(cpu, tier):
    qemu = shutil.which("qemu-x86_64") or shutil.which("qemu-x86_64-static")
    if qemu is None and "CI" in os.environ:
        pytest.fail("qemu-user is required in CI")
    if qemu is None:
        pytest.skip("qemu-x86_64 (Debian package qemu-user) not found")
    # told to, OpenBLAS, which NumPy loads, stays within what the emulated processors know
    emulator = [qemu, "-cpu", cpu]
    run(process_programs.run_on_old_cpu, tier, emulator=emulator, OPENBLAS_CORETYPE="Nehalem")
