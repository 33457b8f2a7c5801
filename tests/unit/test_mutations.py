"""What `tests.mutations` breaks is still there."""

import pytest

from tests.mutations import MUTATIONS
from tests.mutations.mutation import ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_every_mutation_finds_the_line_that_it_breaks(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.right) == 1
