"""The prompt stream: what it holds, in which order, and that a resume sees the same."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.data.order import Order
from staleflow.data.prompts import Dataset, DataSettings, PromptSource


class Characters:
    """A tokenizer of one token per character, with a beginning-of-text token 0."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> Any:
        head = [0] if add_special_tokens else []
        return {"input_ids": [head + [ord(c) for c in one] for one in text]}

    def apply_chat_template(self, messages: list[dict], *, tokenize: bool, add_generation_prompt: bool) -> str:
        if not isinstance(messages[0], dict):
            raise TypeError("bad message")
        return "".join(f"[{m['role']}]{m['content']}" for m in messages) + "[assistant]"


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(path: Path, count: int = 10, start: int = 0) -> Path:
    return write(path, [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(start, start + count)])


@pytest.fixture(scope="module")
def path_of_sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sums(tmp_path_factory.mktemp("data") / "a.jsonl", 20)


def source(*paths: Path, weights: tuple[float, ...] = (), settle_on_issue: bool = False, **more: Any) -> PromptSource:
    datasets = tuple(Dataset(path, weight) for path, weight in zip(paths, weights or [1.0] * len(paths), strict=True))
    return PromptSource(DataSettings(datasets, **more), Characters(), settle_on_issue=settle_on_issue)


def test_a_prompt_carries_its_tokens_and_reference(tmp_path: Path) -> None:
    prompt = next(source(sums(tmp_path / "a.jsonl"), shuffle=False))
    assert (prompt.index, prompt.epoch, prompt.text, prompt.reference) == (0, 0, "0+1=", {"answer": "1"})
    assert prompt.token_ids.dtype == np.int32
    assert prompt.token_ids.tolist() == [0, *map(ord, "0+1=")]


def test_each_epoch_holds_every_row_once_in_another_order_and_then_it_ends(tmp_path: Path) -> None:
    prompts = list(source(sums(tmp_path / "a.jsonl", 50), epochs=2))
    first, second = prompts[:50], prompts[50:]
    assert {p.text for p in first} == {p.text for p in second}
    assert [p.text for p in first] != [p.text for p in second]
    assert [p.index for p in prompts] == list(range(100))
    assert {p.epoch for p in second} == {1}


def test_without_a_number_of_epochs_it_goes_on(tmp_path: Path) -> None:
    assert [p.epoch for p in islice(source(sums(tmp_path / "a.jsonl", 3)), 8)] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    path = sums(tmp_path / "a.jsonl", 30)
    orders = [[p.text for p in source(path, epochs=1, seed=seed)] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_weights_set_how_often_a_row_comes_in_an_epoch(tmp_path: Path) -> None:
    a, b, c = sums(tmp_path / "a.jsonl", 10), sums(tmp_path / "b.jsonl", 10, 100), sums(tmp_path / "c.jsonl", 10, 200)
    stream = source(a, b, c, weights=(1.0, 2.0, 0.5), epochs=2)
    count = Counter(p.text for p in stream)
    assert stream.prompts_per_epoch == 35
    assert [count[f"{i}+1="] for i in range(10)] == [2] * 10
    assert [count[f"{i}+1="] for i in range(100, 110)] == [4] * 10
    assert [count[f"{i}+1="] for i in range(200, 210)] == [1] * 10


def test_unshuffled_data_sets_are_interleaved_evenly(tmp_path: Path) -> None:
    a, b = sums(tmp_path / "a.jsonl", 8), sums(tmp_path / "b.jsonl", 4, 100)
    texts = [p.text for p in source(a, b, shuffle=False, epochs=1)]
    assert [text for text in texts if len(text) == 4] == [f"{i}+1=" for i in range(8)]
    assert all(sum(len(text) > 4 for text in texts[i : i + 3]) == 1 for i in range(0, 12, 3))


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": 1} for text in ("ok", " ", "much too long", "ok", "")]
    stream = source(write(tmp_path / "a.jsonl", rows), max_prompt_tokens=5, epochs=1, deduplicate=True)
    assert [p.text for p in stream] == ["ok"]
    assert stream.left_out == {"too_long": 1, "empty": 2, "duplicate": 1}
    assert stream.left_out_in_words() == "4 rows left out: 1 too long, 2 empty, 1 duplicate"
    with pytest.raises(ValueError, match=r"no prompt is left.*max_prompt_tokens"):
        source(write(tmp_path / "b.jsonl", rows), max_prompt_tokens=1)


def test_chat_templates_and_nested_fields(tmp_path: Path) -> None:
    rows = [{"chat": [{"role": "user", "content": "hi"}], "reward_model": {"truth": 3}, "style": "x"}, {"chat": "yo"}]
    rows[1] |= {"reward_model": {"truth": 4}, "style": "y"}
    fields = {"prompt_field": "chat", "answer_field": "reward_model.truth", "reference_fields": ("style",)}
    path = write(tmp_path / "a.jsonl", rows)
    first, second = source(path, chat_template=True, system_prompt="S", shuffle=False, epochs=1, **fields)
    assert (first.text, second.text) == ("[system]S[user]hi[assistant]", "[system]S[user]yo[assistant]")
    assert first.token_ids[0] == ord("["), "a template brings its own special tokens"
    assert second.reference == {"answer": 4, "style": "y"}
    with pytest.raises(ValueError, match="chat_template"):
        source(path, **fields)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "x"}', r"a.jsonl:2: no field 'answer' \(there: prompt\)"),
        ('{"prompt": "x", "answer"', r"a.jsonl:2: not a JSON object"),
        ("[1]", r"a.jsonl:2: a list"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "answer": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=said):
        source(path)


def test_missing_and_unknown_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.jsonl: no such file"):
        source(tmp_path / "nowhere.jsonl")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"a.txt: not a .jsonl or .parquet"):
        source(tmp_path / "a.txt")


def test_a_resume_sees_the_rest_and_reissues_what_was_lost(tmp_path: Path) -> None:
    path = sums(tmp_path / "a.jsonl", 20)
    whole = [p.text for p in source(path, epochs=2)]
    first = source(path, epochs=2)
    for prompt in islice(first, 13):
        if prompt.index not in (4, 7, 9):
            first.settle(prompt.index)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = source(path, epochs=2)
    resumed.load_state_dict(state, held={7})
    rest = list(resumed)
    assert [p.index for p in rest] == [4, 9, *range(13, 40)]
    assert [p.text for p in rest] == [whole[p.index] for p in rest]


def test_a_prompt_given_back_comes_before_new_ones_and_settled_ones_never(tmp_path: Path) -> None:
    stream = source(sums(tmp_path / "a.jsonl"))
    list(islice(stream, 4))
    stream.give_back(1)
    assert [next(stream).index for _ in range(2)] == [1, 4]
    stream.settle(1)
    with pytest.raises(ValueError, match="prompt 1 is not out"):
        stream.give_back(1)
    with pytest.raises(ValueError, match="never issued"):
        stream.settle(99)


def test_other_data_or_another_order_is_refused_at_resume(tmp_path: Path) -> None:
    path = sums(tmp_path / "a.jsonl")
    state = source(path).state_dict()
    for other in (source(path, seed=1), source(path, shuffle=False), source(sums(tmp_path / "b.jsonl", 9))):
        with pytest.raises(ValueError, match="checkpoint"):
            other.load_state_dict(state)


@given(st.lists(st.sampled_from(["issue", "settle", "crash"]), max_size=80), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_whatever_happens_no_prompt_is_lost_or_used_twice(path_of_sums: Path, events: list[str], random: Any) -> None:
    """Issued prompts are settled at random, the job crashes at random: each is settled exactly once in the end."""
    stream, out, settled = source(path_of_sums, epochs=2), set(), []
    for event in [*events, "crash"]:
        if event == "issue":
            out |= {prompt.index for prompt in islice(stream, 3)}
        elif event == "settle" and out:
            index = random.choice(sorted(out))
            out.remove(index)
            settled.append(index)
            stream.settle(index)
        elif event == "crash":
            held = {index for index in out if random.random() < 0.5}
            state = json.loads(json.dumps(stream.state_dict()))
            stream = source(path_of_sums, epochs=2)
            stream.load_state_dict(state, held)
            out = held
    rest = [prompt.index for prompt in stream]
    assert sorted([*settled, *out, *rest]) == list(range(40))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 2**64 - 1), st.booleans())
@settings(max_examples=60, deadline=None)
def test_two_half_epochs_make_a_whole_pass(sizes: list[int], seed: int, shuffle: bool) -> None:
    sizes = [2 * size + 2 for size in sizes]
    order = Order(sizes, [0.5] * len(sizes), seed, shuffle)
    assert sorted(order.row(i) for i in range(2 * order.per_epoch)) == list(range(sum(sizes)))


def test_the_order_is_frozen() -> None:
    """A changed order would change the data of every run that is resumed: these numbers are a promise."""
    order = Order([7, 3], [1.0, 1.0], seed=3, shuffle=True)
    assert [order.row(i) for i in range(20)] == [3, 9, 4, 1, 8, 6, 2, 5, 7, 0, 7, 1, 4, 0, 9, 5, 8, 3, 6, 2]


def test_reading_jsonl_needs_neither_datasets_nor_torch(tmp_path: Path) -> None:
    path = sums(tmp_path / "a.jsonl")
    program = f"""
import sys
from tests.unit.test_data_prompts import source
from pathlib import Path
assert next(source(Path({str(path)!r}))).index == 0
assert not {{"torch", "datasets", "transformers", "pandas"}} & set(sys.modules)
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program], check=True, cwd=root, env=_environment(root))


def _environment(root: Path) -> dict[str, str]:
    return {"PYTHONPATH": f"{root / 'src'}:{root}", "PATH": "/usr/bin:/bin"}


def test_parquet_and_saved_data_sets_read_like_jsonl(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(10)]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(str(tmp_path / "p.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    wanted = [(p.text, p.reference) for p in source(sums(tmp_path / "a.jsonl"), epochs=1)]
    for path in (tmp_path / "p.parquet", tmp_path / "saved"):
        assert [(p.text, p.reference) for p in source(path, epochs=1)] == wanted


def test_a_folder_without_data_and_one_of_splits_are_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither Parquet"):
        source(tmp_path / "empty")
    split = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "x", "answer": 1}])})
    split.save_to_disk(str(tmp_path / "splits"))
    with pytest.raises(ValueError, match="splits train"):
        source(tmp_path / "splits")


def test_it_works_under_a_stateful_data_loader(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    loaders = importlib.import_module("staleflow.data.loader")
    path = sums(tmp_path / "a.jsonl", 12)

    def loader() -> Any:
        stream = source(path, epochs=2, settle_on_issue=True)
        return loaders.stateful_loader(stream, 4, lambda prompts: [p.text for p in prompts])

    whole = list(loader())
    first = loader()
    batches = iter(first)
    assert [next(batches), next(batches)] == whole[:2]
    second = loader()
    second.load_state_dict(first.state_dict())
    assert list(second) == whole[2:]
    with pytest.raises(ValueError, match="settle_on_issue"):
        loaders.stateful_loader(source(path), 4)
