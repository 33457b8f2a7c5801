"""Requests and answers: their types and their wire form, as gateway and executor share them."""
