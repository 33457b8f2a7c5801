"""Policies in virtual time: a discrete-event simulator of one engine, its link and its readers."""
