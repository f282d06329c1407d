"""Manifest, shards, pieces and the additive checksum: pure."""

from __future__ import annotations

import json
import struct
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staleflow.parameters.checksum import MASK, piece_sum, word_sum
from staleflow.parameters.layout import Rows, pieces_of, require_complete, schedule, shard_of
from staleflow.parameters.manifest import Manifest

shapes = st.lists(st.lists(st.integers(1, 12), max_size=3), min_size=1, max_size=8)
models = st.builds(
    lambda found, dtype: Manifest.from_shapes([(f"t{i}", shape) for i, shape in enumerate(found)], dtype),
    shapes, st.sampled_from(["bfloat16", "float32"]),
)  # fmt: skip


def cut(manifest: Manifest, trainers: int) -> list[list[Rows]]:
    """As FSDP2 shards: ceil(rows / trainers) rows each, the last ones fewer or none."""
    found: list[list[Rows]] = [[] for _ in range(trainers)]
    for index, entry in enumerate(manifest.entries):
        each = -(-entry.rows // trainers)
        for t in range(trainers):
            first = min(t * each, entry.rows)
            found[t].append(Rows(index, first, min(each, entry.rows - first)))
    return found


def test_entries_do_not_overlap_and_are_aligned() -> None:
    manifest = Manifest.from_shapes([("a", (3, 5)), ("b", ()), ("c", (7,))], "bfloat16")
    assert [(e.offset_bytes, e.nbytes) for e in manifest.entries] == [(0, 30), (64, 2), (128, 14)]
    assert manifest.nbytes == 192


def test_digest_is_of_names_shapes_and_dtype_and_survives_json() -> None:
    manifest = Manifest.from_shapes([("a", (3, 5))], "bfloat16")
    assert Manifest.from_json(manifest.to_json()).digest == manifest.digest
    assert Manifest.from_shapes([("b", (3, 5))], "bfloat16").digest != manifest.digest
    assert Manifest.from_shapes([("a", (5, 3))], "bfloat16").digest != manifest.digest
    assert Manifest.from_shapes([("a", (3, 5))], "float32").digest != manifest.digest


def test_a_repeated_name_and_a_dtype_that_is_not_carried_are_refused() -> None:
    with pytest.raises(ValueError, match="lm_head"):
        Manifest.from_shapes([("lm_head", (2,)), ("lm_head", (2,))], "bfloat16")
    with pytest.raises(ValueError, match="int8"):
        Manifest.from_shapes([("a", (2,))], "int8")


def test_a_model_folder_is_read_from_headers_in_the_order_of_the_data(tmp_path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "z": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(20))
    manifest = Manifest.from_model_dir(tmp_path, "bfloat16")
    assert [(e.name, e.shape, e.dtype) for e in manifest.entries] == [
        ("z", (2, 2), "bfloat16"),
        ("a", (1,), "bfloat16"),
    ]


def test_a_folder_without_weights_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        Manifest.from_model_dir(tmp_path, "bfloat16")


def test_experts_are_stacked_as_the_trainer_holds_them(tmp_path) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_experts=3, head_dim=8,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    manifest = Manifest.from_model_dir(tmp_path, "bfloat16")
    assert {e.name: e.shape for e in manifest.entries} == {n: tuple(p.shape) for n, p in model.named_parameters()}


def test_one_trainer_sends_the_whole_image_as_one_range() -> None:
    manifest = Manifest.from_shapes([("a", (3, 5)), ("b", ()), ("c", (700, 1000))], "bfloat16")
    shard = shard_of(manifest, cut(manifest, 1)[0])
    assert len(shard.ranges) == 1
    assert all(piece.direct for piece in pieces_of(shard, 1 << 20))


@settings(deadline=None)
@given(models, st.integers(1, 5), st.integers(1, 64).map(lambda n: 64 * n))
def test_pieces_carry_every_row_exactly_once_to_its_place(manifest: Manifest, trainers: int, bucket_bytes: int) -> None:
    image = np.random.default_rng(0).integers(0, 256, manifest.nbytes, dtype=np.uint8)
    used = np.zeros(manifest.nbytes, bool)
    for entry in manifest.entries:
        used[entry.offset_bytes : entry.offset_bytes + entry.nbytes] = True
    image[~used] = 0
    shards = [shard_of(manifest, rows) for rows in cut(manifest, trainers)]
    require_complete(manifest, shards)
    staging = [staged(manifest, shard, image) for shard in shards]
    landed, written = np.zeros_like(image), np.zeros(manifest.nbytes, int)
    checksum = 0
    for trainer, piece in schedule([pieces_of(shard, bucket_bytes) for shard in shards]):
        data = staging[trainer][piece.staging_bytes : piece.staging_bytes + piece.nbytes]
        assert piece.nbytes <= bucket_bytes
        checksum += piece_sum(data, piece)
        at = 0
        for part in piece.ranges:
            landed[part.image_bytes : part.image_bytes + part.nbytes] = data[at : at + part.nbytes]
            written[part.image_bytes : part.image_bytes + part.nbytes] += 1
            at += part.nbytes
    assert np.array_equal(landed, image)
    assert (written[used] == 1).all() and (written <= 1).all()
    assert checksum & MASK == word_sum(image)


def staged(manifest: Manifest, shard, image: np.ndarray) -> np.ndarray:
    """What a trainer rank's staging buffer holds."""
    staging = np.zeros(shard.nbytes, np.uint8)
    for part, offset in zip(shard.rows, shard.staging_offsets, strict=True):
        entry = manifest.entries[part.entry]
        begin = entry.offset_bytes + part.first * entry.row_bytes
        nbytes = part.count * entry.row_bytes
        staging[offset : offset + nbytes] = image[begin : begin + nbytes]
    return staging


def test_missing_and_doubled_rows_are_named() -> None:
    manifest = Manifest.from_shapes([("w", (10, 4))], "bfloat16")
    with pytest.raises(ValueError, match=r"w: rows 4\.\.9 are published by no"):
        require_complete(manifest, [shard_of(manifest, [Rows(0, 0, 4)])])
    with pytest.raises(ValueError, match="w: row 3 is published by two"):
        require_complete(manifest, [shard_of(manifest, [Rows(0, 0, 4)]), shard_of(manifest, [Rows(0, 3, 7)])])


@settings(deadline=None)
@given(st.binary(max_size=100), st.lists(st.integers(0, 100), max_size=4), st.integers(0, 20))
def test_checksums_of_parts_add_up(data: bytes, cuts: list[int], offset: int) -> None:
    array = np.frombuffer(data, np.uint8)
    whole = word_sum(np.concatenate([np.zeros(offset, np.uint8), array]))
    bounds = [0, *sorted(min(c, len(array)) for c in cuts), len(array)]
    parts = sum(word_sum(array[a:b], offset + a) for a, b in pairwise(bounds))
    assert parts & MASK == whole


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=64), st.data())
def test_a_changed_byte_changes_the_checksum(data: bytes, draw: st.DataObject) -> None:
    place = draw.draw(st.integers(0, len(data) - 1))
    changed = bytearray(data)
    changed[place] ^= draw.draw(st.integers(1, 255))
    assert word_sum(np.frombuffer(data, np.uint8)) != word_sum(np.frombuffer(bytes(changed), np.uint8))
