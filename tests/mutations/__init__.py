"""Do the tests notice? Mechanisms that are broken one at a time, by what they belong to."""

from itertools import chain

from tests.mutations import blocks, copies, deciding, executor, gateway, others, scheduler

PARTS = (blocks, copies, deciding, executor, gateway, others, scheduler)
MUTATIONS = tuple(chain.from_iterable(part.MUTATIONS for part in PARTS))
