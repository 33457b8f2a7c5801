"""How answers are written."""

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.openai.responses import MAX_LIST_STEP, encode_json, encode_large_json
from tests.fuzz import examples

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda some: some * MAX_LIST_STEP)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(20))
@given(values)
def test_what_is_encoded_in_many_steps_is_the_same(value) -> None:
    assert encode_large_json(value) == encode_json(value)
