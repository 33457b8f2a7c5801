"""What acts on an engine between its steps: measures, asks for plans, judges and enforces them."""
