"""Runs the vLLM engine and streams its tokens to gateways."""
