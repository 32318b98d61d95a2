"""The list of attention's options agrees with every signature, and the binding with its stub."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import attn_engine
from attn_engine import KVCache, _core
from attn_engine.inputs.attention_options import AttentionOptions
from attn_engine.inputs.keywords import AttentionKeywords, CacheKeywords, PackedKeywords

ROOT = Path(__file__).parents[2]
STUB = ROOT / "src" / "attn_engine" / "_core.pyi"
DEFAULTS = AttentionOptions._field_defaults
RETURNS = {"return_weights", "return_lse"}
# Functions that take some of the options, and those whose default is another there.
FUNCTIONS = {
    attn_engine.scaled_dot_product_attention: {},
    attn_engine.scaled_dot_product_attention_varlen: {},
    attn_engine.scaled_dot_product_attention_backward: {},
    attn_engine.scaled_dot_product_attention_varlen_backward: {},
    attn_engine.self_attention: {},
    KVCache.attend: {"is_causal": True},
    attn_engine.MultiheadAttention.forward: {},
}


def options_of(function):
    """Names and defaults of a function's options."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def test_the_list_is_what_attention_takes():
    own = options_of(attn_engine.scaled_dot_product_attention)
    assert own.pop("num_threads") is None
    assert own == DEFAULTS


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__qualname__)
def test_options_have_the_same_defaults_everywhere(function):
    taken = {name: x for name, x in options_of(function).items() if name in DEFAULTS}
    assert taken and taken == {name: DEFAULTS[name] for name in taken} | FUNCTIONS[function]


def test_every_public_function_with_these_options_is_compared():
    public = [getattr(attn_engine, name) for name in attn_engine.__all__]
    public += [KVCache.attend, attn_engine.MultiheadAttention.forward]
    taking = {
        f for f in public if inspect.isroutine(f) and {"is_causal", "scale"} & {*options_of(f)}
    }
    assert taking == {*FUNCTIONS}


@pytest.mark.parametrize(
    ("keywords", "function"),
    [
        (AttentionKeywords, attn_engine.scaled_dot_product_attention),
        (PackedKeywords, attn_engine.scaled_dot_product_attention_varlen),
        (CacheKeywords, KVCache.attend),
    ],
)
def test_typed_keywords_are_options(keywords, function):
    names = {*keywords.__annotations__}
    assert names <= {*options_of(function)}
    positional = {"attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"}
    assert {*options_of(function)} - names <= positional | RETURNS


@pytest.mark.parametrize("name", ["Limits", "Extras", "AttentionCall", "AdditiveCall"])
def test_the_stub_has_the_fields_of_the_binding(name):
    tree = next(
        node
        for node in ast.parse(STUB.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    )
    fields = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    (init,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    arguments = {a.arg for a in (*init.args.args, *init.args.kwonlyargs)} - {"self"}
    made = {n for n in dir(getattr(_core, name)) if not n.startswith("_")}
    assert fields == arguments == made


def test_the_fields_of_the_binding_are_those_of_the_c_struct():
    names = {n for c in (_core.Limits, _core.Extras) for n in dir(c) if not n.startswith("_")}
    text = next((ROOT / "csrc").rglob("attn_engine.h")).read_text()
    body = text[text.index("typedef struct attn_problem") : text.index("} attn_problem;")]
    assert names <= set(re.findall(r"\w+", body))
