"""An option that does not exist is refused with the one that was meant."""

import pytest

from cli.parser import NearestNameParser, nearest

KNOWN = ["--num-prompts", "--num-warmups", "--request-rate", "--slo-tbt-ms", "-h"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("--num-prompt", "--num-prompts"),
        ("--num-promtps", "--num-prompts"),
        ("--request-rates", "--request-rate"),
        ("--prompts", "--num-prompts"),
        ("--tbt", "--slo-tbt-ms"),
        ("--nothing-like-it", None),
        ("--", None),
    ],
)
def test_the_nearest_name_is_the_one_that_was_meant(name: str, expected: str | None) -> None:
    assert nearest(name, KNOWN) == expected


@pytest.fixture
def parser() -> NearestNameParser:
    parser = NearestNameParser(prog="evenflow bench", allow_abbrev=False)
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--extra-body", type=str)
    return parser


def test_what_exists_is_parsed_by_vllms_rules(parser: NearestNameParser) -> None:
    assert parser.parse_args(["--num_prompts", "3"]).num_prompts == 3


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--num-prompt", "3"], "there is no option --num-prompt; did you mean --num-prompts?"),
        (["--num_promts=3"], "there is no option --num-promts; did you mean --num-prompts?"),
        (["--xyz"], "there is no option --xyz\n"),
        (["three", "four"], "three four: belongs to no option"),
        (["--num-prompts", "many"], "argument --num-prompts: invalid int value: 'many'"),
    ],
)
def test_what_does_not_is_refused_in_a_sentence(
    parser: NearestNameParser, capsys: pytest.CaptureFixture[str], arguments, sentence
) -> None:
    with pytest.raises(SystemExit) as left:
        parser.parse_args(arguments)

    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert "`evenflow bench --help`" in said
