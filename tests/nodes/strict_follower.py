"""`python -m tests.nodes.strict_follower`: a follower, whose KV is poisoned where it is freed."""

from services.executor.follower.app import main
from tests.nodes.strict_kv import be_strict

if __name__ == "__main__":
    be_strict()
    main()
