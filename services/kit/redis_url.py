"""The setting that names a Redis."""

import re
from typing import Annotated

from pydantic import AfterValidator, SecretStr


def _checked(url: SecretStr) -> SecretStr:
    if not re.match(r"(rediss?|unix)://.", url.get_secret_value()):
        raise ValueError("must begin with redis://, rediss:// or unix://, and name a server")
    return url


RedisUrl = Annotated[SecretStr, AfterValidator(_checked)]  # it may hold a password
