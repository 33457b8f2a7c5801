"""`python -m services.tracker`"""

from services.tracker.app import main

if __name__ == "__main__":
    main()
