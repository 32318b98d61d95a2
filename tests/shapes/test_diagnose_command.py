"""``attn-engine diagnose``: pasted shapes, errors of one line, exit codes."""

import pytest
from support.broken_shapes import RIGHT

from attn_engine import cli, diagnose


def test_the_command_says_the_same(capsys):
    words = ["query=2,3,5", "keys=(2, 7, 6)", "W_a=5,8", "U_a=8,6", "v_a=8", "num_heads=2"]
    assert cli.main(["diagnose", "--op", "additive", *words]) == 1
    broken = RIGHT["additive"] | {"W_a": (5, 8), "num_heads": 2}
    assert capsys.readouterr().out == f"{diagnose('additive', **broken)}\n"
    words = ["query=10,8,16", "key=12,8,16", "value=12,8,6", "layout=bshd", "is_causal=True"]
    assert cli.main(["diagnose", "--op", "sdpa", *words]) == 0
    assert "the shapes fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    "shape",
    ["2,8,10,64", "(2, 8, 10, 64)", "[2, 8, 10, 64]", "2x8x10x64", "torch.Size([2, 8, 10, 64])"],
)
def test_a_shape_may_be_written_as_it_is_printed(shape, capsys):
    words = [f"{name}={shape}" for name in ("query", "key", "value")]
    assert cli.main(["diagnose", "--op", "sdpa", *words, "key_lengths=2", "sinks=8"]) == 0
    shapes = dict.fromkeys(("query", "key", "value"), (2, 8, 10, 64))
    expected = diagnose("sdpa", **shapes, key_lengths=(2,), sinks=(8,))
    assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("varlen", "query=9,8,4 key=9,8,4 value=9,8,4 cu_seqlens_q=3 cu_seqlens_k=3"),
        ("reorder", "batch=2 n_kv_heads=2 d_qk=8 capacity=10 batch_index=2"),
        ("truncate", "batch=2 n_kv_heads=2 d_qk=8 capacity=10 lengths=2"),
        ("merge", "outputs=[2,3,4],[2,3,4] lses=2x3,2x3"),
        ("merge", "outputs=2,3,4 lses=[(2,3)]"),
        ("sdpa", "query=2,8,5,4 key=2,8,7,4 value=2,8,7,4 segment_ids=(2,5),(2,7) sinks=None"),
        ("multihead", "embed_dim=8 num_heads=2 bias=False query=3,8 key=3,8 value=3,8"),
    ],
)
def test_sizes_of_a_tensor_are_always_its_shape(operation, words, capsys):
    assert cli.main(["diagnose", "--op", operation, *words.split()]) == 0
    assert "the shapes fit" in capsys.readouterr().out


def test_help_says_how_to_give_shapes_and_options_and_what_exit_codes_mean(capsys):
    with pytest.raises(SystemExit):
        cli.main(["diagnose", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "v_a=32 and key_lengths=32 are (32,)" in text and "num_heads=8" in text
    assert "Exit code 0 if all shapes fit, 1 if not, 2 if" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--op", "sdpa", "q=2,5", "k=2,5", "v=2,5"],
            "unexpected argument 'q', expected some of query"),
        (["--op", "dot", "query=a", "keys=2,5"], "'query=a' is not NAME=VALUE"),
        (["--op", "dot", "query=2.5", "keys=2,5"], "'query=2.5' is not NAME=VALUE"),
        (["--op", "attention", "query=1,2"], "'attention'"),
        (["query=1,2"], "--op"),
        (["--op", "dot"], "NAME=VALUE"),
        (["--op", "dot", "query"], "'query' is not NAME=VALUE"),
        (["--op", "dot", "query=(2,"], "'query=(2,' is not NAME=VALUE"),
        (["--op", "dot", "query=2,5"], "'keys'"),
        (["--op", "dot", "query=2,5", "keys=3,5", "query=2,5"], "query is given twice"),
        (["--op", "dot", "query=2,5", "keys=3,5", "W=5,5"], "'W'"),
        (["--op", "dot", "query=-2,5", "keys=3,5"], "query: (-2, 5) is not"),
        (["--op", "self", "x=9,4", "W_q=4,6", "W_k=4,6", "W_v=4,6", "num_heads=0"], "num_heads"),
        (["--op", "multihead", "embed_dim=9", "num_heads=2", "query=3,9", "key=3,9", "value=3,9"],
            "embed_dim: 9 is not a multiple of num_heads"),
    ],
)  # fmt: skip
def test_a_bad_command_line_is_one_line_and_exit_code_2(arguments, named, capsys):
    try:
        code = cli.main(["diagnose", *arguments])
    except SystemExit as stop:
        code = stop.code
    output = capsys.readouterr()
    assert code == 2 and output.out == ""
    assert output.err.count("\n") == 1 and named in output.err
