"""Captured states on disk: they come back with few reads, and damaged files are noticed."""

import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.models.files import state_store
from slipstream.models.files.state_store import (
    DTYPES,
    ShardRange,
    ShardTensors,
    StateFormat,
    StateIndex,
    StateStore,
    decode,
    encode,
    needed_tokens,
    new_shard,
    open_shard,
    shard_path,
    write_shard,
)
from slipstream.tests.user_errors import user_error

SHARDS = (ShardRange("train", 0, 3, 9, 3), ShardRange("train", 3, 2, 4, 2), ShardRange("heldout", 0, 2, 5, 1))
LENGTHS = ((4, 0, 5), (3, 1), (0, 5))
SUPERVISED = ((1, 3, 7), (0, 2), (4,))  # rows of each shard
IDENTITY = {"target_fingerprint": "a" * 64, "tokenizer_hash": "b" * 64, "data_hash": "c" * 64}


def make_form(**changes: Any) -> StateFormat:
    values = {"layers": (1, 3), "num_layers": 6, "hidden_size": 8, "dtype": "bf16", "last_hidden": True}
    return StateFormat(**(values | changes))


def make_index(form: StateFormat, **changes: Any) -> StateIndex:
    index = StateIndex(**IDENTITY, max_length=64, form=form, shards=SHARDS, command="slipstream capture-states")
    return replace(index, **changes)


def fill(number: int, form: StateFormat) -> ShardTensors:
    """Shard `number` with random bytes in every tensor that holds states or tokens."""
    generator = torch.Generator().manual_seed(number)
    supervised = torch.zeros(SHARDS[number].num_tokens, dtype=torch.bool)
    supervised[list(SUPERVISED[number])] = True
    shard = new_shard(SHARDS[number], torch.tensor(LENGTHS[number]), supervised, form, pinned=False)
    for name, tensor in shard.tensors.items():
        if name not in ("documents", "lengths", "checksums", "supervised"):
            tensor.view(torch.uint8).copy_(torch.randint(0, 100, tensor.view(torch.uint8).shape, generator=generator))
    return shard


@pytest.fixture(params=["bf16", "fp8", "fp32"])
def form(request) -> StateFormat:
    return make_form(dtype=request.param)


def write_store(folder: Path, form: StateFormat) -> StateIndex:
    index = make_index(form)
    index.write(folder)
    for number in range(len(SHARDS)):
        write_shard(folder, number, fill(number, form), index.digest)
    return index


def raw(tensor: Tensor) -> list[int]:
    return tensor.flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bf16_and_fp32_are_kept_as_they_are(dtype):
    states = torch.randn(5, 3, 8).to(DTYPES[dtype])
    values, scales = encode(states, dtype)
    assert scales is None
    assert torch.equal(decode(values, scales, states.dtype), states)


def test_fp8_is_off_by_its_half_step_in_the_scale_of_each_token_and_layer():
    states = torch.randn(50, 3, 64) * 10 ** torch.linspace(-6, 5, 150).view(50, 3, 1)
    states[7, 1, 3] = 3e7  # an outlier harms its own token and layer only
    states[9] = 0
    values, scales = encode(states, "fp8")
    assert scales is not None
    assert values.dtype == torch.float8_e4m3fn
    decoded = decode(values, scales, torch.float32)
    largest = states.abs().amax(dim=-1, keepdim=True)
    # 3 bits after the leading one: half a step is 2^-4 of a number; below 2^-6 of fp8's range steps are 2^-9
    allowed = torch.maximum(states.abs() * 2**-4, largest / 448 * 2**-10) * (1 + 1e-5)
    assert ((decoded - states).abs() <= allowed).all()
    assert torch.equal(decoded[9], states[9])
    torch.testing.assert_close(decoded.abs().amax(dim=-1, keepdim=True), largest)
    assert torch.isfinite(decode(*encode(states.bfloat16(), "fp8"), torch.bfloat16)).all()


@pytest.mark.parametrize(("mask", "count"), [("", 0), ("0000", 0), ("0110", 2), ("0101", 3), ("0001", 3)])
def test_rows_from_the_last_supervised_token_on_are_not_needed(mask, count):
    assert needed_tokens(torch.tensor([letter == "1" for letter in mask], dtype=torch.bool)) == count


def test_every_document_comes_back(tmp_path, form):
    write_store(tmp_path, form)
    store = StateStore(tmp_path)
    for number, span in enumerate(SHARDS):
        stored = fill(number, form).tensors
        start = 0
        supervised = 0
        for slot, length in enumerate(LENGTHS[number]):
            assert store.find(span.split, span.first + slot) == (number, slot)
            assert store.length(number, slot) == length
            states = store.read(number, slot)
            count = sum(start <= row < start + length for row in SUPERVISED[number])
            for name, tensor in states.items():
                part = (supervised, count) if name.startswith("last_hidden") else (start, length)
                assert raw(tensor) == raw(stored[name].narrow(0, *part)), name
            start = start + length
            supervised = supervised + count
    assert store.find("train", 5) is None
    assert store.find("test", 0) is None


def test_sizes_are_those_of_the_tensors(tmp_path, form):
    index = write_store(tmp_path, form)
    for number in range(len(SHARDS)):
        size = sum(tensor.nbytes for tensor in fill(number, form).tensors.values())
        assert index.num_bytes(number) == size
        assert size < shard_path(tmp_path, number).stat().st_size < size + 2000


def test_a_shard_is_mapped_and_not_loaded(tmp_path):
    write_store(tmp_path, make_form())
    store = StateStore(tmp_path)
    path = str(shard_path(tmp_path, 0))
    pointer = store.open(0).tensors["features"].data_ptr()
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(path)]
    assert any(pointer in range(*(int(x, 16) for x in line.split()[0].split("-"))) for line in lines)


@pytest.fixture
def reads(monkeypatch) -> list[tuple[int, int]]:
    """Requests to read ahead (first byte, number of bytes), which are cut to 48 bytes."""
    requests = []
    monkeypatch.setattr(state_store, "READ_AHEAD_BYTES", 48)

    def record(_file, first, count, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        requests.append((first, count))

    monkeypatch.setattr(os, "posix_fadvise", record)
    return requests


def test_the_kernel_is_asked_for_a_documents_bytes_and_no_others(tmp_path, form, reads):
    write_store(tmp_path, form)
    store = StateStore(tmp_path)
    for number, span in enumerate(SHARDS):
        content = shard_path(tmp_path, number).read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        entries = json.loads(content[8:start])
        del entries["__metadata__"]
        place = {name: [start + end for end in entry["data_offsets"]] for name, entry in entries.items()}
        store.open(number)
        opening = {byte for first, count in reads for byte in range(first, first + count)}
        tables = "documents", "lengths", "checksums", "supervised"
        assert opening == set(range(48)) | {byte for name in tables for byte in range(*place[name])}
        row = supervised = 0
        for slot, length in enumerate(LENGTHS[number]):
            reads.clear()
            store.read(number, slot)
            count = sum(row <= token < row + length for token in SUPERVISED[number])
            expected = []
            for name in place.keys() - {"documents", "lengths", "checksums"}:
                final = name.startswith("last_hidden")
                size = (place[name][1] - place[name][0]) // (span.num_supervised if final else span.num_tokens)
                first, rows = (supervised, count) if final else (row, length)
                expected += range(place[name][0] + first * size, place[name][0] + (first + rows) * size)
            assert max((size for _, size in reads), default=0) <= 48
            assert sorted(byte for first, size in reads for byte in range(first, first + size)) == sorted(expected)
            row = row + length
            supervised = supervised + count
        reads.clear()


@pytest.mark.parametrize("change", ["no such advice", "the file's name is gone"])
def test_documents_come_back_where_the_kernel_cannot_be_asked(tmp_path, monkeypatch, change):
    write_store(tmp_path, make_form())
    store = StateStore(tmp_path)
    if change == "no such advice":
        monkeypatch.delattr(os, "posix_fadvise")
    else:
        store.open(0)
        shard_path(tmp_path, 0).unlink()
    assert raw(store.read(0, 2)["features"]) == raw(fill(0, make_form()).document(2)["features"])


def test_a_flipped_bit_is_found_in_its_document_alone(tmp_path, form):
    write_store(tmp_path, form)
    content = bytearray(shard_path(tmp_path, 0).read_bytes())
    needle = bytes(raw(fill(0, form).document(2)["features"]))
    content[content.index(needle) + 5] ^= 1
    shard_path(tmp_path, 0).write_bytes(content)
    store = StateStore(tmp_path)
    store.read(0, 0)
    with user_error(r"shard-00000.safetensors is damaged \(document 2 .*--shards 0 --yes"):
        store.read(0, 2)


@pytest.mark.parametrize("name", ["tokens", "supervised", "features", "features_scales", "last_hidden", "lengths"])
def test_no_tensor_may_change(tmp_path, name):
    """Writes it with the checksums of its earlier content."""
    form = make_form(dtype="fp8")
    index = write_store(tmp_path, form)
    content = shard_path(tmp_path, 0).read_bytes()
    changed = fill(0, form)
    before = bytes(raw(changed.tensors[name]))
    values = changed.tensors[name].view(torch.uint8)
    values[0] = 1 - values[0]
    assert content.count(before) == 1
    shard_path(tmp_path, 0).write_bytes(content.replace(before, bytes(raw(changed.tensors[name]))))
    store = StateStore(tmp_path)
    with user_error("shard-00000.safetensors is damaged"):
        [store.read(0, slot) for slot in range(SHARDS[0].count)]
    assert index.missing(tmp_path) == []


def test_files_that_are_no_shard_of_this_capture_are_named(tmp_path):
    form = make_form()
    write_store(tmp_path, form)
    first, second, third = (shard_path(tmp_path, number) for number in range(3))
    first.write_bytes(first.read_bytes()[:-7])
    shutil.copy(third, second)
    third.unlink()
    store = StateStore(tmp_path)
    for number, fault in ((0, "is damaged"), (1, "belongs to another capture"), (2, "is missing")):
        message = rf"shard-0000{number}.safetensors {fault}.*; rebuild it: .* --shards {number} --yes"
        with user_error(message):
            store.read(number, 0)
    assert store.index.missing(tmp_path) == [2]
    assert [store.is_complete(number) for number in range(3)] == [True, True, False]
    make_index(form, data_hash="d" * 64).write(tmp_path)
    write_shard(tmp_path, 1, fill(1, form), store.capture)
    with user_error("shard-00001.safetensors belongs to another capture"):
        StateStore(tmp_path).read(1, 0)


def test_tensors_of_another_dtype_are_refused(tmp_path):
    index = write_store(tmp_path, make_form(dtype="bf16"))
    with user_error("shard-00000.safetensors is damaged .its tensors are not those"):
        open_shard(tmp_path, 0, SHARDS[0], make_form(dtype="fp32"), index.digest)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing fails after `size` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_no_half_shard(tmp_path):
    form = make_form()
    index = make_index(form)
    with largest_file(700), user_error("could not be written .* make room and run the same"):
        write_shard(tmp_path, 0, fill(0, form), index.digest)
    assert list(tmp_path.iterdir()) == []
    write_shard(tmp_path, 0, fill(0, form), index.digest)
    assert oct(os.stat(shard_path(tmp_path, 0)).st_mode)[-3:] == "644"


@pytest.mark.parametrize("name", IDENTITY)
def test_what_differs_from_the_run_is_named(tmp_path, name):
    make_index(make_form()).write(tmp_path)
    store = StateStore(tmp_path)
    store.check(IDENTITY)
    with user_error(rf"{name} is {IDENTITY[name][:12]}, the run's is dddddddddddd; "):
        store.check(IDENTITY | {name: "d" * 64})


def test_states_that_are_not_there_are_named(tmp_path):
    make_index(make_form(last_hidden=False)).write(tmp_path)
    store = StateStore(tmp_path)
    store.check_states((3, 1), final_state=False)
    with user_error(r"hold \[1, 3\], the draft reads \[1, 2\]"):
        store.check_states((1, 2), final_state=False)
    with user_error("lack the state after the final norm"):
        store.check_states((1, 3), final_state=True)
    make_index(make_form(layers=(1, 6), last_hidden=False)).write(tmp_path)
    StateStore(tmp_path).check_states((1,), final_state=True)


def test_a_folder_without_an_index_is_refused(tmp_path):
    with user_error("holds no captured states; make them with `slipstream capture-states`"):
        StateStore(tmp_path)
    (tmp_path / "index.json").write_text('{"version": 0}')
    with user_error("has version 0, this program reads 1"):
        StateStore(tmp_path)
