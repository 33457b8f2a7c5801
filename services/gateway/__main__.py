"""`python -m services.gateway`"""

from services.gateway.app import main

if __name__ == "__main__":
    main()
