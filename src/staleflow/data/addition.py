"""The demo's task and its tiny model: written addition of numbers with 1 to 8 digits.

    python -m staleflow.data.addition OUT_DIR [--seed N]

A prompt shows two right-aligned numbers of equal length, `     837+     592=`. The response works from the last digit
to the first, one column `a+b+carry=sum` each, then gives the result: `7+2+0=09,3+9+0=12,8+5+1=14:1429`. One-digit sums
are answered at once: `9`. Responses thus have 2 to 83 tokens, most of them short.

Only the result counts: whatever follows the last `:` must be the sum, character for character (`final_answer`).

The demonstrations for the warm start come from a *careless* teacher: each time a carry is due, it is forgotten with
probability 0.6, and the rest of the column is worked correctly with the wrong digit. A model that has learned from it
knows the procedure but, by majority, not the carry; sums without carries come out right. What reinforcement learning
is left to find, from right and wrong results alone, is to be careful. Problems for training, for watching the warm
start (`valid`) and for the test are disjoint.

Writes `model/` (a tiny Qwen2 with random weights and a character tokenizer), `demonstrations.jsonl` (prompt, response),
`train.jsonl`, `valid.jsonl`, `test.jsonl` (prompt, answer).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

MAX_DIGITS = 8
DIGIT_WEIGHTS = (15, 20, 18, 15, 12, 9, 6, 5)  # of 1, 2, … digits: most are short, a tail is long
MAX_PROMPT_TOKENS = 2 * MAX_DIGITS + 2
MAX_RESPONSE_TOKENS = 9 * MAX_DIGITS + (MAX_DIGITS + 1) + 1
FORGET_CARRY = 0.6
CHARACTERS = "0123456789+=,: "
EOS, PAD = "<eos>", "<pad>"

Problem = tuple[int, int]


def prompt(problem: Problem) -> str:
    """Two numbers, right-aligned as on paper."""
    a, b = problem
    return f"{a:>{MAX_DIGITS}}+{b:>{MAX_DIGITS}}="


def answer(problem: Problem) -> str:
    return str(sum(problem))


def final_answer(response: str) -> str:
    """What a response claims as its result."""
    return response.rsplit(":", 1)[-1]


def exact_match(response: str, answer: str) -> float:
    """The reward: 1.0 if the result is right, else 0.0."""
    return float(final_answer(response) == answer)


def demonstrate(problem: Problem, rng: random.Random, forget: float = FORGET_CARRY) -> str:
    """How the teacher works the problem, forgetting each carry with probability `forget`."""
    a, b = map(str, problem)
    if len(a) == 1:
        return answer(problem)
    columns, digits, carry = [], "", 0
    for x, y in zip(map(int, reversed(a)), map(int, reversed(b)), strict=True):
        total = x + y + carry
        columns.append(f"{x}+{y}+{carry}={total:02d}")
        digits = f"{total % 10}{digits}"
        carry = int(total >= 10 and rng.random() >= forget)
    leading = "1" if total >= 10 else ""  # the last column's sum stands there in full: nothing to forget
    return ",".join(columns) + ":" + leading + digits


def draw_problem(rng: random.Random) -> Problem:
    """Two numbers of equal length, lengths by DIGIT_WEIGHTS."""
    digits = rng.choices(range(1, MAX_DIGITS + 1), DIGIT_WEIGHTS)[0]
    low = 10 ** (digits - 1) if digits > 1 else 0
    return rng.randrange(low, 10**digits), rng.randrange(low, 10**digits)


def draw_distinct(rng: random.Random, count: int, taken: set[Problem]) -> list[Problem]:
    """`count` problems that are not in `taken`, which grows by them."""
    found: list[Problem] = []
    while len(found) < count:
        problem = draw_problem(rng)
        if problem not in taken:
            taken.add(problem)
            found.append(problem)
    return found


def draw_training(rng: random.Random, count: int, held_out: set[Problem]) -> Iterator[Problem]:
    """`count` problems outside `held_out`; short ones repeat, since there are few of them."""
    while count:
        problem = draw_problem(rng)
        if problem not in held_out:
            count -= 1
            yield problem


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_data(out: Path, seed: int, *, train: int = 8192, demonstrations: int = 32768, held_out: int = 256) -> None:
    """Write the four files; the same seed gives the same bytes."""
    rng, taken = random.Random(seed), set[Problem]()
    for name in ("test", "valid"):
        problems = draw_distinct(rng, held_out, taken)
        write_jsonl(out / f"{name}.jsonl", ({"prompt": prompt(p), "answer": answer(p)} for p in problems))
    training = draw_training(rng, train, taken)
    write_jsonl(out / "train.jsonl", ({"prompt": prompt(p), "answer": answer(p)} for p in training))
    shown = draw_training(rng, demonstrations, taken)
    write_jsonl(out / "demonstrations.jsonl", ({"prompt": prompt(p), "response": demonstrate(p, rng)} for p in shown))


def write_model(out: Path, seed: int) -> None:
    """A Qwen2 of 0.4 million random weights and its character tokenizer, in Hugging Face format."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    config = Qwen2Config(
        vocab_size=64,  # vLLM pads to a multiple of 64 anyway
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=vocabulary[EOS],
        pad_token_id=vocabulary[PAD],
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).save_pretrained(out)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS).save_pretrained(out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m staleflow.data.addition", description="The demo's task and model.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    write_data(options.out, options.seed)
    write_model(options.out / "model", options.seed)


if __name__ == "__main__":
    main()
