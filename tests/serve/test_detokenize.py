"""Incremental text against decoding everything at once, and stop strings against a search over the full text."""

import itertools
import random
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slipstream.serve.detokenize import Decoder, TextStream, TokenTexts, beginnings_of, longest_beginning
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
each_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def push_in_chunks(stream: TextStream, tokens: list[int], seed: int, finish: str = "length") -> list[str]:
    """Pushes `tokens` in random chunks; the last one carries the finish reason."""
    chance = random.Random(seed)
    pieces = []
    start = 0
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


@each_tokenizer
@given(
    text=st.text(alphabet="abc 你👍\n", max_size=40),
    stop=st.lists(st.text(alphabet="abc 你👍\n", min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_stop_strings_equal_a_naive_search(name, text, stop, seed):
    tokenizer = TOKENIZERS[name]()
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    full = tokenizer.decode(tokens)
    stream = TextStream(Decoder(tokenizer), stop)
    streamed = "".join(push_in_chunks(stream, tokens, seed))
    cut = naive_stop(full, stop)
    assert stream.stopped == (cut is not None)
    assert streamed == full[:cut]
    if cut is None:
        assert stream.num_tokens == len(tokens)
        return
    # The counted tokens are the fewest whose text holds a stop string.
    assert naive_stop(tokenizer.decode(tokens[: stream.num_tokens]), stop) is not None
    assert naive_stop(tokenizer.decode(tokens[: stream.num_tokens - 1]).rstrip("\ufffd"), stop) is None


def lossy(name: str, tokens: list[int], prompt: list[int]) -> str:
    """The text that the bytes of all tokens spell, without that of the prompt and the space that begins a text."""
    tokenizer = TOKENIZERS[name]()
    texts = TokenTexts(tokenizer)

    def spelled(ids):
        text = b"".join(texts.bytes_of(token) for token in ids if token >= len(SPECIAL)).decode(errors="replace")
        return text.removeprefix(" ") if name == "byte_fallback" else text

    return spelled(prompt + tokens)[len(spelled(prompt)) :]


class CountingDecoder(Decoder):
    num_decoded = 0

    def __call__(self, tokens: list[int]) -> str:
        self.num_decoded += len(tokens)
        return super().__call__(tokens)


@each_tokenizer
@given(data=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_ids_decode_alike_whole_and_in_pieces_after_any_prompt(name, data, seed):
    """Characters that are cut anywhere, stray bytes, and bytes of other characters among them."""
    tokenizer = TOKENIZERS[name]()
    ids = st.integers(0, len(tokenizer) - 1)
    texts = st.text(alphabet="日😀é a", max_size=6) | TEXTS
    cut = texts.map(lambda text: tokenizer(text, add_special_tokens=False).input_ids)
    parts = st.lists(st.one_of(cut, cut.map(lambda tokens: tokens[1:-1]), st.lists(ids, max_size=5)), max_size=6)
    tokens = [token for part in data.draw(parts) for token in part]
    prompt = tokenizer(data.draw(st.text(alphabet="ab the日\n", max_size=12)), add_special_tokens=False).input_ids
    for context in ([], prompt):
        expected = lossy(name, tokens, context)
        for stop, watched in (((), True), ((), False), (("\0zz",), False)):
            stream = TextStream(Decoder(tokenizer), stop, watched=watched, prompt=context)
            assert "".join(push_in_chunks(stream, tokens, seed)) == expected
            assert stream.num_tokens == len(tokens)
        if "\ufffd" not in expected:
            decoded = tokenizer.decode(context + tokens, skip_special_tokens=True)
            assert expected == decoded[len(tokenizer.decode(context, skip_special_tokens=True)) :]


@pytest.mark.parametrize(
    "spelling", [b" \xa1", b"  \xa1", b" \xf0\x9f", b"a \xa1", b" a\xa1 ", b"\xa1 b", b" \xa1\xa1\xa1\xa1 "]
)
def test_the_space_that_begins_a_text_is_dropped_before_stray_bytes_too(spelling):
    ids = byte_fallback().convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in spelling])
    letters = {ord(letter): byte_fallback().convert_tokens_to_ids(letter) for letter in "ab"}
    spelled = [letters.get(byte, id) for byte, id in zip(spelling, ids, strict=True)]
    for tokens, watched in itertools.product((ids, spelled), (True, False)):
        stream = TextStream(Decoder(byte_fallback()), watched=watched)
        pieces = [stream.push([token]) for token in tokens[:-1]]
        expected = spelling.removeprefix(b" ").decode(errors="replace")
        assert "".join([*pieces, stream.push(tokens[-1:], "length")]) == expected


@cache
def word_level() -> PreTrainedTokenizerFast:
    """One token a word, joined by spaces."""
    words = [*SPECIAL, "the", "fox", "jumps", "."]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<|pad|>")


@pytest.mark.parametrize("tokenizer", [byte_level(), byte_fallback(), word_level()], ids=[*TOKENIZERS, "word_level"])
@pytest.mark.parametrize("watched", [True, False])  # as over HTTP, in pieces, and as LLM.generate, at the end
def test_an_answer_goes_on_from_its_prompt(tokenizer, watched):
    tokens = tokenizer("the fox jumps.", add_special_tokens=False).input_ids
    for end in range(len(tokens)):
        before = tokenizer.decode(tokens[:end])
        decoded = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        stream = TextStream(Decoder(tokenizer), watched=watched, prompt=tokens[:end])
        assert before + "".join(push_in_chunks(stream, tokens[end:], end)) == decoded


@each_tokenizer
@pytest.mark.parametrize("bytes_of_tokens", [b"\xa1", b"\xf0\x9f", b"\xe6\x97\xa5\xe6", b""])
def test_the_work_is_linear_for_any_tokens(name, bytes_of_tokens):
    """Bytes that complete no character, and ids that have no text at all; text is told as it comes."""
    tokenizer = TOKENIZERS[name]()
    count = 2000
    texts = TokenTexts(tokenizer)
    ids = {texts.bytes_of(token): token for token in range(len(SPECIAL), len(tokenizer))}
    tokens = [ids[bytes([byte])] for byte in bytes_of_tokens] or [len(tokenizer) + 7]
    decoder = CountingDecoder(tokenizer)
    stream = TextStream(decoder)
    pieces = []
    for index in range(count):
        pieces.append(stream.push([tokens[index % len(tokens)]]))
    assert decoder.num_decoded < 20 * count
    length = len("".join(pieces).encode(errors="replace").decode())
    assert length >= (count - 8) / len(tokens) * (len(bytes_of_tokens) > 0)


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_a_cut_answer_keeps_its_complete_characters(stop):
    tokens = byte_fallback()("日本😀語", add_special_tokens=False).input_ids[:-1]
    for watched in (True, False):
        stream = TextStream(Decoder(byte_fallback()), stop, watched=watched)
        assert "".join(push_in_chunks(stream, tokens, 3)) == "日本😀\ufffd"


A, B, SHARP, QUESTION, DOT = (byte_level().convert_tokens_to_ids(token) for token in "ab#?.")


def test_text_that_may_begin_a_stop_string_waits():
    stream = TextStream(Decoder(byte_level()), ["###", "#?"])
    assert stream.push([A, SHARP]) == "a"
    assert stream.push([SHARP]) == ""
    assert stream.push([A]) == "##a"
    assert stream.push([SHARP, QUESTION, A], "length") == ""
    assert stream.stopped
    assert stream.num_tokens == 6
    assert stream.push([A], "abort") == ""


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4))
def test_a_text_is_compared_with_stop_strings_that_it_begins(text, strings):
    """However long a token is: the event loop looks at each."""
    compared = []

    class Stop(str):
        def startswith(self, *arguments):
            compared.append(self)
            return super().startswith(*arguments)

    stop = tuple(map(Stop, strings))
    length = longest_beginning(text, stop, beginnings_of(stop))
    ends = [text[start:] for start in range(len(text))]
    assert length == max((len(end) for end in ends for string in strings if string[:-1].startswith(end)), default=0)
    assert len(compared) <= len(stop) * (length > 0)


def test_half_characters_wait_and_the_end_shows_them():
    first, *rest = byte_level()("\U0001f9ff", add_special_tokens=False).input_ids
    stream = TextStream(Decoder(byte_level()))
    assert stream.push([first]) == ""
    assert stream.push(rest) == "\U0001f9ff"
    assert stream.push([first], "length") == "\ufffd"


@pytest.mark.parametrize(("stop", "watched"), [((), True), ((), False), (("zz",), True)])
def test_a_stop_id_is_counted_but_not_shown(stop, watched):
    stream = TextStream(Decoder(byte_level()), stop, watched=watched)
    assert stream.push([A]) + stream.push([A, B], "stop") == "aa"
    assert stream.num_tokens == 3


def test_counts_without_what_came_after_the_stop_string():
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


def test_no_fewer_drafts_than_were_accepted():
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


@each_tokenizer
def test_the_backend_decodes_what_transformers_does(name):
    tokenizer = TOKENIZERS[name]()
    rng = random.Random(7)
    decoder = Decoder(tokenizer)
    assert decoder._backend is not None
    for length in range(12):
        tokens = rng.choices(range(len(tokenizer)), k=length)
        expected = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert decoder(tokens) == expected or (name == "byte_fallback" and "\ufffd" in expected)
    shouting = Shouting(tokenizer_object=tokenizer.backend_tokenizer)
    assert Decoder(shouting)(shouting("the fox", add_special_tokens=False)["input_ids"]) == "THE FOX"


def test_the_first_tokens_are_not_searched_for_stop_strings():
    tokenizer = byte_level()
    alphabet = {tokenizer.decode([token]): token for token in range(len(tokenizer))}
    tokens = [alphabet[letter] for letter in "ababab"]
    for num_free, expected in ((0, ""), (1, "ab"), (2, "ab"), (3, "abab"), (6, "ababab")):
        text = TextStream(Decoder(tokenizer), ["ab"], min_tokens=num_free)
        assert text.push(tokens[:4]) + text.push(tokens[4:], "length") == expected
        assert text.stopped == (num_free < 6)
