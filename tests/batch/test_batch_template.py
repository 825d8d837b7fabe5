"""The template: columns by name, errors that name the column, nothing that leaves the sandbox."""

import pytest

from anyrig.batch.config import BatchConfig
from anyrig.batch.prompt import Prompt, RowProblem
from anyrig.batch.template import MissingColumn, Template, TemplateError
from anyrig.core.errors import UsageError


def test_columns_are_filled_in_and_null_is_no_text():
    assert Template("{{ a }}|{{ b }}|{{ c.d[0] }}").render({"a": "x<y", "b": None, "c": {"d": [1]}}) == "x<y||1"


def test_columns_with_any_name_are_reached_through_row():
    assert Template('{{ row["first name"] }}').render({"first name": "Ada"}) == "Ada"


@pytest.mark.parametrize(
    "text",
    [
        "{{ txt }}",
        "{{ txt|upper }}",
        "{{ txt * 2 }}",
        "{% if txt %}{% endif %}",
        "{{ txt.foo }}",
        "{{ -txt }}",
        "{{ txt() }}",
    ],
)
def test_a_missing_column_is_named_with_the_nearest_one(text):
    with pytest.raises(MissingColumn, match=r"no column `txt`: did you mean `text`\? The row has id, text"):
        Template(text).render({"id": 1, "text": "x"})


def test_a_template_may_ask_whether_a_column_is_there():
    assert Template("{{ a|default('-') }}{{ b is defined }}").render({}) == "-False"


@pytest.mark.parametrize(
    "text", ["{{ a.b }}", "{{ 1 / 0 }}", "{{ ''.__class__ }}", "{% include 'x' %}", "{{ a.append(1) }}"]
)
def test_what_goes_wrong_inside_is_the_rows_error(text):
    with pytest.raises(TemplateError, match="--prompt can't be filled"):
        Template(text).render({"a": []})


def test_a_syntax_error_is_found_when_the_template_is_read():
    with pytest.raises(UsageError, match=r"--prompt is not a template.*line 2.*b {{ x"):
        Template("a\nb {{ x")


def test_a_template_comes_from_a_file(tmp_path):
    (tmp_path / "p.txt").write_text("Say {{ a }}\n")
    assert Template.of_option(f"@{tmp_path}/p.txt", "--prompt").render({"a": 1}) == "Say 1"
    with pytest.raises(UsageError, match=r"--prompt names a file that can't be read.*none\.txt"):
        Template.of_option(f"@{tmp_path}/none.txt", "--prompt")


def test_single_braces_around_a_column_are_taken_for_a_mistake():
    with pytest.raises(UsageError, match=r"a column is written \{\{ text \}\}"):
        Prompt(BatchConfig(prompt="Say {text}")).check_columns(["id", "text"])


def test_an_empty_prompt_is_a_row_problem():
    with pytest.raises(RowProblem, match="the prompt is empty"):
        Prompt(BatchConfig(prompt="{{ a }}")).messages({"a": "  "})


def test_messages_come_from_a_column_as_list_or_as_json_text():
    prompt = Prompt(BatchConfig(messages_column="m", system="You are {{ who }}"))
    system, user = {"role": "system", "content": "You are S"}, {"role": "user", "content": "hi"}
    assert prompt.messages({"m": [user], "who": "S"}) == [system, user]
    assert prompt.messages({"m": '[{"role": "user", "content": "hi"}]', "who": "S"}) == [system, user]
    own = {"role": "system", "content": "own"}
    assert prompt.messages({"m": [own, user], "who": "S"}) == [own, user]


@pytest.mark.parametrize(
    "value", ["hi", [], [{"role": "user"}], {"role": "user", "content": "x"}, [{"role": "u", "content": 1}]]
)
def test_messages_of_another_shape_are_a_row_problem(value):
    with pytest.raises(RowProblem, match="`m`"):
        Prompt(BatchConfig(messages_column="m")).messages({"m": value})


def test_a_job_without_prompt_is_told_how_to_give_one():
    with pytest.raises(UsageError, match="--prompt 'Summarize"):
        Prompt(BatchConfig())
