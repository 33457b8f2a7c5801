"""`python -m services.executor`"""

from services.executor.app import main

if __name__ == "__main__":
    main()
