"""docs/api.md and docs/dialects.md list the parameters that there are and those refused."""

import re
from pathlib import Path

import pytest

from services.gateway.anthropic.bodies import MessagesBody
from services.gateway.openai.bodies import REFUSED as REFUSED_NAMES
from services.gateway.openai.bodies import ChatCompletionBody, CompletionBody
from services.gateway.openai.parsing import parse_body
from services.gateway.responses_api.bodies import ResponsesBody
from services.kit.errors import InvalidRequestError

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "api.md").read_text()
DIALECTS = (DOCS / "dialects.md").read_text()
SUPPORTED, _, REST = TEXT.partition("### Parameters")[2].partition("\nRefused with 400")
REFUSED = REST.partition("\nSo are ")[0]
BODIES = {"chat": ChatCompletionBody, "completions": CompletionBody}


def documented(column: int) -> set[str]:
    """Return the parameters with a "yes" in a column of the first table."""
    rows = [line.split("|")[1:] for line in SUPPORTED.splitlines() if line.startswith("| `")]
    return {row[0].strip(" `") for row in rows if row[column].strip() == "yes"}


@pytest.mark.parametrize(("column", "endpoint"), [(1, "chat"), (2, "completions")])
def test_every_parameter_is_documented_and_no_other(column, endpoint) -> None:
    assert documented(column) == set(BODIES[endpoint].model_fields)


@pytest.mark.parametrize("endpoint", BODIES)
def test_what_is_said_to_be_refused_is(endpoint) -> None:
    rows = [line.split("|")[2].partition(":")[0] for line in REFUSED.splitlines() if "| `" in line]
    names = re.findall(r"`(\w+)`", "".join(rows))
    good = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi"}
    base = {
        name: value for name, value in good.items() if name in documented(1 + (endpoint != "chat"))
    }
    assert set(names) == REFUSED_NAMES
    for name in names:
        with pytest.raises(InvalidRequestError) as refused:
            parse_body(BODIES[endpoint], base | {name: "x"})
        assert refused.value.field == name


@pytest.mark.parametrize(
    ("section", "body"), [("Responses", ResponsesBody), ("Messages", MessagesBody)]
)
def test_parameters_of_the_other_apis_are_documented_and_no_other(section, body) -> None:
    text = DIALECTS.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    table, _, rest = text.partition("\n\n- Refused with 400 by name")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    refused = rest.partition("\n-")[0]

    assert set(re.findall(r"`(\w+)[`:]", "".join([*rows, refused]))) == set(body.model_fields)
