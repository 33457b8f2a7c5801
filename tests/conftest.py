"""What holds for all suites."""

from tests.fuzz import load_profile

load_profile()
