"""What xgrammar keeps to of a JSON schema, and what it would leave out without a word."""
