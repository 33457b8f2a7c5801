"""Protobuf messages with any fields at all, drawn by Hypothesis."""

from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

_BY_TYPE: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_INT32: st.integers(-3, 30) | st.sampled_from([-(2**31), 2**31 - 1]),
    FieldDescriptor.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_ENUM: st.integers(0, 9),
}


def messages_of(
    descriptor: Descriptor, texts: st.SearchStrategy[str]
) -> st.SearchStrategy[dict[str, Any]]:
    """Draw fields of a message, each whatever its type takes; strings are of `texts`."""
    return st.fixed_dictionaries(
        {}, optional={field.name: _values_of(field, texts) for field in descriptor.fields}
    )


def _values_of(field: FieldDescriptor, texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    if field.message_type and field.message_type.GetOptions().map_entry:
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        return st.dictionaries(_values_of(key, texts), _values_of(value, texts), max_size=3)
    if field.message_type:
        one: st.SearchStrategy[Any] = messages_of(field.message_type, texts)
    else:
        one = texts if field.type == FieldDescriptor.TYPE_STRING else _BY_TYPE[field.type]
    return st.lists(one, max_size=4) if field.is_repeated else one
