"""`python -m services.executor.follower`"""

from services.executor.follower.app import main

if __name__ == "__main__":
    main()
