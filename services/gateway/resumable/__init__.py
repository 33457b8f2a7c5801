"""Streams whose readers may leave and come back."""
