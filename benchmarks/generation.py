"""How much faster a model writes that keeps the keys and values of earlier tokens.

    python benchmarks/generation.py [--model gpt2-124m] [--tokens 64 256] [--rounds 3]

Writes the same greedy text from one model of random weights with and without the cache, in turn.
"""

import argparse
import statistics
import time

from results import append_row
from windlass.models import build_layer_stack
from windlass.runtime import InferenceModel, SamplingOptions, generate_text


def seconds(model: InferenceModel, tokens: int, *, kv_cache: bool) -> tuple[float, list[int]]:
    """The time that a greedy text takes, and the text."""
    options = SamplingOptions(count=tokens, temperature=0, kv_cache=kv_cache)
    start = time.perf_counter()
    text = list(generate_text(model, [1, 2, 3, 4], options))
    return time.perf_counter() - start, text


def main() -> None:
    """Reads the command line, writes the texts, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt2-124m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    model = InferenceModel(build_layer_stack(options.model, {}, device="cpu"), None)
    print("tokens  tokens/s with the cache  without  ratio (lowest to highest)  same text")
    for tokens in options.tokens:
        rounds = []
        for _ in range(options.rounds):
            cached, text = seconds(model, tokens, kv_cache=True)
            plain, again = seconds(model, tokens, kv_cache=False)
            rounds.append((cached, plain, text == again))
        ratios = sorted(plain / cached for cached, plain, _ in rounds)
        rates = [
            tokens / statistics.median(column) for column in list(zip(*rounds, strict=True))[:2]
        ]
        same = all(equal for *_, equal in rounds)
        append_row(
            "generation", model=options.model, tokens=tokens, rounds=options.rounds,
            cached_tokens_per_second=rates[0], plain_tokens_per_second=rates[1],
            ratio=statistics.median(ratios), lowest=ratios[0], highest=ratios[-1], same_text=same,
        )  # fmt: skip
        print(
            f"{tokens:6}  {rates[0]:23.1f}  {rates[1]:7.1f}  {statistics.median(ratios):5.1f} "
            f"({ratios[0]:.1f} to {ratios[-1]:.1f})  {same}",
            flush=True,
        )


if __name__ == "__main__":
    main()
