"""Gateways' streams: submits in, frames of tokens out."""
