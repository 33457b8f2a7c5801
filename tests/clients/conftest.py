"""A gateway in front of a fake executor, for the clients that people use."""

import os

from tests.integration.conftest import client, executor

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it asks the network when it is imported

__all__ = ["client", "executor"]
