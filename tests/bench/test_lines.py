"""Results of a benchmark that does not get to its end."""

import json

from slipstream.bench.lines import Lines


def test_a_line_is_in_the_file_as_soon_as_it_is_measured(tmp_path, capsys):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"bench": "older"}\n')
    lines = Lines(path, {"bench": "some", "batch": 1})
    expected = [{"bench": "older"}]
    for batch in (8, 64):
        assert lines.add({"batch": batch}) == {"bench": "some", "batch": batch}
        expected.append({"bench": "some", "batch": batch})
        assert [json.loads(line) for line in path.read_text().splitlines()] == expected
    lines.print()
    assert capsys.readouterr().out.splitlines() == path.read_text().splitlines()[1:]
