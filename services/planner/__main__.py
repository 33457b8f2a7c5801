"""`python -m services.planner`"""

from services.planner.app import main

if __name__ == "__main__":
    main()
