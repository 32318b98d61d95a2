"""Threads, tiers and the report about them: the source of each choice, and that it takes effect."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import attn_engine
from attn_engine import _core, config

CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
several_cpus = pytest.mark.skipif(CPUS < 2, reason="needs 2 CPUs to tell a limit of 1 from none")

TIERS = _core.supported_isas()
# Enough work for many threads.
LARGE = np.zeros((8, 16, 512, 64), np.float32)


@pytest.fixture(autouse=True)
def choices_restored():
    """Nothing chosen in a test outlives it."""
    isa = attn_engine.get_isa()
    yield
    attn_engine.set_num_threads(None)
    attn_engine.set_isa(isa)
    _core.set_cpu_quota(config.cpu_quota())


def run(*arguments, expect_failure=False, **variables):
    """What a fresh interpreter prints with these environment variables (or its traceback)."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ATTN_ENGINE_", "OMP_", "GOMP_"))
    }
    finished = subprocess.run(
        [sys.executable, *arguments],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (finished.returncode != 0) == expect_failure, finished.stderr
    return finished.stderr if expect_failure else finished.stdout.strip()


PRINT_THREADS = "import attn_engine; print(attn_engine.get_num_threads())"


def planned_threads(**options):
    """The threads that a large call would run on."""
    return attn_engine.explain(LARGE, LARGE, LARGE, **options)["threads"]


def test_threads_argument_before_setter_before_default():
    attn_engine.set_num_threads(3)
    assert attn_engine.get_num_threads() == planned_threads() == 3
    assert planned_threads(num_threads=5) == 5
    attn_engine.set_num_threads(None)
    assert attn_engine.get_num_threads() == planned_threads() == _core.default_threads()


def test_set_num_threads_overrules_the_environment():
    code = """if True:
        import attn_engine
        from attn_engine import get_num_threads, set_num_threads
        reason = lambda: attn_engine.show_config("dicts")["threads"]["reason"]
        print(get_num_threads(), reason())
        set_num_threads(7)
        print(get_num_threads(), reason())
        set_num_threads(None)
        print(get_num_threads(), reason())
    """
    lines = run("-c", code, ATTN_ENGINE_NUM_THREADS=" 5 ").splitlines()
    environment = "5 ATTN_ENGINE_NUM_THREADS"
    assert lines == [environment, "7 set_num_threads", environment]


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "4096", "٣x"])
def test_bad_threads_in_environment_are_an_error(value):
    error = run("-c", PRINT_THREADS, expect_failure=True, ATTN_ENGINE_NUM_THREADS=value)
    assert "ValueError: ATTN_ENGINE_NUM_THREADS: got " in error
    assert value in error
    assert "expected" in error


def test_empty_variables_count_as_unset():
    assert run("-c", PRINT_THREADS, ATTN_ENGINE_NUM_THREADS="", ATTN_ENGINE_ISA="") == run(
        "-c", PRINT_THREADS
    )


@pytest.mark.parametrize("value", [0, -1, 10**6])
def test_setter_checks_values(value):
    with pytest.raises(ValueError, match="^num_threads: got .*, expected 1 to 1024"):
        attn_engine.set_num_threads(value)


@pytest.mark.parametrize("value", [1.0, "2", True])
def test_set_num_threads_refuses_other_types(value):
    with pytest.raises(TypeError, match="^num_threads: got .*, expected a whole number"):
        attn_engine.set_num_threads(value)


@several_cpus
def test_default_threads_follow_affinity():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); " + PRINT_THREADS
    assert run("-c", PRINT_THREADS) != "1"
    assert run("-c", code) == "1"


@several_cpus
def test_default_threads_follow_openmp_environment():
    assert run("-c", PRINT_THREADS, OMP_NUM_THREADS="1") == "1"


@several_cpus
def test_default_threads_follow_threadpoolctl():
    threadpoolctl = pytest.importorskip("threadpoolctl")
    with threadpoolctl.threadpool_limits(1, user_api="openmp"):
        assert attn_engine.get_num_threads() == planned_threads() == 1
        assert planned_threads(num_threads=2) == 2
    assert attn_engine.get_num_threads() > 1


@several_cpus
def test_b99_default_threads_follow_quota():
    _core.set_cpu_quota(1)
    assert attn_engine.get_num_threads() == planned_threads() == 1
    _core.set_cpu_quota(0)
    assert attn_engine.get_num_threads() > 1


gcc_openmp = pytest.mark.skipif(
    not (_core.build_info()["openmp"] and _core.build_info()["compiler"].startswith("GNU")),
    reason="GOMP_SPINCOUNT is read by GCC's OpenMP, and this build has none",
)


@gcc_openmp
@pytest.mark.parametrize(
    "variables, turns",
    [
        ({}, "1000"),
        ({"GOMP_SPINCOUNT": "77"}, "77"),
        ({"OMP_WAIT_POLICY": "passive"}, "0"),
        ({"GOMP_SPINCOUNT": "5000", "OMP_WAIT_POLICY": "passive"}, "5000"),
    ],
)
def test_threads_wait_awake_for_a_short_while_unless_told_otherwise(variables, turns):
    code = """if True:
        import os, subprocess, sys
        before = dict(os.environ)
        os.dup2(1, 2)  # where the runtime says what it has read
        import attn_engine
        assert os.environ == before
        child = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"
        subprocess.run([sys.executable, "-c", child], check=True)
    """
    *shown, inherited = run("-c", code, OMP_DISPLAY_ENV="verbose", **variables).splitlines()
    assert [line.split("=")[1].strip() for line in shown if "GOMP_SPINCOUNT" in line] == [
        f"'{turns}'"
    ]
    assert inherited == str(variables.get("GOMP_SPINCOUNT"))


def control_groups(root, lines, files):
    """A machine's /proc/self/cgroup and control group files."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text("".join(f"{line}\n" for line in lines))
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    return root


def v1(group, quota, period=100000):
    """The two files of a version 1 group."""
    return {f"{group}/cpu.cfs_quota_us": quota, f"{group}/cpu.cfs_period_us": period}


QUOTAS = {
    "v2": (["0::/a/b"], {"a/b/cpu.max": "250000 100000"}, 3),
    "v2 whole": (["0::/a"], {"a/cpu.max": "200000 100000"}, 2),
    "v2 below one": (["0::/a"], {"a/cpu.max": "10000 100000"}, 1),
    "v2 other period": (["0::/a"], {"a/cpu.max": "100000 50000"}, 2),
    "v2 unlimited": (["0::/a"], {"a/cpu.max": "max 100000"}, 0),
    "v2 limit of a parent": (
        ["0::/a/b/c"],
        {
            "a/cpu.max": "200000 100000",
            "a/b/cpu.max": "max 100000",
            "a/b/c/cpu.max": "900000 100000",
        },
        2,
    ),
    "v2 another group": (["0::/a"], {"b/cpu.max": "100000 100000"}, 0),
    "v2 container": (["0::/"], {"cpu.max": "100000 100000"}, 1),
    "v2 above the root": (["0::/../../a"], {"cpu.max": "400000 100000"}, 4),
    "v1": (["4:memory:/m", "2:cpu,cpuacct:/a"], v1("cpu,cpuacct/a", 150000), 2),
    "v1 cpu alone": (["3:cpu:/a"], v1("cpu/a", 300000), 3),
    "v1 behind a link": (["3:cpu,cpuacct:/a"], v1("cpu/a", 300000), 3),
    "v1 unlimited": (["3:cpu:/a"], v1("cpu/a", -1), 0),
    "v1 limit of a parent": (["3:cpu:/a/b"], v1("cpu", -1) | v1("cpu/a", 100000), 1),
    "v1 container, path of the host": (["3:cpu:/docker/1"], v1("cpu", 200000), 2),
    "v1 without cpu": (["3:cpuset:/a"], v1("cpu/a", 100000) | v1("cpuset/a", 100000), 0),
    "v1 and v2": (["0::/a", "3:cpu:/a"], {"a/cpu.max": "300000 100000"} | v1("cpu/a", 200000), 2),
    "path with a colon": (["0::/a:b"], {"a:b/cpu.max": "100000 100000"}, 1),
    "no period": (["3:cpu:/a"], {"cpu/a/cpu.cfs_quota_us": 100000}, 0),
    "zero period": (["3:cpu:/a"], v1("cpu/a", 100000, 0), 0),
    "nonsense": (["0::/a"], {"a/cpu.max": "many 100000"}, 0),
    "no groups": ([], {}, 0),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_b99_quota_of_control_groups(name, tmp_path):
    lines, files, cpus = QUOTAS[name]
    assert config.cpu_quota(control_groups(tmp_path, lines, files)) == cpus


def test_quota_without_proc(tmp_path):
    assert config.cpu_quota(tmp_path) == 0


@pytest.mark.parametrize("tier", TIERS)
def test_the_environment_chooses_the_tier(tier):
    code = """if True:
        import attn_engine, numpy as np
        x = np.ones((4, 4), np.float32)
        isa = attn_engine.show_config("dicts")["isa"]
        print(attn_engine.get_isa(), attn_engine.explain(x, x, x)["isa"], isa["reason"])
    """
    assert run("-c", code, ATTN_ENGINE_ISA=tier) == f"{tier} {tier} ATTN_ENGINE_ISA"


@pytest.mark.parametrize(
    "use",
    [
        "get_isa()",
        "get_num_threads()",
        "set_isa('sse8') if attn_engine.get_isa() else None",
        "softmax(x)",
        "scaled_dot_product_attention(x, x, x)",
        "explain(x, x, x)",
        "dot_attention(x, x, num_threads=1)",
        "project_keys(x, None)",
        "ProjectedKeys(x, x)",
    ],
)
def test_unknown_isa_in_environment_is_an_error_of_every_use(use):
    code = f"import attn_engine, numpy as np; x = np.ones((2, 2)); attn_engine.{use}"
    error = run("-c", code, expect_failure=True, ATTN_ENGINE_ISA="sse9")
    assert "ValueError: ATTN_ENGINE_ISA: 'sse9' is not in this build" in error
    assert ", ".join(TIERS) in error


@pytest.mark.parametrize("name", ["None", *map(repr, TIERS)])
def test_a_tier_that_is_chosen_overrules_an_unknown_one(name):
    code = f"""if True:
        import attn_engine, numpy as np
        assert attn_engine.show_config("dicts")["isa"]["reason"] == "see faults"
        try:
            attn_engine.set_isa("sse9")
        except ValueError as error:
            assert str(error).startswith("isa: 'sse9' is not in this build")
        try:
            attn_engine.get_isa()
        except ValueError as error:
            assert str(error).startswith("ATTN_ENGINE_ISA: 'sse9'")
        else:
            raise AssertionError("a tier that is refused overrules nothing")
        attn_engine.set_isa({name})
        attn_engine.softmax(np.ones(3))
        shown = attn_engine.show_config("dicts")
        assert shown["faults"] == [] and shown["isa"]["selected"] == attn_engine.get_isa()
        print(attn_engine.get_isa())
    """
    chosen = TIERS[-1] if name == "None" else name.strip("'")
    assert run("-c", code, ATTN_ENGINE_ISA="sse9") == chosen


def test_threads_that_are_chosen_overrule_bad_ones():
    code = """if True:
        import attn_engine
        assert attn_engine.show_config("dicts")["threads"]["reason"] == "see faults"
        try:
            attn_engine.set_num_threads(None)
        except ValueError as error:
            assert str(error).startswith("ATTN_ENGINE_NUM_THREADS: got 'two'")
        else:
            raise AssertionError("there is nothing to go back to")
        attn_engine.set_num_threads(2)
        print(attn_engine.get_num_threads(), attn_engine.show_config("dicts")["faults"])
    """
    assert run("-c", code, ATTN_ENGINE_NUM_THREADS="two") == "2 []"


def test_all_faults_of_the_environment_are_in_the_report():
    variables = {"ATTN_ENGINE_NUM_THREADS": "two", "ATTN_ENGINE_ISA": "sse9"}
    shown = json.loads(run("-m", "attn_engine", "info", "--json", **variables))
    assert [fault.partition(":")[0] for fault in shown["faults"]] == list(variables)
    text = run("-m", "attn_engine", "info", **variables)
    assert all(fault in text for fault in shown["faults"])
    assert "faults  " in run("-m", "attn_engine", "info")


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("write", [str.upper, str.title])
def test_a_tier_may_be_written_in_any_case(tier, write):
    code = "import attn_engine; print(attn_engine.get_isa())"
    assert run("-c", code, ATTN_ENGINE_ISA=write(tier)) == tier
    attn_engine.set_isa(write(tier))
    assert attn_engine.get_isa() == tier


@pytest.mark.parametrize("tier", TIERS)
def test_set_isa_chooses_the_tier(tier):
    attn_engine.set_isa(tier)
    assert attn_engine.get_isa() == tier
    assert attn_engine.explain(LARGE, LARGE, LARGE)["isa"] == tier
    assert attn_engine.show_config("dicts")["isa"]["reason"] == "set_isa"
    attn_engine.set_isa(None)
    assert attn_engine.get_isa() == TIERS[-1]
    assert attn_engine.show_config("dicts")["isa"]["reason"] == "best supported"


def test_setter_refuses_tiers_that_cannot_run(monkeypatch):
    attn_engine.set_isa("scalar")
    with pytest.raises(
        ValueError, match="^isa: 'sse9' is not in this build; this CPU can run scal"
    ):
        attn_engine.set_isa("sse9")
    with pytest.raises(TypeError, match="^isa: got 2, expected the name of a tier or None"):
        attn_engine.set_isa(2)
    monkeypatch.setattr(_core, "supported_isas", lambda: ("scalar",))
    for tier in _core.ISAS[1:]:
        with pytest.raises(ValueError, match=f"^isa: this CPU cannot run '{tier}'; it can run sca"):
            attn_engine.set_isa(tier)
    assert attn_engine.get_isa() == "scalar"


def test_show_config_says_what_is_there():
    shown = attn_engine.show_config(mode="dicts")
    assert shown["version"] == attn_engine.__version__
    assert shown["numpy"] == np.__version__
    assert shown["dtypes"] == [*("f32", "f64", "f16", "bf16"), *("f32_f16", "f32_bf16", "f32_i8")]
    assert shown["isa"]["compiled"] == list(_core.ISAS)
    assert shown["isa"]["supported"] == list(TIERS)
    assert shown["isa"]["selected"] == attn_engine.get_isa()
    assert shown["threads"]["number"] == attn_engine.get_num_threads()
    assert shown["threads"]["affinity"] == CPUS
    assert shown["threads"]["quota"] == config.cpu_quota()
    with pytest.raises(ValueError, match="^mode: got 'json', expected"):
        attn_engine.show_config("json")


def test_show_config_prints_the_same(capsys):
    attn_engine.set_isa(None)
    shown = attn_engine.show_config("dicts")
    assert attn_engine.show_config() is None
    printed = capsys.readouterr().out
    for value in (shown["version"], shown["compiler"], shown["isa"]["selected"], "best supported"):
        assert value in printed
    assert max(map(len, printed.splitlines())) <= 100


def test_command_line_prints_it_as_text_and_json():
    text = run("-m", "attn_engine")
    assert text.startswith("version")
    assert "selected" in text
    code = "import attn_engine, json; print(json.dumps(attn_engine.show_config('dicts')))"
    assert json.loads(run("-m", "attn_engine", "--json")) == json.loads(run("-c", code))
