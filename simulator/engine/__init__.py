"""One engine in virtual time: its scheduler, its steps, its readers."""
