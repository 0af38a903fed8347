"""Plain values survive the way to TOML and back, whatever stands in their text."""

import pytest

from shoal.core.errors import ConfigError
from shoal.core.toml import from_toml, read_text, to_toml

pytestmark = pytest.mark.unit

TEXTS = [
    'a "quoted" word',
    "back\\slash",
    "läyer.层.🐟",
    "tab\tline\nreturn\r\n",
    "\x00\x1f\x7f\x85\u2028",
    "#[x] = 'y'",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_as_key_value_item_and_table(text):
    values = {text: text, "list": [text, "b"], "table": {text: text}}
    assert from_toml(to_toml(values), "here") == values


def test_numbers_and_booleans_keep_their_type_and_every_digit():
    values = {
        "a": True,
        "b": 1,
        "c": 0.1 + 0.2,
        "d": 1e-300,
        "e": 1e22,
        "f": float("inf"),
        "g": [False, 2, -3.5],
        "h": [],
    }
    back = from_toml(to_toml(values), "here")
    assert back == values
    assert {name: type(value) for name, value in back.items()} == {name: type(value) for name, value in values.items()}


def test_values_of_a_table_stay_in_it_and_none_is_left_out():
    assert to_toml({"t": {"x": 1}, "none": None, "after": 2}) == "after = 2\n\n[t]\nx = 1\n"


def test_tables_lists_of_tables_and_lists_of_lists_stand_in_each_other():
    values = {
        "a": {"b": {"c": 1, "d e": {"f": [1.5]}}, "empty": {}, "g": 2},
        "rows": [{"x": 1, "points": [[1.0, 2], [3, 4.5]], "sub": {"y": "z,}"}}, {}],
    }
    assert from_toml(to_toml(values), "here") == values


def test_rows_of_a_list_are_a_line_each_and_tables_have_headers():
    text = to_toml({"t": {"u": {"x": 1}, "rows": [{"a": 1, "none": None}, {"a": 2}]}})
    assert text == "\n[t]\nrows = [\n    { a = 1 },\n    { a = 2 },\n]\n\n[t.u]\nx = 1\n"


def test_text_that_is_not_toml_is_refused_with_its_place():
    with pytest.raises(ConfigError, match=r"plan.toml is not TOML: .*line 2.*write name = value lines"):
        from_toml("a = 1\nb: 2\n", "plan.toml")


def test_what_toml_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="a set cannot be written as TOML"):
        to_toml({"a": {1}})


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none.toml cannot be read as a plan: No such file.*give the path of a file"):
        read_text(tmp_path / "none.toml", "a plan")
    (tmp_path / "latin.toml").write_bytes(b'a = "\xe4"')
    with pytest.raises(ConfigError, match="cannot be read as a plan: byte 5 is not UTF-8; save it as UTF-8"):
        read_text(tmp_path / "latin.toml", "a plan")
