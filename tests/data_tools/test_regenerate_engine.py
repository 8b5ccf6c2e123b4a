"""`slipstream regenerate` with an engine in the same process: answers, options, drops, interrupts."""

import json

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from slipstream.data_tools import prepare, regenerate
from slipstream.models.files.checkpoint import tokenizer_hash
from slipstream.serve.request import Output
from slipstream.tests.data_tools.chats import CHATML, build_tokenizer, chat, write_jsonl
from slipstream.tests.data_tools.fake_answers import EXPECTED, ROWS, FakeLLM, answered, error, lines, report, run
from slipstream.tests.random_targets import SHAPE, save_random_target
from slipstream.tests.tables import each_case

with_llms = pytest.mark.usefixtures("llms")


@pytest.fixture
def llms(monkeypatch) -> list[FakeLLM]:
    """The engines that programs made, in place of the real one."""
    engines = []

    def make(*arguments, **options):
        engines.append(FakeLLM(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr(regenerate, "LLM", make)
    return engines


def test_engine_answers_every_turn(tmp_path, make_folder, llms, capsys):
    target = make_folder("{{ '<|im_start|>' + strftime_now('%d %b %Y') }}" + CHATML)
    options = ["--target", target, "--temperature", 0.7, "--engine.max_running", 3, "--draft", "d"]
    rows = run(tmp_path, *options, "--date", "2023-03-05")
    assert "frozen at 2023-03-05" in capsys.readouterr().out
    assert [row["id"] for row in rows] == [row["id"] for row in ROWS]
    assert [row["messages"] for row in rows] == EXPECTED
    (llm,) = llms
    assert llm.options == {"draft": "d", "revision": None, "trust_remote_code": False, "max_running": 3}
    assert llm.most_running == llm.room
    assert llm.tokenizer.decode(llm.requests[0].prompt).startswith("<|im_start|>05 Mar 2023<|im_start|>user")
    assert {request.params.temperature for request in llm.requests} == {0.7}
    assert (report(tmp_path)["rows_in"], report(tmp_path)["rows_kept"]) == (30, 30)


@with_llms
def test_engine_rows_hold_the_exact_tokens_and_prepare_takes_them(tmp_path, target):
    rows = run(tmp_path, "--target", target)
    tokenizer = AutoTokenizer.from_pretrained(target)
    for row, messages in zip(rows, EXPECTED, strict=True):
        ids = []
        mask = []
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(messages[:turn], add_generation_prompt=True, return_dict=True)
            answer = tokenizer(message["content"] + "<|im_end|>")["input_ids"]
            mask += [0] * (len(prompt["input_ids"]) - len(ids)) + [1] * len(answer)
            ids = prompt["input_ids"] + answer
        assert (row["input_ids"], row["loss_mask"]) == (ids, mask)
    assert {row["tokenizer_hash"] for row in rows} == {tokenizer_hash(tokenizer)}
    out = str(tmp_path / "prepared")
    prepare.main(["--data", str(tmp_path / "out.jsonl"), "--target", str(target), "--output", out])
    prepared = json.loads((tmp_path / "prepared" / "report.json").read_text())
    assert prepared["rows_kept"] == 30


@with_llms
def test_turns_that_come_due_when_no_dialogue_is_left(tmp_path, target):
    rows = run(tmp_path, "--target", target, rows=ROWS[4:5])
    assert [row["messages"] for row in rows] == EXPECTED[4:5]


@with_llms
def test_answers_depend_on_seed_and_id_alone(tmp_path, target):
    rows = run(tmp_path, "--target", target, "--seed", 5)
    assert [row["messages"] for row in rows] == [answered(row, 5) for row in ROWS]
    alone = run(tmp_path, "--target", target, "--seed", 5, "--overwrite", rows=ROWS[7:8])
    assert alone == [rows[7]]


def test_the_context_bounds_answers_and_prompts(tmp_path, target, llms):
    long = {"id": "long", "messages": chat("What is it? " * 30)}
    rows = run(tmp_path, "--target", target, "--engine.max_model_len", 60, rows=[*ROWS[:2], long])
    assert [row["id"] for row in rows] == ["row0", "row1"]
    assert report(tmp_path)["rows_dropped"] == {"prompt_too_long": 1}
    assert all(len(request.prompt) + request.params.max_tokens == 60 for request in llms[0].requests)


def test_cut_answers(tmp_path, target, llms):
    rows = run(tmp_path, "--target", target, "--max-tokens", 3, rows=ROWS[:2])
    assert [row["finish_reason"] for row in rows] == ["length", "length"]
    assert [sum(row["loss_mask"]) for row in rows] == [3, 3]
    options = ["--target", target, "--max-tokens", 3, "--cut", "drop", "--overwrite"]
    assert run(tmp_path, *options, rows=ROWS[:2]) == []
    assert report(tmp_path)["rows_dropped"] == {"cut_by_max_tokens": 2}
    run(tmp_path, *options[:-1], rows=ROWS[:2])
    assert llms[-1].requests == []  # what was dropped on purpose is not tried again


@with_llms
def test_rows_that_the_engine_ends_are_failures(tmp_path, target, monkeypatch, capsys):
    def stream(_, requests):
        for request in requests:
            yield Output(request_id=request.id, tokens=[], finish_reason="abort")

    monkeypatch.setattr(FakeLLM, "stream", stream)
    assert "2 rows failed (the engine ended the request)" in error(capsys, tmp_path, "--target", target, rows=ROWS[:2])
    assert report(tmp_path)["rows_failed"] == 2


@pytest.mark.parametrize(("words", "total"), [((), 30), (("--samples", 2, "--temperature", 1), 60)])
def test_a_run_is_continued_where_it_was_interrupted(tmp_path, target, words, total, llms, monkeypatch, capsys):
    rows = run(tmp_path, "--target", target, *words)
    stream = FakeLLM.stream

    def interrupted(self, requests):
        for number, output in enumerate(stream(self, requests)):
            if number == 40:
                raise KeyboardInterrupt
            yield output

    monkeypatch.setattr(FakeLLM, "stream", interrupted)
    with pytest.raises(SystemExit) as caught:
        run(tmp_path, "--target", target, "--overwrite", *words)
    assert caught.value.code == 130
    assert "interrupted; the same command continues from" in capsys.readouterr().err
    monkeypatch.setattr(FakeLLM, "stream", stream)
    prefix = lines(tmp_path)
    assert 0 < len(prefix) < total
    capsys.readouterr()
    assert run(tmp_path, "--target", target, *words) == rows
    messages = capsys.readouterr().err
    assert f"{len(prefix)}/{total}" in messages, "rows of the earlier run count"
    assert f"{total}/{total}" in messages
    assert len({request.id for request in llms[-1].requests}) == total - len(prefix)


@with_llms
def test_a_run_that_was_killed_before_its_report_begins_anew(tmp_path, target):
    for ending in ("", ".dropped"):
        (tmp_path / f"out.jsonl{ending}").touch()
    assert [row["messages"] for row in run(tmp_path, "--target", target)] == EXPECTED


@with_llms
def test_a_file_has_one_recipe(tmp_path, target, capsys):
    run(tmp_path, "--target", target, rows=ROWS[:2])
    assert "seed is 1, but" in error(capsys, tmp_path, "--target", target, "--seed", 1)
    assert "was started with 0" in error(capsys, tmp_path, "--target", target, "--seed", 1)
    assert len(run(tmp_path, "--target", target, rows=ROWS[:3])) == 3  # more data is no other recipe
    assert "no conversation to answer" in error(capsys, tmp_path, "--target", target, rows=[])
    (tmp_path / "out.jsonl").unlink()  # with the file goes its recipe, and what it dropped
    (tmp_path / "out.jsonl.dropped").write_text('{"id": "row0", "reason": "cut_by_max_tokens"}\n')
    assert len(run(tmp_path, "--target", target, "--seed", 1, rows=ROWS[:2])) == 2
    assert report(tmp_path)["rows_dropped"] == {}


def test_each_prompt_gets_several_answers(tmp_path, target, llms, capsys):
    def answer(*flags):
        return run(tmp_path, "--target", target, "--temperature", 1, *flags, rows=ROWS[3:6])

    single = answer()
    assert answer("--samples", 2)[::2] == single, "rows of the file are kept"
    rows = answer("--samples", 3)
    assert {request.id for request in llms[-1].requests} == {"row3#2", "row4#2", "row5#2"}
    ids = [f"row{number}{sample}" for number in (3, 4, 5) for sample in ("", "#1", "#2")]
    assert [row["id"] for row in rows] == ids
    assert [row.get("sample_of") for row in rows[:4]] == [None, "row3", "row3", None]
    expected = [answered({**ROWS[3 + place // 3], "id": identity}) for place, identity in enumerate(ids)]
    assert [row["messages"] for row in rows] == expected, "each sample goes on with its own answers"
    assert len({str(messages) for messages in expected}) == 9
    figures = report(tmp_path)
    assert [figures[name] for name in ("rows_in", "samples", "rows_kept")] == [3, 9, 9]
    message = error(capsys, tmp_path, "--target", target, "--temperature", 1, "--samples", 2, rows=ROWS[3:6])
    assert "samples is 2, but" in message
    assert "was started with 3; give as many or more" in message
    assert answer("--samples", 3, "--overwrite") == rows


@with_llms
def test_a_file_that_a_version_with_fewer_options_began_is_continued(tmp_path, target, capsys):
    run(tmp_path, "--target", target, rows=ROWS[:2])
    path = tmp_path / "out.jsonl.report"
    values = json.loads(path.read_text())
    del values["options"]["top_k"]
    path.write_text(json.dumps(values))
    assert "was started with 0; use that" in error(capsys, tmp_path, "--target", target, "--top-k", 5)
    assert len(run(tmp_path, "--target", target, rows=ROWS[:3])) == 3


def test_the_target_of_a_file_does_not_change_under_its_name(tmp_path, make_folder, llms, monkeypatch, capsys):
    target = make_folder(CHATML, 512)
    run(tmp_path, "--target", target, rows=ROWS[:2])
    fault = f"target {target} or its chat template has changed since"
    with monkeypatch.context() as patch:
        patch.setattr(regenerate, "weights_fingerprint", lambda _: "other weights")
        assert fault in error(capsys, tmp_path, "--target", target)
    build_tokenizer("<s>" + CHATML).save_pretrained(target)
    assert fault in error(capsys, tmp_path, "--target", target)
    assert len(llms) == 1


@with_llms
def test_a_run_that_ended_before_its_first_row_binds_the_next_one_to_nothing(tmp_path, target, capsys):
    assert "target /absent does not exist" in error(capsys, tmp_path, "--target", "/absent")
    assert not (tmp_path / "out.jsonl").exists()
    assert "absent.jsonl does not exist" in error(capsys, tmp_path, "--target", "/absent", "--data", "absent.jsonl")
    assert len(run(tmp_path, "--target", target, "--max-tokens", 3, "--cut", "drop")) < len(ROWS)
    (tmp_path / "out.jsonl").write_text("")  # what was dropped is the work of one recipe, too
    assert "cut is 'keep', but" in error(capsys, tmp_path, "--target", target, "--max-tokens", 3)


@each_case()
def test_bad_options_get_one_sentence(tmp_path, options, message, capsys):
    assert message in error(capsys, tmp_path, *options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("out.jsonl", '{"id": "a"}\n{"id": "b"}', "is not a file of answers, with out.jsonl.report beside it,"),
        ("out.jsonl.report", "mine", "is not a report of slipstream regenerate"),
        ("out.jsonl.report", '{"options": []}', "is not a report of slipstream regenerate"),
        (
            "out.jsonl.dropped",
            '{"id": "a", "text": "mine"}\n',
            "is not a list of rows that slipstream regenerate dropped",
        ),
    ],
)
@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_files_of_others_are_neither_continued_nor_replaced(tmp_path, name, content, message, more, capsys):
    (tmp_path / name).write_text(content)
    assert f"{message} and is not replaced; name another file" in error(
        capsys, tmp_path, "--target", "nobody/absent", *more
    )
    assert (tmp_path / name).read_text() == content
    assert {path.name for path in tmp_path.iterdir()} == {name, "rows.jsonl"}


def test_an_input_is_no_output(tmp_path, target, exits):
    """Not even the file of its report."""
    data = write_jsonl(tmp_path / "out.jsonl.report", ROWS)
    with exits(f"{data} is data {data}, which is read"):
        regenerate.main(
            ["--target", str(target), "--data", str(data), "-o", str(tmp_path / "out.jsonl"), "--overwrite"]
        )


def test_the_real_engine_writes_what_the_target_generates(tmp_path):
    tokenizer = build_tokenizer(CHATML)
    shape = {**SHAPE, "vocab_size": 320, "head_dim": 16, "eos_token_id": tokenizer.eos_token_id}
    save_random_target(Qwen3Config(**shape), tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = run(tmp_path, "--target", tmp_path / "model", "--max-tokens", 12, rows=ROWS[:6])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32")
    for row in rows:
        if row["id"] == "row4":
            continue
        prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_tensors="pt")
        generated = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0].tolist()
        assert row["input_ids"] == generated
        assert sum(row["loss_mask"]) == len(generated) - prompt["input_ids"].shape[1]
