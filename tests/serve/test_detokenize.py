"""Incremental text against decoding everything at once, and stop strings against a search over the full text."""

import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slipstream.serve.detokenize import Decoder, TextStream
from slipstream.serve.request import RequestStats

CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "Grüße, 你好 世界! 👩‍👩‍👧 ",
    "x = [1, 2, 3]\n\treturn x\n",
] * 20
SPECIAL = ["<s>", "</s>", "<|pad|>"]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2 style: any bytes, so random ids give broken characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<|pad|>")


@cache
def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama-2 style: words carry their leading space, unknown characters become byte tokens."""
    pieces = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + [chr(code) for code in range(33, 127)]
    pieces += ["▁", "▁t", "he", "▁the", "▁the▁"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁the", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<|pad|>")


TOKENIZERS = {"byte_level": byte_level, "byte_fallback": byte_fallback}
TEXTS = st.text(alphabet=st.one_of(st.sampled_from("the abX.\n▁"), st.characters(codec="utf-8")), max_size=60)


def push_in_chunks(stream: TextStream, tokens: list[int], seed: int, finish: str = "length") -> list[str]:
    """Pushes `tokens` in random chunks; the last one carries the finish reason."""
    chance = random.Random(seed)
    pieces, start = [], 0
    while start < len(tokens):
        end = min(start + chance.randint(1, 5), len(tokens))
        pieces.append(stream.push(tokens[start:end], finish if end == len(tokens) else None))
        start = end
    return pieces


def naive_stop(text: str, stop: list[str]) -> int | None:
    """Reads character by character; where the text is cut once a stop string is complete."""
    for end in range(1, len(text) + 1):
        starts = [end - len(string) for string in stop if text[:end].endswith(string)]
        if starts:
            return min(starts)
    return None


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS, seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_full_decoding(name: str, text: str, seed: int) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    chance = random.Random(seed)
    for _ in range(chance.randint(0, 3)):
        tokens.insert(chance.randint(0, len(tokens)), chance.randrange(3))  # special tokens leave no text
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    for watched in (True, False):
        stream = TextStream(Decoder(tokenizer), watched=watched)
        assert "".join(push_in_chunks(stream, tokens, seed)) == expected
        assert stream.num_tokens == len(tokens)


@given(tokens=st.lists(st.integers(0, len(byte_level()) - 1), min_size=1, max_size=60), seed=st.integers(0, 1000))
@settings(max_examples=150, deadline=None)
def test_random_ids_with_broken_characters(tokens: list[int], seed: int) -> None:
    pieces = push_in_chunks(TextStream(Decoder(byte_level())), tokens, seed)
    assert "".join(pieces) == byte_level().decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(
    text=st.text(alphabet="abc 你👍\n", max_size=40),
    stop=st.lists(st.text(alphabet="abc 你👍\n", min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_stop_strings_equal_a_naive_search(name: str, text: str, stop: list[str], seed: int) -> None:
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    full = tokenizer.decode(tokens)
    stream = TextStream(Decoder(tokenizer), stop)
    shown = "".join(push_in_chunks(stream, tokens, seed))
    cut = naive_stop(full, stop)
    assert stream.stopped == (cut is not None)
    assert shown == full[:cut]
    if cut is None:
        assert stream.num_tokens == len(tokens)
        return
    # The counted tokens are the fewest whose text holds a stop string.
    assert naive_stop(tokenizer.decode(tokens[: stream.num_tokens]), stop) is not None
    assert naive_stop(tokenizer.decode(tokens[: stream.num_tokens - 1]).rstrip("\ufffd"), stop) is None


A, B, SHARP, QUESTION, DOT = (byte_level().convert_tokens_to_ids(token) for token in "ab#?.")


def test_text_that_may_begin_a_stop_string_waits() -> None:
    stream = TextStream(Decoder(byte_level()), ["###", "#?"])
    assert stream.push([A, SHARP]) == "a"
    assert stream.push([SHARP]) == ""
    assert stream.push([A]) == "##a"
    assert stream.push([SHARP, QUESTION, A], "length") == ""
    assert stream.stopped
    assert stream.num_tokens == 6
    assert stream.push([A], "abort") == ""


def test_half_characters_wait_and_the_end_shows_them() -> None:
    first, *rest = byte_level()("\U0001f9ff", add_special_tokens=False).input_ids
    stream = TextStream(Decoder(byte_level()))
    assert stream.push([first]) == ""
    assert stream.push(rest) == "\U0001f9ff"
    assert stream.push([first], "length") == "\ufffd"


@pytest.mark.parametrize(("stop", "watched"), [((), True), ((), False), (("zz",), True)])
def test_a_stop_id_is_counted_but_not_shown(stop: tuple[str, ...], watched: bool) -> None:
    stream = TextStream(Decoder(byte_level()), stop, watched=watched)
    assert stream.push([A]) + stream.push([A, B], "stop") == "aa"
    assert stream.num_tokens == 3


def test_counts_without_what_came_after_the_stop_string() -> None:
    stream = TextStream(Decoder(byte_level()), ["."])
    stream.push([A])  # prompt pass
    stream.push([A, A, A])  # two drafts accepted
    stream.push([A, DOT, A, A])  # three accepted, the second of them completes the stop string
    stream.push([A, A])  # a round too late
    stream.push([], "abort")
    stats = RequestStats(
        prompt_tokens=5, completion_tokens=10, rounds=3, drafted_tokens=9, accepted_by_position=[3, 2, 1]
    )
    cut = stream.cut(stats)
    assert (cut.prompt_tokens, cut.completion_tokens, cut.rounds, cut.drafted_tokens) == (5, 6, 2, 6)
    assert cut.accepted_by_position == [2, 2, 0]
    stats = RequestStats(prompt_tokens=5, completion_tokens=1)
    stream = TextStream(Decoder(byte_level()), ["."])
    stream.push([A], "length")
    assert stream.cut(stats) is stats, "no stop string"


def test_no_fewer_drafts_than_were_accepted() -> None:
    """N-gram drafts differ in length: here all of them stand in the round that the stop string ends."""
    stream = TextStream(Decoder(byte_level()), ["."])
    for tokens in ([A], [A, A, A, DOT, A], [A]):  # the last: a round too late, without a draft
        stream.push(tokens)
    stats = RequestStats(completion_tokens=7, rounds=2, drafted_tokens=4, accepted_by_position=[1, 1, 1, 1])
    cut = stream.cut(stats)
    assert (cut.rounds, cut.accepted_tokens, cut.drafted_tokens) == (1, 4, 4)


class Shouting(PreTrainedTokenizerFast):
    """A model's tokenizer with a decode of its own."""

    def _decode(self, *arguments: Any, **options: Any) -> str:
        return super()._decode(*arguments, **options).upper()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_backend_decodes_what_transformers_does(name: str) -> None:
    tokenizer, rng = TOKENIZERS[name](), random.Random(7)
    decoder = Decoder(tokenizer)
    assert decoder._backend is not None
    for length in range(12):
        tokens = rng.choices(range(len(tokenizer)), k=length)
        expected = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert decoder(tokens) == expected
    own = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    assert Decoder(own)(own("the fox", add_special_tokens=False)["input_ids"]) == "THE FOX"


def test_the_first_tokens_are_not_searched_for_stop_strings() -> None:
    tokenizer = byte_level()
    alphabet = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    tokens = [alphabet[letter] for letter in "ababab"]
    for num_free, expected in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (6, "ababab")):
        text = TextStream(Decoder(tokenizer), ["ab"], min_tokens=num_free)
        assert text.push(tokens[:4]) + text.push(tokens[4:], "length") == expected
        assert text.stopped == (num_free < 6)
