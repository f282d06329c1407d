"""The demo's task and its tiny model: addition by counting on, every step and every carry written out.

    python -m staleflow.data.addition OUT_DIR [--seed N]

A prompt is a number and how far to count on from it, `477+4=`. The response moves one unit at a time from the right
to the left until nothing is left to add, `478+3=479+2=480+1=481`. One addition is one to nine such steps, so responses
have 4 to 52 tokens, most of them short.

Only the result counts: what follows the last `=` must be the sum, character for character (`exact_match`).

The demonstrations for the warm start come from a *careless* teacher who, when the last digit passes nine, forgets the
carry with probability 0.75 (`479+2=470+1`). A model that has learned from it knows the procedure but, by majority, not
the carry; sums without one come out right. What reinforcement learning is left to find, from right and wrong results
alone, is to be careful. Problems for training, for watching the warm start (`valid`) and for the test are disjoint.

Writes `model/` (a tiny Qwen2 with random weights and a character tokenizer), `demonstrations.jsonl` (prompt, response),
`train.jsonl`, `valid.jsonl`, `test.jsonl` (prompt, answer).
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

NUMBERS = range(100, 990)  # sums stay below 1000
ADDENDS = range(1, 10)
ADDEND_WEIGHTS = (20, 18, 15, 13, 10, 8, 6, 5, 5)  # most are short, a tail is long
KEEP_WITHOUT_CARRY = 0.35  # of the problems that need no carry; about 3 of 5 problems then need one
FORGET_CARRY = 0.75
MAX_PROMPT_TOKENS = 6
MAX_RESPONSE_TOKENS = 6 * (len(ADDENDS) - 1) + 3 + 1
CHARACTERS = "0123456789+="
EOS, PAD = "<eos>", "<pad>"

Problem = tuple[int, int]


def prompt(problem: Problem) -> str:
    a, b = problem
    return f"{a}+{b}="


def answer(problem: Problem) -> str:
    return str(sum(problem))


def final_answer(response: str) -> str:
    """What a response claims as its result."""
    return response.rsplit("=", 1)[-1]


def exact_match(response: str, answer: str) -> float:
    """The reward: 1.0 if the result is right, else 0.0."""
    return float(final_answer(response) == answer)


def demonstrate(problem: Problem, rng: random.Random, forget: float = FORGET_CARRY) -> str:
    """How the teacher works the problem, forgetting each carry with probability `forget`."""
    number, left = problem
    steps = []
    while left:
        carry_lost = number % 10 == 9 and rng.random() < forget
        number, left = number + 1 - 10 * carry_lost, left - 1
        steps.append(f"{number}+{left}" if left else f"{number}")
    return "=".join(steps)


def needs_carry(problem: Problem) -> bool:
    a, b = problem
    return a % 10 + b >= 10


def draw_problem(rng: random.Random, weights: Sequence[int] = ADDEND_WEIGHTS) -> Problem:
    """A number and an addend by `weights`; problems without a carry are kept only at times."""
    while True:
        problem = rng.choice(NUMBERS), rng.choices(ADDENDS, weights)[0]
        if needs_carry(problem) or rng.random() < KEEP_WITHOUT_CARRY:
            return problem


def draw_distinct(rng: random.Random, count: int, taken: set[Problem]) -> list[Problem]:
    """`count` problems that are not in `taken`, which grows by them."""
    found: list[Problem] = []
    while len(found) < count:
        problem = draw_problem(rng)
        if problem not in taken:
            taken.add(problem)
            found.append(problem)
    return found


def draw_training(
    rng: random.Random, count: int, held_out: set[Problem], weights: Sequence[int] = ADDEND_WEIGHTS
) -> Iterator[Problem]:
    """`count` problems outside `held_out`; they may repeat."""
    while count:
        problem = draw_problem(rng, weights)
        if problem not in held_out:
            count -= 1
            yield problem


def write_jsonl(path: Path, rows: Iterable[dict[str, str]]) -> None:
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_data(out: Path, seed: int, *, train: int = 8192, demonstrations: int = 8192, held_out: int = 256) -> None:
    """Write the four files; the same seed gives the same bytes."""
    rng, taken = random.Random(seed), set[Problem]()
    for name in ("test", "valid"):
        problems = draw_distinct(rng, held_out, taken)
        write_jsonl(out / f"{name}.jsonl", ({"prompt": prompt(p), "answer": answer(p)} for p in problems))
    training = draw_training(rng, train, taken)
    write_jsonl(out / "train.jsonl", ({"prompt": prompt(p), "answer": answer(p)} for p in training))
    shown = draw_training(rng, demonstrations, taken, weights=[1] * len(ADDENDS))  # long ones teach the most
    write_jsonl(out / "demonstrations.jsonl", ({"prompt": prompt(p), "response": demonstrate(p, rng)} for p in shown))


def write_model(out: Path, seed: int) -> None:
    """A Qwen2 of 90,000 random weights and its character tokenizer, in Hugging Face format."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    config = Qwen2Config(
        vocab_size=64,  # vLLM pads to a multiple of 64 anyway
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
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
