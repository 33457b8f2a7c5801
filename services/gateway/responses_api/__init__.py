"""OpenAI's Responses API, without memory of earlier responses."""
