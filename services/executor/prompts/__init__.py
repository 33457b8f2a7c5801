"""Prompts and answers between text and vLLM's form: templates, tokens, parsers, grammars."""
